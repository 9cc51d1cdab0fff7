"""Simulated annealing for tiny steps: change one piece at a time; keep what ends sooner, or not much later.

A change moves a sequence or piece, changes a degree, or deals two pieces anew; seeds are fixed. About 10 us per piece
and try. Source: Kirkpatrick et al., Science 1983; docs/decisions/small-steps.md.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from operator import add, itemgetter, sub

from lengthwise.core.held import held_at_most, held_tokens, rounding_tokens
from lengthwise.core.plan import Microbatch, Piece
from lengthwise.planner.problem.effort import CHANGE_SECONDS, FAR
from lengthwise.planner.problem.request import PlanRequest
from lengthwise.planner.problem.step_lengths import NEARLY
from lengthwise.program.ring_order import interval_microbatch

MOST_WORK = 300  # sequences x ranks; above it rules level better than tries
_RUNS = 6  # at most, in turn from the best so far and from rings over all ranks; enough are this many without a gain:
_VAIN = 3
_TRIES = 1_500  # per run
_PLACED = 12_000  # pieces placed per run: fewer tries if there are more than eight pieces
_PATIENCE = 900  # tries without a better plan, after which a run ends
_WARMTH = 0.04  # share of the makespan that a change may cost at first

Cut = tuple[int, tuple[int, ...]]  # a piece: its degree and its sequences
State = list[Cut]  # in the order in which they are placed
Beside = tuple[int, int]  # tokens that fit beside the ring that a rank ran last, and the number of its microbatch


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """A placed state: (first rank, its end, what it leaves beside it) of each piece, and its makespan.

    compared_seconds: measure of tries: the makespan plus the mean time at which ranks are done.
    """

    state: State
    pieces: list[tuple[int, float, Beside]]
    makespan_seconds: float = math.inf
    compared_seconds: float = math.inf


def anneal(request: PlanRequest, microbatches: Sequence[Microbatch], makespan_seconds: float) -> list[Microbatch]:
    """Improve a plan of intervals by trying changes; return it unchanged if none helps."""
    search = Annealing(request)
    best = search.place([(piece.degree, piece.sequences) for each in microbatches for piece in each.pieces])
    vain = 0
    for number in range(_RUNS):
        if vain == _VAIN or best.makespan_seconds <= request.bound_seconds * FAR:
            break
        found = search.run(search.all_in_rings() if number % 2 else best.state)
        best, vain = (found, 0) if found.makespan_seconds < best.makespan_seconds else (best, vain + 1)
    return _write(best, request) if best.makespan_seconds < makespan_seconds * (1 - NEARLY) else list(microbatches)


class Annealing:
    """Tries changes of one step's plan."""

    def __init__(self, request: PlanRequest) -> None:
        self.request, self.ranks, self.capacity = request, request.cluster.ranks, request.cluster.capacity_tokens
        self.degrees = range(1, self.ranks + 1)
        self.launch = [request.cost.fixed_seconds / speed for speed in request.speeds or (1.0,) * self.ranks]
        self.choose = random.Random(0)  # noqa: S311 - nothing secret, and the same everywhere
        self._at_speed = cache(request.cost.at_speed)
        self._priced, self.fits = cache(self._price), cache(self._do_fit)

    def run(self, state: State) -> Placement:
        """Try changes; return the best placement seen."""
        current = best = self.place(state)
        found = 0
        allowed = self.request.planning_seconds / (_RUNS * CHANGE_SECONDS * len(self.request.tokens))
        tries = int(min(_TRIES, _PLACED // len(state), allowed))
        for number in range(tries):
            changed = self.change(current.state)
            if changed is None:
                continue
            warmth = _WARMTH * (1 - number / tries) ** 2
            allowed = current.compared_seconds * (1 - warmth * math.log(1 - self.choose.random()))
            layout = self.place(changed, allowed)
            if layout.compared_seconds <= allowed:
                current = layout
                if layout.makespan_seconds < best.makespan_seconds:
                    best, found = layout, number
            if number - found > _PATIENCE:
                break
        return best

    def change(self, state: State) -> State | None:
        """Return a state with one random change, or None if ranks cannot hold it."""
        choose, new = self.choose, list(state)
        kind, place = choose.randrange(5), choose.randrange(len(state))
        degree, sequences = new[place]
        if kind == 4:
            return self.deal(state, place)
        if kind == 0:
            new.insert(choose.randrange(len(new)), new.pop(place))
            return new
        if kind == 1:
            near = (degree - 1, degree + 1, choose.choice(self.degrees))
            new[place] = (min(self.ranks, max(1, choose.choice(near))), sequences)
            return new if self.fits(*new[place]) else None
        moved = choose.choice(sequences)
        rest = tuple(i for i in sequences if i != moved)
        other = choose.randrange(len(new))
        if kind == 2 and other != place:
            held = new[other][0]
            wider = choose.choice((held, held, min(self.ranks, held + degree), choose.choice(self.degrees)))
            new[other] = (wider, (*new[other][1], moved))
        else:
            other = len(new)
            new.append((choose.choice(self.degrees), (moved,)))
        if not self.fits(*new[other]):
            return None
        if rest:
            new[place] = (degree, rest)
        else:
            del new[place]
        return new

    def deal(self, state: State, place: int) -> State | None:
        """Deal the sequences of two pieces anew, over degrees that fill the line side by side."""
        choose, other = self.choose, self.choose.randrange(len(state))
        hands: tuple[list[int], list[int]] = [], []
        for i in (*state[place][1], *(state[other][1] if other != place else ())):
            hands[choose.randrange(2)].append(i)
        if self.ranks < 2 or not all(hands):
            return None
        degree = choose.randrange(1, self.ranks)
        dealt = [(degree, tuple(hands[0])), (self.ranks - degree, tuple(hands[1]))]
        if not all(self.fits(*piece) for piece in dealt):
            return None
        new = [piece for number, piece in enumerate(state) if number not in (place, other)]
        new[min(place, len(new)) : 0] = dealt
        return new

    def place(self, state: State, allowed: float = math.inf) -> Placement:
        """Place the pieces of a state in order, as long as it may compare within `allowed`."""
        free, beside, pieces = [0.0] * self.ranks, [(0, -1)] * self.ranks, list[tuple[int, float, Beside]]()
        rest = list(map(self._priced, state))
        left = sum(map(itemgetter(3), rest))  # rank-seconds, at least, of those that are not placed yet
        last = 0.0
        for (degree, _), (took, tokens, room, least) in zip(state, rest, strict=True):
            mean = (sum(free) + left) / self.ranks
            if max(last, mean) + mean > allowed * (1 + NEARLY):
                return Placement(state=state, pieces=pieces)
            if degree == 1:
                ends = list(map(add, free, took))
                if self.request.packs_beside_rings:
                    rows = zip(ends, self.launch, beside, strict=True)
                    ends = [end - launch * (tokens <= room) for end, launch, (room, _) in rows]
                end = min(ends)
                first = ends.index(end)
                room, ring = beside[first]
                leaves = (room - tokens, ring) if tokens <= room else (0, len(pieces))
                free[first], beside[first] = end, leaves
            else:
                ends = [max(free[first : first + degree]) + seconds for first, seconds in enumerate(took)]
                end = min(ends)
                first, leaves = ends.index(end), (room, len(pieces))
                if ends.count(end) > 1:
                    places = [place for place, at in enumerate(ends) if at == end]
                    waits = [sum(free[place : place + degree]) for place in places]
                    first = places[waits.index(max(waits))]
                free[first : first + degree], beside[first : first + degree] = [end] * degree, [leaves] * degree
            pieces.append((first, end, leaves))
            last, left = max(last, end), left - least
        compared = last + sum(free) / self.ranks
        return Placement(state=state, pieces=pieces, makespan_seconds=last, compared_seconds=compared)

    def all_in_rings(self) -> State:
        """Pack all sequences, longest first, into rings over all ranks: the other extreme to start from."""
        state: State = []
        for i in sorted(range(len(self.request.tokens)), key=lambda i: (-self.request.tokens[i], i)):
            for number, (_, sequences) in enumerate(state):
                if self.fits(self.ranks, (*sequences, i)):
                    state[number] = (self.ranks, (*sequences, i))
                    break
            else:
                state.append((self.ranks, (i,)))
        return state

    def _price(self, piece: Cut) -> tuple[list[float], int, int, float]:
        """Return a piece's seconds with launch at each first rank, its tokens, and those that fit beside it.

        The last is the least of its rank-seconds, at the fastest place and beside a ring.
        """
        degree, sequences = piece
        lengths = [self.request.tokens[i] for i in sequences]
        cost, topology, speeds = self.request.cost, self.request.topology, self.request.speeds
        extra = topology.extra_seconds(lengths[0], degree) if speeds and len(lengths) == 1 else None
        if speeds is None or extra is not None:
            alone = cost.fixed_seconds + cost.piece_seconds(lengths, degree)
            took = [alone] * (self.ranks - degree + 1) if extra is None else (alone + extra.seconds).tolist()
        else:
            slowest = topology.places(degree).slowest.tolist()
            paced = {speed: self._at_speed(speed) for speed in set(slowest)}
            at = {speed: each.fixed_seconds + each.piece_seconds(lengths, degree) for speed, each in paced.items()}
            took = [at[speed] for speed in slowest]
        has_room = degree > 1 and self.request.packs_beside_rings
        room = self.capacity - self._most_held(degree, sequences) if has_room else 0
        least = degree * min(took) if degree > 1 else min(map(sub, took, self.launch))
        return took, sum(lengths), room, least

    def _most_held(self, degree: int, sequences: tuple[int, ...]) -> int:
        return int(held_tokens([self.request.tokens[i] for i in sequences], degree).max())

    def _do_fit(self, degree: int, sequences: tuple[int, ...]) -> bool:
        """Return whether ranks hold a piece: its tokens in all, and on each position but for rounding."""
        lengths = [self.request.tokens[i] for i in sequences]
        limit = self.capacity + rounding_tokens(len(sequences), degree)
        if sum(lengths) > degree * self.capacity:
            return False
        at_most = sum(held_at_most(length, degree) for length in lengths)
        return at_most <= limit or self._most_held(degree, sequences) <= limit


def _write(layout: Placement, request: PlanRequest) -> list[Microbatch]:
    together: dict[int, list[Piece]] = {}
    for (degree, sequences), (first, _, (_, number)) in zip(layout.state, layout.pieces, strict=True):
        shares = request.topology.shares(request.tokens[sequences[0]], first, degree) if len(sequences) == 1 else None
        together.setdefault(number, []).extend(interval_microbatch(first, degree, sequences, shares).pieces)
    return [Microbatch(pieces=tuple(pieces)) for pieces in together.values()]
