"""A step of a world of any size without machines: each rank's program in symbols, and whether they all fit together.

A rank posts gathers, grouped transfers and sums; each has a key: (wave, pass, unit entered, ring step). Keys grow on
every rank. If both sides of each message have the same key, content and tokens, in the order in which the pair posts
them, and all ranks the same collectives, then by induction over keys no rank waits for ever. What a rank posts is kept
as one running hash for each pair and side, so a world of 12,288 ranks takes some hundred MB.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from lengthwise.core.plan import Plan
from lengthwise.engine.wave_order import UnitKind, backward_calls, forward_calls
from lengthwise.program.lower import MicrobatchProgram, lower_microbatch
from lengthwise.program.records import Content, RankRound, Transfer

_CONTENTS = {content: number for number, content in enumerate(Content)}
_FORWARD, _BACKWARD = 0, 1


@dataclass(slots=True)
class Posted:
    """What ranks have posted: hashes of messages by (source, target), and of collectives by rank; counts for one layer.

    tokens: that ranks hold in all waves together.
    """

    sent: dict[tuple[int, int], int] = field(default_factory=lambda: defaultdict(int))
    received: dict[tuple[int, int], int] = field(default_factory=lambda: defaultdict(int))
    collectives: dict[int, int] = field(default_factory=dict)
    messages: int = 0
    tokens: int = 0

    def add(self, other: Posted) -> None:
        """Add what other ranks posted."""
        self.sent.update(other.sent)
        self.received.update(other.received)
        self.collectives.update(other.collectives)
        self.messages += other.messages
        self.tokens += other.tokens


def run_symbolically(plan: Plan, ranks: Iterable[int], *, layers: int = 1) -> Posted:
    """Run the program of each of these ranks; layers are alike, so the rounds of one stand for those of all."""
    posted = Posted()
    programs = [lower_microbatch(plan, index) for index in range(len(plan.microbatches))]
    calls = _calls(layers)
    for rank in ranks:
        order = 0
        for program in programs:
            posted.tokens += sum(segment.num_tokens for segment in program.segments(rank))
            order = hash((order, program.index, calls))
            if program.shares(rank):
                _post_rounds(program, rank, posted)
        posted.collectives[rank] = order
    return posted


def check_world(posted: Posted, plan: Plan) -> None:
    """Check what all ranks of a plan posted.

    Raises:
        AssertionError: two sides of a pair, or the collectives of two ranks, are not the same.
    """
    assert sorted(posted.collectives) == list(range(plan.ranks)), "not all ranks ran"
    first = posted.collectives[0]
    others = [rank for rank, order in posted.collectives.items() if order != first]
    assert not others, f"ranks with other collectives than rank 0: {others[:5]}"
    wrong = [pair for pair in posted.sent.keys() | posted.received.keys() if not _is_met(posted, pair)]
    assert not wrong, f"{len(wrong)} pairs whose sides differ, as {wrong[:5]}"
    assert posted.tokens == sum(plan.tokens), f"{posted.tokens} tokens on all ranks, of {sum(plan.tokens)}"


def _is_met(posted: Posted, pair: tuple[int, int]) -> bool:
    return posted.sent.get(pair) == posted.received.get(pair)


def _calls(layers: int) -> tuple[object, ...]:
    """List the gathers and sums of a wave in their order, as the engine posts them; they depend on the model alone."""
    units = [UnitKind(name="embedding"), *[UnitKind(name="layer", again=True)] * layers]
    units.append(UnitKind(name="head", stays=True))
    numbered = [*enumerate(forward_calls(units)), *backward_calls(units)]
    return tuple((entered, call.kind == "gather", call.unit) for entered, calls in numbered for call in calls)


def _post_rounds(program: MicrobatchProgram, rank: int, posted: Posted) -> None:
    for key, each in _rounds(program, rank):
        for side, transfers in ((posted.sent, each.sends), (posted.received, each.receives)):
            for transfer in transfers:
                pair = transfer.source, transfer.target
                side[pair] = hash((side[pair], *key, *_said(transfer)))
        posted.messages += len(each.sends)


def _rounds(program: MicrobatchProgram, rank: int) -> Iterator[tuple[tuple[int, int, int], RankRound]]:
    """Yield what a rank posts in one layer of both passes, with its keys in ascending order."""
    splits = any(piece.heads > 1 for _, piece, _ in program.pieces_of(rank))
    ends: Sequence[tuple[Content, Content]] = ((Content.QKV, Content.OUT), (Content.GRAD_OUT, Content.DQKV))
    rings = (program.forward_rounds_of, program.backward_rounds_of)
    for of_pass, (before, after) in zip((_FORWARD, _BACKWARD), ends, strict=True):
        rounds = rings[of_pass](rank)
        if splits:
            yield (program.index, of_pass, 0), program.exchange_of(rank, before)
        for step, each in enumerate(rounds):
            yield (program.index, of_pass, 1 + step), each
        if splits:
            yield (program.index, of_pass, 1 + len(rounds)), program.exchange_of(rank, after)


def _said(transfer: Transfer) -> tuple[int, ...]:
    content = _CONTENTS[transfer.content]
    return content, transfer.piece, transfer.owner, transfer.tokens, transfer.heads.part, transfer.heads.parts
