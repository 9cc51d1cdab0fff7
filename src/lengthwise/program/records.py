"""What a lowered microbatch is made of: segments of sequences, transfers grouped into rounds, and block tasks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple


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


class Content(StrEnum):
    """What a message carries.

    Keys and values or gradients along a ring; operands, results or gradients in a group that splits heads; of layers
    that are no attention states, maps of states, and tokens before a span (`program.spans`), or their gradients.
    """

    KV = "kv"
    DKV = "dkv"
    QKV = "qkv"
    OUT = "out"
    QKV_OUT = "qkv_out"
    GRAD_OUT = "grad_out"
    DQKV = "dqkv"
    STATE = "state"
    MAP = "map"
    HALO = "halo"

    @property
    def goes_home(self) -> bool:
        """Whether it goes from who computes some heads to who holds the tokens."""
        return self in (Content.OUT, Content.DQKV)


class HeadRange(NamedTuple):
    """One `part` of a model's attention heads, cut into `parts` of equally many; a tuple, as keys of each layer."""

    part: int = 0
    parts: int = 1


ALL_HEADS = HeadRange()


class Transfer(NamedTuple):
    """One message of a round: `content` about `heads` of so many `tokens`; a tuple, as large worlds have millions.

    owner: whose tokens they are: a position of the ring for what travels along it, else a position of the piece. The
    `tokens` of states and maps are sequences, whose state has a size that the layer knows.
    """

    source: int
    target: int
    piece: int
    content: Content
    owner: int
    tokens: int
    heads: HeadRange = ALL_HEADS

    def turned(self) -> Transfer:
        """Return the message that goes back."""
        return self._replace(source=self.target, target=self.source)


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """The transfers that all ranks of a microbatch make in one grouped call each, under the blocks of one ring step."""

    transfers: tuple[Transfer, ...]

    def turned(self) -> Round:
        """Return the round in which each message goes back."""
        return Round(transfers=tuple(map(Transfer.turned, self.transfers)))


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRound:
    """One rank's part in a round: what it sends and receives, in the order of the round."""

    sends: tuple[Transfer, ...] = ()
    receives: tuple[Transfer, ...] = ()

    @classmethod
    def of(cls, rank: int, transfers: Iterable[Transfer]) -> RankRound:
        """Return the part of a rank in these transfers."""
        sends, receives = list[Transfer](), list[Transfer]()
        for transfer in transfers:
            if transfer.source == rank:
                sends.append(transfer)
            if transfer.target == rank:
                receives.append(transfer)
        return cls(sends=tuple(sends), receives=tuple(receives))

    def turned(self) -> RankRound:
        """Return the round in which each message goes back."""
        sends, receives = (tuple(map(Transfer.turned, each)) for each in (self.receives, self.sends))
        return RankRound(sends=sends, receives=receives)


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockTask:
    """One block of attention: local queries against the keys of position `owner` of the piece's ring.

    q_start, q_stop: of the rank's rows of `heads` (`MicrobatchProgram.row_starts`). kv_start, kv_stop: of the shard of
    `owner`. causal: on the diagonal: every query is in exactly one, its first. distance: the first query's token less
    the first key's. window: set where its edge crosses the block.
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
    heads: HeadRange = ALL_HEADS
