"""A grid of ranks x slots, filled so that every rank has as much to do, and as much of it in each slot as asked for.

For pipelines: a slot is one microbatch of each rank that has work in it, all ranks go through the slots in one order
(`stage_order`), and what a microbatch may take is known before anything is placed. Sequences that take longer than a
slot are cut (`degrees`); small rings of one degree share a microbatch; rings lie side by side on shelves, one a slot,
widest first, the longest shelf in the middle of the full slots. Then the local sequences, longest first, go to the rank
with the most left to take, there into the cell with the most left and room. Sequences and capacity are coarse, so what
a rank has in its cells is at last put in the order of the asked sizes. Costs O(n log(N M)) for n sequences, M slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lengthwise.core.held import held_at_most
from lengthwise.core.plan import Microbatch, Piece
from lengthwise.program.ring_order import ring_order

_OPEN_BUNDLES = 8  # bundles of one degree in which room is looked for
_BISECTIONS = 40
_COARSE = 1.02  # of a slot's time, that a bundle of rings may take

Floats = NDArray[np.float64]


class Bundle(NamedTuple):
    """Rings over the same ranks in one microbatch: what they hold of each rank, and how long they take together."""

    sequences: tuple[int, ...]
    degree: int
    held_tokens: int
    seconds: float


def bundle_rings(
    rings: Sequence[tuple[int, int, int, float]], *, capacity_tokens: int, most_seconds: float
) -> list[Bundle]:
    """Let rings of one degree share microbatches, as far as room and time go.

    Args:
        rings: (sequence, its tokens, degree, seconds) of each, by degree, widest first.
        capacity_tokens: what a rank holds in a microbatch.
        most_seconds: of a bundle; a ring that takes longer is a bundle of its own.
    """
    bundles: list[Bundle] = []
    open_: list[int] = []
    for sequence, tokens, degree, seconds in rings:
        held = held_at_most(tokens, degree)
        if open_ and bundles[open_[0]].degree != degree:
            open_ = []
        for number in open_:
            each = bundles[number]
            if each.seconds + seconds <= most_seconds * _COARSE and each.held_tokens + held <= capacity_tokens:
                together = (*each.sequences, sequence)
                bundles[number] = Bundle(together, degree, each.held_tokens + held, each.seconds + seconds)
                break
        else:
            open_ = [len(bundles), *open_][:_OPEN_BUNDLES]
            bundles.append(Bundle((sequence,), degree, held, seconds))
    return bundles


class Grid:
    """Ranks x slots; `weights` say how much of a full slot each slot should take, 0 to 1."""

    def __init__(self, ranks: int, weights: Floats, bundles: Sequence[Bundle], capacity_tokens: int) -> None:
        self.ranks, self.capacity_tokens = ranks, capacity_tokens
        shelves = _shelves(bundles, ranks)
        full = np.flatnonzero(weights >= 1.0)
        self.weights = np.insert(weights, full[0], np.ones(max(0, len(shelves) - len(full))))
        full = np.flatnonzero(self.weights >= 1.0)
        middle = full[np.argsort(np.abs(np.arange(len(full)) - (len(full) - 1) / 2), kind="stable")]
        self.taken = np.zeros((ranks, len(self.weights)))  # seconds of rings
        self.rooms = np.full((ranks, len(self.weights)), capacity_tokens, dtype=np.int64)
        self.rings: list[list[tuple[int, Bundle]]] = [[] for _ in self.weights]
        self.cells: dict[tuple[int, int], list[int]] = {}
        shelves.sort(key=lambda shelf: -max(bundle.seconds for _, bundle in shelf))
        for shelf, slot in zip(shelves, middle.tolist(), strict=False):
            for left, bundle in shelf:
                first = left if slot % 2 == 0 else ranks - left - bundle.degree  # neither end has all the rings
                self.rings[slot].append((first, bundle))
                self.taken[first : first + bundle.degree, slot] = bundle.seconds
                self.rooms[first : first + bundle.degree, slot] -= bundle.held_tokens

    def targets(self, rank_seconds: float) -> Floats:
        """Tell what each cell may take beside its rings so that all of a rank comes to `rank_seconds`."""
        low, high = np.zeros(self.ranks), np.full(self.ranks, 2 * rank_seconds / self.weights.max())
        for _ in range(_BISECTIONS):
            middle = (low + high) / 2
            fits = np.maximum(self.weights * middle[:, None], self.taken).sum(axis=1) <= rank_seconds
            low, high = np.where(fits, middle, low), np.where(fits, high, middle)
        return np.maximum(self.weights * low[:, None], self.taken) - self.taken

    def fill(self, local: Sequence[int], tokens: Sequence[int], seconds: Sequence[float], rank_seconds: float) -> bool:
        """Put local sequences, given longest first, into cells; return whether all of them found room.

        The longest goes to the rank with the most left to take. All ranks that come before one of them is first again
        are dealt to at once.
        """
        targets, rooms, num_slots = self.targets(rank_seconds), self.rooms.copy(), len(self.weights)
        left, most_room = targets.sum(axis=1), rooms.max(axis=1)
        lengths, took = np.array(tokens, dtype=np.int64)[local], np.array(seconds)[local]
        cells = np.empty(len(local), dtype=np.int64)
        done = 0
        while done < len(local):
            open_ = np.flatnonzero(most_room >= lengths[done])
            if len(open_) == 0:
                return False
            ranks = open_[np.argsort(-left[open_], kind="stable")][: len(local) - done]
            after = np.maximum.accumulate(left[ranks] - took[done : done + len(ranks)])
            in_turn = np.flatnonzero(after[:-1] > left[ranks[1:]])  # there, one that was dealt to is first again
            ranks = ranks[: in_turn[0] + 1] if len(in_turn) else ranks
            dealt = slice(done, done + len(ranks))
            held = lengths[dealt]
            slots = np.where(rooms[ranks] >= held[:, None], targets[ranks], -np.inf).argmax(axis=1)
            rooms[ranks, slots] -= held
            targets[ranks, slots] -= took[dealt]
            left[ranks] -= took[dealt]
            most_room[ranks] = rooms[ranks].max(axis=1)
            cells[dealt] = ranks * num_slots + slots
            done += len(ranks)
        for sequence, cell in zip(local, cells.tolist(), strict=True):
            self.cells.setdefault(divmod(cell, num_slots), []).append(sequence)
        in_cells = np.bincount(cells, took, self.ranks * num_slots).astype(np.float64)
        self._sort_cells(in_cells.reshape(self.ranks, num_slots).tolist())
        return True

    def _sort_cells(self, seconds: list[list[float]]) -> None:
        """Put each rank's cells without rings in the order of the weights, by the seconds that are really in them."""
        mine: dict[int, list[int]] = {}
        for rank, slot in self.cells:
            if self.taken[rank, slot] == 0:
                mine.setdefault(rank, []).append(slot)
        height = np.minimum(np.arange(len(self.weights)), np.arange(len(self.weights))[::-1]).tolist()
        weights = self.weights.tolist()
        for rank, slots in mine.items():
            slots.sort(key=lambda slot: (weights[slot], height[slot], slot))
            by_seconds = sorted(slots, key=seconds[rank].__getitem__)
            held = [self.cells.pop((rank, slot)) for slot in by_seconds]
            self.cells.update({(rank, slot): cell for slot, cell in zip(slots, held, strict=True)})

    def microbatches(self) -> list[Microbatch]:
        """Write the grid slot by slot; local packs beside rings share their microbatch."""
        written: list[Microbatch] = []
        for slot, rings in enumerate(self.rings):
            for first, bundle in rings:
                ranks = ring_order(first, bundle.degree)
                pieces = [Piece(ranks=ranks, sequences=(sequence,)) for sequence in bundle.sequences]
                pieces += [
                    _local(rank, self.cells.pop((rank, slot))) for rank in sorted(ranks) if (rank, slot) in self.cells
                ]
                written.append(Microbatch(pieces=tuple(pieces)))
            for rank in range(self.ranks):
                if (rank, slot) in self.cells:
                    written.append(Microbatch(pieces=(_local(rank, self.cells[rank, slot]),)))
        return written


def _local(rank: int, sequences: Sequence[int]) -> Piece:
    return Piece(ranks=(rank,), sequences=tuple(sequences))


def _shelves(bundles: Sequence[Bundle], ranks: int) -> list[list[tuple[int, Bundle]]]:
    """Lay bundles, widest first, side by side on as few shelves as first fit finds: (first rank, bundle)."""
    shelves: list[list[tuple[int, Bundle]]] = []
    ends: list[int] = []
    for bundle in sorted(bundles, key=lambda bundle: (-bundle.degree, -bundle.seconds)):
        place = next((place for place, end in enumerate(ends) if ranks - end >= bundle.degree), len(ends))
        if place == len(ends):
            ends.append(0)
            shelves.append([])
        shelves[place].append((ends[place], bundle))
        ends[place] += bundle.degree
    return shelves
