"""The order in which a run takes the rows of feeds.

The rows in a block of a stream are shuffled as stored rows are, so a block as large as the stream gives the same
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

from lengthwise.data.feed import FeedRow, ReadFrom, place_of, row_number
from lengthwise.data.sampler import Position, epoch_order


@dataclass(slots=True)
class PlacedRow:
    """A row and its place. id: its id in the run. number: its number in its feed.

    is_weighed: True if a row of its step has weights.
    """

    id: int
    feed: int
    number: int
    row: FeedRow
    is_weighed: bool = False


Request = Callable[[Sequence[tuple[int, int, int]]], list[tuple[list[FeedRow], bool]]]
"""Function from several (feed, first row number, number of rows) to (rows, True if their epoch ends)."""


class BlockShuffle:
    """The order of one feed, shuffled in blocks of `block` rows; 1 keeps the order. Ids are row numbers."""

    def __init__(self, block: int, *, seed: int) -> None:
        self._block, self._seed = block, seed
        self._marks = deque[tuple[int, Any]]()  # (row number, mark); the first lies at or before the next step

    def attach(self, identities: Sequence[list[Any]]) -> tuple[Any, ...]:
        """Set the identities of the feeds; return the values that the digest of the data needs."""
        return (identities[0] if identities else None,)

    def begin(self, start: Position) -> None:
        """Go to a position: read from its mark, or from the first row if the mark lies inside a block."""
        epoch, place = start[:2]
        saved = json.loads(start[2]) if len(start) > 2 else None
        if not isinstance(saved, dict) or "state" not in saved:  # none, or of an earlier version
            saved = {"place": 0, "state": None}
        read_from, mark = saved["place"], saved["state"]
        at = (read_from, mark) if read_from <= self._first_of(place) else (0, None)
        self._marks = deque([(row_number(epoch, at[0]), at[1])])

    def read_from(self, epoch: int, place: int) -> list[tuple[ReadFrom, int]]:
        """Return per feed (read position, first row number) for a step that begins at this place."""
        needed = row_number(epoch, self._first_of(place))
        while len(self._marks) > 1 and self._marks[1][0] <= needed:
            self._marks.popleft()
        number, mark = self._marks[0]
        return [((*place_of(number), mark), needed)]

    def position(self, epoch: int, place: int) -> Position:
        """Return the position that a resume needs to begin at this place."""
        [((_, read_from, mark), _)] = self.read_from(epoch, place)
        return (epoch, place, json.dumps({"place": read_from, "state": mark})) if place else (epoch, 0)

    def rows(self, epoch: int, place: int, most: int, request: Request) -> Iterator[tuple[int, PlacedRow]]:
        """Yield (place, row) to the end of an epoch, block by block; request `most` rows at once for blocks of 1."""
        ends = False
        while not ends:
            first, number = self._first_of(place), row_number(epoch, self._first_of(place))
            [(received, ends)] = request([(0, number, most if self._block == 1 else self._block)])
            self._marks.extend((number + at + 1, row.mark) for at, row in enumerate(received) if row.mark is not None)
            if ends:
                self._marks.append((row_number(epoch + 1, 0), None))
            order = np.arange(first, first + len(received))
            if self._block > 1:
                order = epoch_order(order, seed=self._seed, epoch=epoch)
            for at in order[place - first :].tolist():
                row = row_number(epoch, at)
                yield place, PlacedRow(id=row, feed=0, number=row, row=received[at - first])
                place += 1

    def _first_of(self, place: int) -> int:
        return place - place % self._block


class GlobalShuffle:
    """The shuffled order of all rows of all feeds; ids count rows over all sources."""

    def __init__(self, *, seed: int) -> None:
        self._seed, self.num_rows = seed, 0

    def attach(self, identities: Sequence[list[Any]]) -> tuple[Any, ...]:
        """Count the rows of the feeds; return the identities of their files, equal for any number of feeds."""
        counts = [sum(rows for rows, _ in parts) for parts in identities]
        self._firsts: list[int] = np.cumsum([0, *counts]).tolist()
        self.num_rows = self._firsts[-1]
        return [identity for identity, _ in groupby(identity for parts in identities for _, identity in parts)], []

    def begin(self, start: Position) -> None:
        """Do nothing: a place is enough."""

    def read_from(self, epoch: int, place: int) -> list[tuple[ReadFrom, int]]:
        """Return per feed (read position, first row number) for a step that begins at this place."""
        own_places = self._order(epoch)[2] if place else [np.empty(0)] * (len(self._firsts) - 1)
        places = [int(np.searchsorted(own, place)) for own in own_places]
        return [((epoch, own, mark), row_number(epoch, own)) for own, mark in zip(places, self._firsts, strict=False)]

    def position(self, epoch: int, place: int) -> Position:
        """Return the position that a resume needs to begin at this place."""
        return epoch, place

    def rows(self, epoch: int, place: int, most: int, request: Request) -> Iterator[tuple[int, PlacedRow]]:
        """Yield (place, row) to the end of an epoch; request `most` rows of all feeds at once."""
        order, feeds, own = self._order(epoch)
        while place < len(order):
            which = feeds[place : place + most]
            requests = [
                (feed, row_number(epoch, int(np.searchsorted(own[feed], place))), int(np.count_nonzero(which == feed)))
                for feed in np.unique(which).tolist()
            ]
            received = {
                feed: enumerate(rows, start=number)
                for (feed, number, _), (rows, _) in zip(requests, request(requests), strict=True)
            }
            for feed in which.tolist():
                number, row = next(received[feed])
                yield place, PlacedRow(id=int(order[place]), feed=feed, number=number, row=row)
                place += 1

    @functools.lru_cache(maxsize=1)  # noqa: B019 - one a run
    def _order(self, epoch: int) -> tuple[np.ndarray, np.ndarray, list[np.ndarray]]:
        """Return row ids of an epoch in order, their feeds, and per feed the places of its rows."""
        order = epoch_order(np.arange(self.num_rows), seed=self._seed, epoch=epoch)
        feeds = np.searchsorted(self._firsts, order, side="right") - 1
        return order, feeds, [np.flatnonzero(feeds == feed) for feed in range(len(self._firsts) - 1)]


RowOrder: TypeAlias = BlockShuffle | GlobalShuffle
"""An order of the rows of all feeds."""
