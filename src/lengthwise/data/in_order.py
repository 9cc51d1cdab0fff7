"""The orders in which a feed reads rows: files one after the other, or the shuffled order of all rows of the run."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from lengthwise.core.errors import Collector, DataError
from lengthwise.data.blocks import RowBlock, block_of, read_blocks
from lengthwise.data.refusals import Refusals
from lengthwise.data.sampler import epoch_order
from lengthwise.data.sources import RowFile, empty_file, list_source

if TYPE_CHECKING:
    from lengthwise.config import DataSource


class StreamOrder:
    """All rows of streams, one file after the other. A mark is (number of the file, mark in it), values of JSON."""

    def __init__(self, sources: Sequence[DataSource]) -> None:
        self._sources = sources

    @cached_property
    def _files(self) -> list[tuple[int, RowFile, list[Any], list[Any]]]:
        """Every file with the number of its source, its identity and versions."""
        refusals, found = Refusals(), Collector()
        files = [
            (number, file)
            for number, source in enumerate(self._sources)
            for file in list_source(source, refusals.add, key=f"data.{number}", meanwhile="streaming")
        ]
        refusals.raise_all("data")
        identities = [found.attempt(file.identity) for _, file in files]
        found.raise_all()
        return [
            (number, file, identity or [], file.versions())
            for (number, file), identity in zip(files, identities, strict=True)
        ]

    @property
    def identity(self) -> list[Any]:
        """Values that differ if the rows may differ; raises DataError, or Problems, for sources that are no stream."""
        return [identity for _, _, identity, _ in self._files]

    def blocks(self, epoch: int = 0, place: int = 0, mark: Any = None) -> Iterator[RowBlock]:
        """Read from a mark on, or from the first row at place 0."""
        del epoch
        first, inner = (mark if place else None) or (0, None)
        for number, (source, file, _, versions) in enumerate(self._files[first:], start=first):
            for block in read_blocks(file, inner, versions=versions):
                yield replace(block, source=source, mark=block.mark and (number, block.mark))
            inner = None

    def close(self) -> None:
        """Do nothing: reading closes its files."""


class HashOrder:
    """Some parts of all sources, in the shuffled order of all rows. A mark is the number of rows before them.

    parts: (source number, file) pairs. seed: seed of the order.
    """

    def __init__(self, parts: Sequence[tuple[int, RowFile]], *, seed: int) -> None:
        self._parts, self._seed = parts, seed

    @cached_property
    def _rows(self) -> list[_Numbered]:
        return [_Numbered(file) for _, file in self._parts]

    @property
    def identity(self) -> list[Any]:
        """Number of rows and identity of every part. DataError if a file cannot be read."""
        return [[each.num_rows, each.identity] for each in self._rows]

    def blocks(self, epoch: int, place: int, mark: int) -> Iterator[RowBlock]:
        """Read the rows of an epoch from a place in its order on, one row per block."""
        firsts = [*itertools.accumulate((each.num_rows for each in self._rows), initial=0)]
        order = epoch_order(np.arange(mark, mark + firsts[-1]), seed=self._seed, epoch=epoch) - mark
        for row in order[place:].tolist():
            number = bisect.bisect_right(firsts, row) - 1
            yield replace(self._rows[number].block(row - firsts[number]), source=self._parts[number][0])

    def close(self) -> None:
        """Do nothing: files are mapped."""


class _Numbered:
    """The rows of a part of a file by number, mapped by `datasets`."""

    def __init__(self, file: RowFile) -> None:
        self._file, self.identity, self._versions = file, file.identity(), file.versions()
        self._rows = file.open(stream=False)
        if not len(self._rows):
            raise empty_file(file.shown)
        part, parts = file.share
        self._first, last = (len(self._rows) * each // parts for each in (part, part + 1))
        self.num_rows = last - self._first

    def block(self, number: int) -> RowBlock:
        row, file = self._first + number, self._file
        try:
            file.check_unchanged(self._versions, row, row + 1)
        except DataError as error:
            return RowBlock(form="error", error=error, label=file.label, shown=file.shown)
        return block_of(file, self._rows[row : row + 1], row)
