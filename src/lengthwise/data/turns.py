"""The order in which a run takes the rows of feeds.

The rows of a block of a stream are shuffled as stored rows are, so a block as large as the stream gives the same
batches. Feeds of `remote` data read in the order of all rows.
"""

from __future__ import annotations

import functools
import json
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, TypeAlias

import numpy as np

from lengthwise.data.feed import FedRow, ReadFrom, place_of, row_number
from lengthwise.data.sampler import Position, epoch_order


@dataclass(slots=True)
class PlacedRow:
    """A row of a feed. id: in the run. number: in its feed. is_weighed: whether a row of its step has weights."""

    id: int
    feed: int
    number: int
    row: FedRow
    is_weighed: bool = False


Take = Callable[[Sequence[tuple[int, int, int]]], list[tuple[list[FedRow], bool]]]
"""Returns rows of (feed, first number, how many), and whether their epoch ends."""


class BlockTurns:
    """The rows of one feed, shuffled in blocks of `block` rows; 1 keeps their order. Ids are row numbers."""

    def __init__(self, block: int, *, seed: int) -> None:
        self._block, self._seed = block, seed
        self._marks = deque[tuple[int, Any]]()  # (row, mark); the first is the last at or before the next step

    def attach(self, identities: Sequence[list[Any]]) -> tuple[Any, ...]:
        """Take the identities of the feeds; return the values that go into the digest of the data."""
        return (identities[0] if identities else None,)

    def begin(self, start: Position) -> None:
        """Go to a position: read from its mark, or from the first row if the mark lies inside a block."""
        epoch, place = start[:2]
        found = json.loads(start[2]) if len(start) > 2 else None
        if not isinstance(found, dict) or "state" not in found:  # none, or of an earlier version
            found = {"place": 0, "state": None}
        read_from, mark = found["place"], found["state"]
        at = (read_from, mark) if read_from <= self._first_of(place) else (0, None)
        self._marks = deque([(row_number(epoch, at[0]), at[1])])

    def begins(self, epoch: int, place: int) -> list[tuple[ReadFrom, int]]:
        """Return for every feed where to read the rows of a step that begins here, and the number of the first row."""
        needed = row_number(epoch, self._first_of(place))
        while len(self._marks) > 1 and self._marks[1][0] <= needed:
            self._marks.popleft()
        number, mark = self._marks[0]
        return [((*place_of(number), mark), needed)]

    def position(self, epoch: int, place: int) -> Position:
        """Return the position of a place."""
        [((_, read_from, mark), _)] = self.begins(epoch, place)
        return (epoch, place, json.dumps({"place": read_from, "state": mark})) if place else (epoch, 0)

    def rows(self, epoch: int, place: int, most: int, take: Take) -> Iterator[tuple[int, PlacedRow]]:
        """Yield (place, row) to the end of an epoch, block after block; take `most` at once if blocks are single."""
        ends = False
        while not ends:
            first, number = self._first_of(place), row_number(epoch, self._first_of(place))
            [(came, ends)] = take([(0, number, most if self._block == 1 else self._block)])
            self._marks.extend((number + at + 1, row.mark) for at, row in enumerate(came) if row.mark is not None)
            if ends:
                self._marks.append((row_number(epoch + 1, 0), None))
            order = np.arange(first, first + len(came))
            if self._block > 1:
                order = epoch_order(order, seed=self._seed, epoch=epoch)
            for at in order[place - first :].tolist():
                row = row_number(epoch, at)
                yield place, PlacedRow(id=row, feed=0, number=row, row=came[at - first])
                place += 1

    def _first_of(self, place: int) -> int:
        return place - place % self._block


class HashTurns:
    """The rows of feeds that read in the order of all rows. An id is the number of a row over all sources."""

    def __init__(self, *, seed: int) -> None:
        self._seed, self.num_rows = seed, 0

    def attach(self, identities: Sequence[list[Any]]) -> tuple[Any, ...]:
        """Count the rows; return the identities of their files, on any number of feeds the same."""
        counts = [sum(rows for rows, _ in parts) for parts in identities]
        self._firsts: list[int] = np.cumsum([0, *counts]).tolist()
        self.num_rows = self._firsts[-1]
        return [identity for identity, _ in groupby(identity for parts in identities for _, identity in parts)], []

    def begin(self, start: Position) -> None:
        """Do nothing: the place suffices."""

    def begins(self, epoch: int, place: int) -> list[tuple[ReadFrom, int]]:
        """Return the place in the order of every feed, and the number of its row."""
        own_places = self._order(epoch)[2] if place else [np.empty(0)] * (len(self._firsts) - 1)
        places = [int(np.searchsorted(own, place)) for own in own_places]
        return [((epoch, own, mark), row_number(epoch, own)) for own, mark in zip(places, self._firsts, strict=False)]

    def position(self, epoch: int, place: int) -> Position:
        """Return the position of a place."""
        return epoch, place

    def rows(self, epoch: int, place: int, most: int, take: Take) -> Iterator[tuple[int, PlacedRow]]:
        """Yield (place, row) to the end of an epoch; take `most` of all feeds at once."""
        order, feeds, own = self._order(epoch)
        while place < len(order):
            which = feeds[place : place + most]
            asked = [
                (feed, row_number(epoch, int(np.searchsorted(own[feed], place))), int(np.count_nonzero(which == feed)))
                for feed in np.unique(which).tolist()
            ]
            came = {
                feed: enumerate(rows, start=number)
                for (feed, number, _), (rows, _) in zip(asked, take(asked), strict=True)
            }
            for feed in which.tolist():
                number, row = next(came[feed])
                yield place, PlacedRow(id=int(order[place]), feed=feed, number=number, row=row)
                place += 1

    @functools.lru_cache(maxsize=1)  # noqa: B019 - one a run
    def _order(self, epoch: int) -> tuple[np.ndarray, np.ndarray, list[np.ndarray]]:
        """Return the rows of an epoch in order, their feeds, and for every feed the places of its rows."""
        order = epoch_order(np.arange(self.num_rows), seed=self._seed, epoch=epoch)
        feeds = np.searchsorted(self._firsts, order, side="right") - 1
        return order, feeds, [np.flatnonzero(feeds == feed) for feed in range(len(self._firsts) - 1)]


Turns: TypeAlias = BlockTurns | HashTurns
"""An order of the rows of all feeds."""
