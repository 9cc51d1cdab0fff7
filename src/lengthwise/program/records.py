"""The parts of a lowered microbatch: segments of sequences, transfers grouped into rounds, and block tasks."""

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
        """Number of tokens; may be zero."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True, kw_only=True)
class MutualSpans:
    """Spans (start, stop) of each sequence of a plan whose tokens see each other in both directions.

    in_windows: True if they do in layers with a window alone.
    """

    spans: tuple[tuple[tuple[int, int], ...], ...]
    in_windows: bool = False


class Content(StrEnum):
    """The content of a message.

    KV, DKV: keys and values, or their gradients, along a ring. QKV, OUT, QKV_OUT, GRAD_OUT, DQKV: operands, results or
    gradients in a group that splits heads. STATE, MAP, HALO: states, maps of states, and tokens before a span
    (`program.spans`), or their gradients, of layers without attention.
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


class HeadRange(NamedTuple):
    """Part number `part` of a model's attention heads, cut into `parts` equal parts; a tuple, to be a cheap key."""

    part: int = 0
    parts: int = 1


ALL_HEADS = HeadRange()


class Transfer(NamedTuple):
    """One message of a round: `content` of `heads` for `tokens` tokens; a tuple, as large worlds have millions.

    owner: position that owns the tokens: a ring position along a ring, else a position of the piece. For states and
    maps `tokens` counts sequences; the layer knows the size of a state.
    """

    source: int
    target: int
    piece: int
    content: Content
    owner: int
    tokens: int
    heads: HeadRange = ALL_HEADS

    def turned(self) -> Transfer:
        """Return the message in the opposite direction."""
        return self._replace(source=self.target, target=self.source)


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """The transfers of all ranks during one ring step; each rank posts its own in one grouped call."""

    transfers: tuple[Transfer, ...]

    def turned(self) -> Round:
        """Return the round with every message in the opposite direction."""
        return Round(transfers=tuple(map(Transfer.turned, self.transfers)))


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRound:
    """One rank's part in a round: its sends and receives, in the order of the round."""

    sends: tuple[Transfer, ...] = ()
    receives: tuple[Transfer, ...] = ()

    @classmethod
    def of(cls, rank: int, transfers: Iterable[Transfer]) -> RankRound:
        """Return the part of `rank` in these transfers."""
        sends, receives = list[Transfer](), list[Transfer]()
        for transfer in transfers:
            if transfer.source == rank:
                sends.append(transfer)
            if transfer.target == rank:
                receives.append(transfer)
        return cls(sends=tuple(sends), receives=tuple(receives))

    def turned(self) -> RankRound:
        """Return the round with every message in the opposite direction."""
        sends, receives = (tuple(map(Transfer.turned, each)) for each in (self.receives, self.sends))
        return RankRound(sends=sends, receives=receives)


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockTask:
    """One block of attention: local queries against the keys of position `owner` of the piece's ring.

    q_start, q_stop: rows among the rank's rows of `heads` (`MicrobatchProgram.row_starts`). kv_start, kv_stop: tokens
    in the shard of `owner`. causal: True on the diagonal, for the first block of its queries; each query is in one such
    block. distance: first query's token minus the first key's. window: window in tokens if its edge crosses the block.
    ahead: True if query i of a square block sees key i and later ones.
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
    ahead: bool = False
