"""What layers without attention pass along a cut sequence: states of scans, and the tokens before a convolution.

The *spans* of a position are its low and its high chunk, of the last position both together. In a *sweep* of d - 1
rounds it learns the states before them:

    up,   round r: position r -> r + 1          the state before the low span of r + 1
    down, round r: position d-1-r -> d-2-r      the map of all tokens between the two spans of d-2-r

If sequences continue others, rounds up follow those down, because position 0 needs all maps to begin
(docs/decisions/states-by-sweep.md). Backward has the same rounds.

A convolution over `width` tokens needs the width - 1 tokens before each span, its *halo*, also of continued sequences:
one round, beyond neighbours only if chunks are shorter.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from lengthwise.core.cut import chunk_bounds
from lengthwise.core.plan import Piece, line_to
from lengthwise.program.lower import MicrobatchProgram
from lengthwise.program.records import Content, RankRound, Round, Transfer
from lengthwise.program.ring_order import far_from, ring_peers


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixing:
    """Data beside keys that a layer or a model passes along sequences. width: its longest convolution, in tokens."""

    has_states: bool = False
    width: int = 1


ATTENTION_ALONE = Mixing()


class SpanKey(NamedTuple):
    """Span `number` of a sequence."""

    sequence: int
    number: int


class SequenceSpan(NamedTuple):
    """Tokens `start` to `stop` of a sequence, adjacent on one rank from local row `row` on.

    number: number of the span in its sequence, 0 to 2 x degree - 2. position: position that holds it.
    """

    piece: int
    sequence: int
    number: int
    position: int
    start: int
    stop: int
    row: int

    @property
    def key(self) -> SpanKey:
        """Its key in the microbatch."""
        return SpanKey(self.sequence, self.number)

    @property
    def rows(self) -> slice:
        """The local rows of its tokens."""
        return slice(self.row, self.row + self.stop - self.start)


class HaloMove(NamedTuple):
    """Tokens `start` to `stop` of the source's sequence, which the span `target` needs before it."""

    piece: int
    target: SpanKey
    source: SpanKey
    start: int
    stop: int


def spans_of(program: MicrobatchProgram, rank: int) -> tuple[SequenceSpan, ...]:
    """List the spans of a rank in local order, empty ones too."""
    spans, row = list[SequenceSpan](), 0
    for index, piece, position in program.pieces_of(rank):
        for sequence in piece.sequences:
            bounds = _span_bounds(program.tokens[sequence], piece)
            for number in dict.fromkeys((position, 2 * piece.degree - 2 - position)):
                start, stop = bounds[number : number + 2]
                spans.append(SequenceSpan(index, sequence, number, position, start, stop, row))
                row += stop - start
    return tuple(spans)


def sweep_rounds(program: MicrobatchProgram) -> tuple[Round, ...]:
    """Return the rounds of a sweep of all pieces, forward or backward; `tokens` of a transfer are sequences."""
    pieces, length = range(len(program.microbatch.pieces)), _sweep_length(program)
    return tuple(Round(transfers=tuple(_sweep_transfers(program, pieces, number))) for number in range(length))


def sweep_rounds_of(program: MicrobatchProgram, rank: int) -> tuple[RankRound, ...]:
    """Return one rank's part in `sweep_rounds`, without the rounds in which it does nothing."""
    pieces, length = [index for index, *_ in program.pieces_of(rank)], _sweep_length(program)
    rounds = (RankRound.of(rank, _sweep_transfers(program, pieces, number)) for number in range(length))
    return tuple(each for each in rounds if each.sends or each.receives)


def halo_round(program: MicrobatchProgram, width: int) -> Round:
    """Return the round in which all ranks exchange the halos of a convolution; backward turns it."""
    return Round(transfers=tuple(halo_transfers(program, halo_moves(program, width))))


def halo_round_of(program: MicrobatchProgram, rank: int, width: int) -> RankRound:
    """Return one rank's part in `halo_round`."""
    return RankRound.of(rank, halo_transfers(program, halo_moves(program, width, rank)))


def halo_transfers(program: MicrobatchProgram, moves: Iterable[HaloMove]) -> Iterator[Transfer]:
    """Yield the messages of these moves, in order; moves within a rank need none."""
    for move in moves:
        piece = program.microbatch.pieces[move.piece]
        source, target = (_position(piece, span.number) for span in (move.source, move.target))
        if source != target:
            tokens = move.stop - move.start
            yield Transfer(piece.ranks[source], piece.ranks[target], move.piece, Content.HALO, source, tokens)


def halo_moves(program: MicrobatchProgram, width: int, rank: int | None = None) -> Iterator[HaloMove]:
    """Yield the tokens that each span needs before it from other spans, only from or to `rank` if given.

    Those of a span are in the order of the text.
    """
    if rank is None:
        places = [(index, piece, None) for index, piece in enumerate(program.microbatch.pieces)]
    else:
        places = [*program.pieces_of(rank)]
    for index, piece, position in places:
        count = 2 * piece.degree - 1
        held = range(count) if position is None else {position, count - 1 - position}
        for sequence in piece.sequences:
            line = line_to(sequence, program.parents)
            if count == len(line) == 1:
                continue
            bounds = _line_bounds([program.tokens[one] for one in line], piece)
            starts, own = range(0, len(bounds) - 1, count), len(bounds) - 1 - count
            pairs = {pair for start in starts for number in held for pair in _halo_pairs(bounds, start + number, width)}
            for target, source in sorted(pair for pair in pairs if pair[0] >= own):
                into, out_of = (SpanKey(line[span // count], span % count) for span in (target, source))
                start, first = max(bounds[source], bounds[target] - width + 1), bounds[source - source % count]
                yield HaloMove(index, into, out_of, start - first, bounds[source + 1] - first)


def far_peers(programs: Sequence[MicrobatchProgram], rank: int, mixing: Mixing = ATTENTION_ALONE) -> tuple[int, ...]:
    """List the ranks beyond distance 2 that exchange messages with `rank` in these microbatches."""
    peers = ring_peers(programs, rank)
    for program in programs:
        rounds = [halo_round_of(program, rank, mixing.width)]
        rounds += sweep_rounds_of(program, rank) if mixing.has_states else ()
        peers |= {peer for each in rounds for t in (*each.sends, *each.receives) for peer in (t.source, t.target)}
    return far_from(rank, peers)


def _span_bounds(length: int, piece: Piece) -> tuple[int, ...]:
    """Return the 2 x degree borders of a sequence's spans: those of the chunks without the middle one."""
    bounds = chunk_bounds(length, piece.degree, piece.shares)
    return (*bounds[: piece.degree], *bounds[piece.degree + 1 :])


def _line_bounds(lengths: Sequence[int], piece: Piece) -> tuple[int, ...]:
    """Return the borders of the spans of sequences that continue one another, in order."""
    bounds = _span_bounds(lengths[0], piece)
    for length in lengths[1:]:
        bounds = (*bounds, *(bounds[-1] + bound for bound in _span_bounds(length, piece)[1:]))
    return bounds


def _position(piece: Piece, number: int) -> int:
    return min(number, 2 * piece.degree - 2 - number)


def _halo_pairs(bounds: Sequence[int], number: int, width: int) -> Iterator[tuple[int, int]]:
    """Yield (target, source) of the halos that go to span `number` and come from it."""
    for source in range(number - 1, -1, -1) if bounds[number] < bounds[number + 1] else ():
        if bounds[source + 1] <= bounds[number] - width + 1:
            break
        if bounds[source] < bounds[source + 1]:
            yield number, source
    for target in range(number + 1, len(bounds) - 1) if bounds[number] < bounds[number + 1] else ():
        if bounds[number + 1] <= bounds[target] - width + 1:
            break
        if bounds[target] < bounds[target + 1]:
            yield target, number


def _sweep_length(program: MicrobatchProgram) -> int:
    pieces = enumerate(program.microbatch.pieces)
    return max((piece.degree - 1) * (2 if program.has_branches(index) else 1) for index, piece in pieces)


def _sweep_transfers(program: MicrobatchProgram, pieces: Iterable[int], number: int) -> Iterator[Transfer]:
    for index in pieces:
        piece = program.microbatch.pieces[index]
        last, sequences = piece.degree - 1, len(piece.sequences)
        up, down = number - (last if program.has_branches(index) else 0), last - number
        for source, target, content in ((up, up + 1, Content.STATE), (down, down - 1, Content.MAP)):
            if min(source, target) >= 0 and max(source, target) <= last:
                yield Transfer(piece.ranks[source], piece.ranks[target], index, content, source, sequences)
