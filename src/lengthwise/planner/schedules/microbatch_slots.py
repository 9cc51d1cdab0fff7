"""Microbatch slots: ranks x slots, filled so that ranks have equal work and each slot its share of it.

A slot is one microbatch of each rank with work in it; all ranks go through the slots in one order (`stage_order`).
Source: shelf packing, first-fit decreasing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lengthwise.core.held import held_at_most
from lengthwise.core.plan import Microbatch, Piece
from lengthwise.program.ring_order import ring_order

COARSE = 1.02  # times this near count as equal: finer steps change no more than packing does

Floats = NDArray[np.float64]
Whole = NDArray[np.int64]


class Bundle(NamedTuple):
    """Rings over the same ranks in one microbatch. held_tokens: tokens per rank. seconds: seconds of all rings."""

    sequences: tuple[int, ...]
    degree: int
    held_tokens: int
    seconds: float


def bundle_rings(
    rings: Sequence[tuple[int, int, int, float]], *, capacity_tokens: int, most_seconds: float
) -> list[Bundle]:
    """Let rings of one degree share microbatches, within limits of tokens and seconds.

    Args:
        rings: (sequence, its tokens, degree, seconds), widest first.
        capacity_tokens: tokens of a rank in a microbatch.
        most_seconds: limit of a bundle; a longer ring is alone.
    """
    bundles = [Bundle((), 0, 0, 0.0)]
    for sequence, tokens, degree, seconds in rings:
        own, last = Bundle((sequence,), degree, held_at_most(tokens, degree), seconds), bundles[-1]
        held, together = last.held_tokens + own.held_tokens, last.seconds + seconds
        if last.degree == degree and held <= capacity_tokens and together <= most_seconds * COARSE:
            bundles[-1] = Bundle((*last.sequences, sequence), degree, held, together)
        else:
            bundles.append(own)
    return bundles[1:]


class MicrobatchSlots:
    """Ranks x slots. weights: share of each slot to fill, 0 to 1.

    At [rank, slot]: `taken`, seconds of rings; `rooms`, tokens that rings leave; `local`, seconds of local sequences.
    `is_first`, at [slot, rank]: False if a rank shares the microbatch of the rank before it.
    """

    def __init__(self, ranks: int, weights: Floats, bundles: Sequence[Bundle], capacity_tokens: int) -> None:
        self.ranks = ranks
        rows = _rows(bundles, ranks)
        full = np.flatnonzero(weights >= 1.0)
        self.weights = np.insert(weights, full[0], np.ones(max(0, len(rows) - len(full))))
        full = np.flatnonzero(self.weights >= 1.0)
        middle = full[np.argsort(np.abs(np.arange(len(full)) - (len(full) - 1) / 2), kind="stable")]
        self.taken = np.zeros((ranks, len(self.weights)))
        self.local = np.zeros_like(self.taken)
        self.rooms = np.full(self.taken.shape, capacity_tokens, dtype=np.int64)
        self.is_first = np.ones((len(self.weights), ranks), dtype=np.bool_)
        self.rings: list[list[tuple[int, Bundle]]] = [[] for _ in self.weights]
        self._places = np.zeros(0, dtype=np.int64)  # rank x slots + slot of each local sequence
        rows.sort(key=lambda row: -max(bundle.seconds for _, bundle in row))
        for row, slot in zip(rows, middle.tolist(), strict=False):
            for left, bundle in row:
                first = left if slot % 2 == 0 else ranks - left - bundle.degree  # alternate the end that has rings
                self.rings[slot].append((first, bundle))
                self.is_first[slot, first + 1 : first + bundle.degree] = False
                self.taken[first : first + bundle.degree, slot] = bundle.seconds
                self.rooms[first : first + bundle.degree, slot] -= bundle.held_tokens

    def targets(self, rank_seconds: float) -> Floats:
        """Return the seconds of each slot beside rings, max(w x - taken, 0), so that ranks sum to `rank_seconds`."""
        opens = self.taken / self.weights
        order = np.argsort(opens, axis=1)
        opens, taken = np.take_along_axis(opens, order, axis=1), np.take_along_axis(self.taken, order, axis=1)
        width = np.cumsum(self.weights[order], axis=1)
        rest = taken.sum(axis=1, keepdims=True) - np.cumsum(taken, axis=1)
        last = np.maximum(np.count_nonzero(width * opens + rest <= rank_seconds, axis=1) - 1, 0)[:, None]
        x = (rank_seconds - np.take_along_axis(rest, last, axis=1)) / np.take_along_axis(width, last, axis=1)
        return np.maximum(self.weights * x - self.taken, 0.0)

    def fill(self, lengths: Whole, seconds: Floats, targets: Floats) -> bool:
        """Put local sequences, given longest first, into slots; return whether all fit."""
        targets, rooms, num_slots = targets.copy(), self.rooms.copy(), len(self.weights)
        left, most_room = targets.sum(axis=1), rooms.max(axis=1)
        places = np.empty(len(lengths), dtype=np.int64)
        done = 0
        while done < len(lengths):
            open_ = np.flatnonzero(most_room >= lengths[done])
            if len(open_) == 0:
                return False
            ranks = open_[np.argsort(-left[open_], kind="stable")][: len(lengths) - done]
            after = np.maximum.accumulate(left[ranks] - seconds[done : done + len(ranks)])
            in_turn = np.flatnonzero(after[:-1] > left[ranks[1:]])  # there a rank that has been dealt to is first again
            ranks = ranks[: in_turn[0] + 1] if len(in_turn) else ranks
            dealt = slice(done, done + len(ranks))
            held = lengths[dealt]
            slots = np.where(rooms[ranks] >= held[:, None], targets[ranks], -np.inf).argmax(axis=1)
            rooms[ranks, slots] -= held
            targets[ranks, slots] -= seconds[dealt]
            left[ranks] -= seconds[dealt]
            most_room[ranks] = rooms[ranks].max(axis=1)
            places[dealt] = ranks * num_slots + slots
            done += len(ranks)
        self._places = self._in_order_of_weights(places, seconds)
        self.local = np.bincount(self._places, seconds, self.taken.size).astype(np.float64).reshape(self.taken.shape)
        return True

    def _in_order_of_weights(self, places: Whole, seconds: Floats) -> Whole:
        """Swap slots of a rank without rings into the order of the weights."""
        shape = self.taken.shape
        found = np.bincount(places, seconds, self.taken.size).reshape(shape)
        has = (np.bincount(places, minlength=self.taken.size).reshape(shape) > 0) & (self.taken == 0)
        slots = np.arange(shape[1])
        rising = np.lexsort((slots, np.minimum(slots, slots[::-1]), self.weights))
        sources = np.argsort(np.where(has, found, np.inf)[:, rising], axis=1, kind="stable")
        wanted = np.argsort(~has[:, rising], axis=1, kind="stable")
        moved = np.arange(self.taken.size).reshape(shape)
        rank, place = np.nonzero(slots < np.count_nonzero(has, axis=1)[:, None])
        moved[rank, rising[sources[rank, place]]] = rank * shape[1] + rising[wanted[rank, place]]
        return moved.ravel()[places]

    def microbatches(self, sequences: Whole) -> list[Microbatch]:
        """Return the microbatches, slot by slot, with the local `sequences` of `fill`; packs join rings beside them."""
        order = np.argsort(self._places, kind="stable")
        places, firsts = np.unique(self._places[order], return_index=True)
        ranks, slots = np.divmod(places, len(self.weights))
        packs = {
            (slot, rank): Piece(ranks=(rank,), sequences=tuple(own.tolist()))
            for slot, rank, own in zip(
                slots.tolist(), ranks.tolist(), np.split(sequences[order], firsts[1:]), strict=False
            )
        }
        written: list[Microbatch] = []
        for slot, rings in enumerate(self.rings):
            for first, bundle in rings:
                ring = ring_order(first, bundle.degree)
                pieces = [Piece(ranks=ring, sequences=(sequence,)) for sequence in bundle.sequences]
                pieces += [packs.pop((slot, rank)) for rank in sorted(ring) if (slot, rank) in packs]
                written.append(Microbatch(pieces=tuple(pieces)))
            own = (packs.get((slot, rank)) for rank in range(self.ranks))
            written += [Microbatch(pieces=(pack,)) for pack in own if pack is not None]
        return written


def _rows(bundles: Sequence[Bundle], ranks: int) -> list[list[tuple[int, Bundle]]]:
    """Lay bundles, widest first, side by side in few rows, first fit: (first rank, bundle)."""
    rows: list[list[tuple[int, Bundle]]] = []
    ends: list[int] = []
    open_: list[int] = []  # rows that are not full
    for bundle in sorted(bundles, key=lambda bundle: (-bundle.degree, -bundle.seconds)):
        place = next((place for place in open_ if ranks - ends[place] >= bundle.degree), len(ends))
        if place == len(ends):
            ends.append(0)
            rows.append([])
            open_.append(place)
        rows[place].append((ends[place], bundle))
        ends[place] += bundle.degree
        if ends[place] == ranks:
            open_.remove(place)
    return rows
