"""What a lowered microbatch is made of: segments of sequences, transfers grouped into rounds, and block tasks."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Tokens `start` to `stop` of one sequence, in the order in which a rank holds them."""

    sequence: int
    start: int
    stop: int

    @property
    def num_tokens(self) -> int:
        """Tokens in the segment; may be zero."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """One message of a round: `content` is "kv" (keys and values) or "dkv" (their gradients so far).

    `owner` is the ring position whose tokens the message is about, `tokens` how many they are.
    """

    source: int
    target: int
    piece: int
    content: str
    owner: int
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """The transfers that all ranks of a microbatch make in one grouped call each, under the blocks of one ring step."""

    transfers: tuple[Transfer, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockTask:
    """One block of attention: local queries against the keys of position `owner` of the piece.

    `q_start..q_stop` counts the rank's own tokens in the microbatch, `kv_start..kv_stop` those of the shard of `owner`.
    `causal` blocks are on the diagonal: every query is in exactly one, its first. All others see only earlier tokens.
    `distance` is the first query's token less the first key's; where `window` is set its edge crosses the block.
    """

    piece: int
    sequence: int
    owner: int
    q_start: int
    q_stop: int
    kv_start: int
    kv_stop: int
    causal: bool
    window: int | None = None
    distance: int = 0
