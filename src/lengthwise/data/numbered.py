"""Rows of files by number: one pass finds the start of every row, then any row is read alone.

Lines are read from the open file, tables are mapped. gzip, Zstandard and Parquet are first copied to an unnamed
temporary file, which ends with the process. Memory: 8 bytes a line.
"""

from __future__ import annotations

import bisect
import hashlib
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from lengthwise.core.errors import DataError
from lengthwise.data.sampler import epoch_order
from lengthwise.data.source_blocks import SourceBlock, empty_file, read_blocks
from lengthwise.data.sources import PACKED, Listing, changed_file, check_lines, is_table, open_source, version_of
from lengthwise.data.tables import mapped_batches, room_for_a_copy, row_of

_BLOCK = 8 << 20
_LINE_END = 10


class HashOrder:
    """Some parts of all sources, in the shuffled order of all rows of the run. A mark is (rows before, lines before).

    Rows before: number of rows of the run before these parts. Lines before: number of lines in the first part's file
    before it. parts: (source number, listing) pairs. seed: seed of the order.
    """

    def __init__(self, parts: Sequence[tuple[int, Listing]], *, seed: int) -> None:
        self._parts, self._seed = parts, seed

    @cached_property
    def _rows(self) -> list[_Documents | _Lines | _Table]:
        return [numbered(part) for _, part in self._parts]

    @property
    def identity(self) -> list[Any]:
        """Number of rows and SHA-256 of the bytes of every part. DataError if a file cannot be read."""
        return [[each.num_rows, each.digest] for each in self._rows]

    def blocks(self, epoch: int, place: int, mark: Any) -> Iterator[SourceBlock]:
        """Read the rows of an epoch from a place in its order on, one row per block."""
        before, line = mark
        firsts, lines = np.cumsum([0, *(each.num_rows for each in self._rows)]).tolist(), list[int]()
        for (_, part), rows in zip(self._parts, self._rows, strict=True):
            lines.append(line if part.goes_on else 0)
            line = lines[-1] + rows.num_rows
        order = epoch_order(np.arange(before, before + firsts[-1]), seed=self._seed, epoch=epoch) - before
        for row in order[place:].tolist():
            number = bisect.bisect_right(firsts, row) - 1
            line = row - firsts[number] + lines[number] + 1
            yield replace(self._rows[number].block(row - firsts[number], line), source=self._parts[number][0])

    def close(self) -> None:
        """Close the files."""
        for each in self.__dict__.get("_rows", ()):
            each.close()


def numbered(listing: Listing) -> _Documents | _Lines | _Table:
    """Find the rows of a listing, or of a part of a file of lines."""
    if listing.names is not None:
        return _Documents(listing)
    with open_source(listing.root) as file:
        table = is_table(file)
    return _Table(listing) if table else _Lines(listing)


def _bad(listing: Listing, line: int, error: DataError, name: str | None = None) -> SourceBlock:
    of_row: dict[str, Any] = {"label": listing.label, "shown": listing.shown, "first": line, "name": name}
    return SourceBlock(kind="values", content=[error], **of_row)


class _Documents:
    def __init__(self, listing: Listing) -> None:
        assert listing.names is not None, "documents have names"
        found = hashlib.sha256()
        for path in listing.paths:
            with open_source(path, rows=False) as file:
                found.update(hashlib.file_digest(file, "sha256").digest())
        self._listing, self._names = listing, listing.names
        self._versions = [version_of(path.stat()) for path in listing.paths]
        self.num_rows, self.digest = len(self._versions), found.hexdigest()

    def close(self) -> None:
        pass

    def block(self, number: int, line: int) -> SourceBlock:
        one = replace(self._listing, names=(self._names[number],))
        if version_of(one.paths[0].stat()) != self._versions[number]:
            return _bad(one, line, changed_file(one.paths[0]), self._names[number])
        (found,) = read_blocks(one)
        return _bad(one, line, found.content, found.name) if found.kind == "error" else found


class _Lines:
    def __init__(self, listing: Listing) -> None:
        self._listing = listing
        with open_source(listing.root) as rows:
            if not listing.goes_on:
                check_lines(rows, Path(listing.shown))
            packed = listing.root.open("rb")
            if packed.peek(4).startswith(PACKED):
                packed.close()
                self._file, part = _copied(iter(lambda: rows.read(_BLOCK), b"")), None
            else:
                self._file, part = packed, listing.part
        self._version, size = version_of(os.fstat(self._file.fileno())), os.fstat(self._file.fileno()).st_size
        first, last = (0, size) if part is None else (part[0], min(part[1], size))
        self._starts, self.digest = self._scan(first, last)
        self.num_rows, self.close = max(0, len(self._starts) - 1), self._file.close
        if not size:
            self._file.close()
            raise empty_file(listing)

    def _scan(self, first: int, last: int) -> tuple[np.ndarray, str]:
        """Return (starts of the lines in bytes [first, last) and end of the last, digest of the bytes)."""
        found, digest = [np.zeros(0 if first else 1, dtype=np.int64)], hashlib.sha256()
        at = max(0, first - 1)  # a line end there makes `first` the start of a line
        for block in self._blocks(at, last):
            digest.update(block)
            found.append(np.flatnonzero(np.frombuffer(block, dtype=np.uint8) == _LINE_END) + (at + 1))
            at += len(block)
        starts = np.concatenate(found)
        starts = starts[starts < last]
        if len(starts):
            starts = np.append(starts, self._line_end(max(last - 1, int(starts[-1]))))
        return starts, digest.hexdigest()

    def _blocks(self, first: int, last: int) -> Iterator[bytes]:
        while first < last and (block := os.pread(self._file.fileno(), min(_BLOCK, last - first), first)):
            yield block
            first += len(block)

    def _line_end(self, at: int) -> int:
        """Return the end of the line that has byte `at`."""
        for block in self._blocks(at, 1 << 62):
            if (place := block.find(b"\n")) >= 0:
                return at + place + 1
            at += len(block)
        return at

    def block(self, number: int, line: int) -> SourceBlock:
        start, stop = map(int, self._starts[number : number + 2])
        content = os.pread(self._file.fileno(), stop - start, start)
        if version_of(os.fstat(self._file.fileno())) != self._version:
            return _bad(self._listing, line, changed_file(self._listing.root))
        label, shown = self._listing.label, self._listing.shown
        return SourceBlock(kind="lines", content=[content], label=label, shown=shown, first=line, offset=start)


class _Table:
    def __init__(self, listing: Listing) -> None:
        self._listing = listing
        self._file = listing.root.open("rb")  # the mapped file, even if another file takes its name
        self._version = version_of(os.fstat(self._file.fileno()))
        try:
            self._batches = mapped_batches(self._file, listing.shown)
        except DataError:
            self._file.close()
            raise
        self._firsts = [0, *np.cumsum([batch.num_rows for batch in self._batches], dtype=np.int64).tolist()]
        self.num_rows, self.close = self._firsts[-1], self._file.close
        self.digest = hashlib.file_digest(self._file, "sha256").hexdigest()

    def block(self, number: int, line: int) -> SourceBlock:
        batch = bisect.bisect_right(self._firsts, number) - 1
        values = row_of(self._batches[batch], number - self._firsts[batch], f"{self._listing.shown}:{line}")
        if version_of(os.fstat(self._file.fileno())) != self._version:
            return _bad(self._listing, line, changed_file(self._listing.root))
        label, shown = self._listing.label, self._listing.shown
        return SourceBlock(kind="values", content=[values], label=label, shown=shown, first=line)


def _copied(blocks: Iterator[bytes]) -> BinaryIO:
    """Return an unnamed file of these blocks."""
    with room_for_a_copy(), ExitStack() as unfinished:
        file = unfinished.enter_context(tempfile.TemporaryFile())
        for block in blocks:
            file.write(block)
        file.flush()
        unfinished.pop_all()  # the file stays open for its rows
    return file  # pyright: ignore[reportReturnType]
