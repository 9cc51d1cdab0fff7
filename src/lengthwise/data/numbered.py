"""The rows of files by number: one pass finds where each begins, and then any of them is read alone.

Lines are read from the open file, tables where they are mapped. What is packed, gzip, Zstandard and Parquet, is written
once to an unnamed file beside other temporary ones, which ends with its process. Cost: 8 bytes of memory a line.
"""

from __future__ import annotations

import bisect
import hashlib
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO, Protocol

import numpy as np

from lengthwise.core.errors import DataError
from lengthwise.data.kinds import PACKED, check_lines
from lengthwise.data.rows import RawRow, RowParser
from lengthwise.data.sources import Listing, is_table, open_source, printable_name, read_rows
from lengthwise.data.tables import mapped_batches, row_of

_BLOCK = 8 << 20
_LINE_END = 10
_WEIGHTS = "weights"


@dataclass(frozen=True, slots=True, kw_only=True)
class Counted:
    """The rows of a part of a source: how many, SHA-256 of the files' bytes, and whether any row may have weights."""

    rows: int
    digest: str
    weighed: bool = False


class RowsByNumber(Protocol):
    """Rows that are read by their number, from 0."""

    counted: Counted

    def row(self, number: int) -> RawRow | DataError:
        """Return a row, or what is wrong with it; its place counts from the first of these."""
        ...

    def close(self) -> None:
        """Close the files."""
        ...


def numbered(listing: Listing, vocab_size: int | None) -> RowsByNumber:
    """Find the rows of a listing, or of a part of a file of lines. DataError for a file that cannot be read."""
    if listing.names is not None:
        return _Documents(listing, vocab_size)
    with open_source(listing.root) as file:
        table = is_table(file)
    return _Table(listing, vocab_size) if table else _Lines(listing, vocab_size)


class _Documents:
    def __init__(self, listing: Listing, vocab_size: int | None) -> None:
        found = hashlib.sha256()
        for path in listing.paths:
            with open_source(path, rows=False) as file:
                found.update(hashlib.file_digest(file, "sha256").digest())
        self._listing, self._vocab_size = listing, vocab_size
        self._files = [_identity(path.stat()) for path in listing.paths]
        self.counted = Counted(rows=len(self._files), digest=found.hexdigest())

    def row(self, number: int) -> RawRow | DataError:
        assert self._listing.names is not None, "documents have names"
        problems = list[DataError]()
        one = replace(self._listing, names=(self._listing.names[number],))
        if _identity(one.paths[0].stat()) != self._files[number]:
            return _changed(one.paths[0])
        rows = list(read_rows(one, self._vocab_size, problems.append))
        return problems[0] if problems else rows[0]

    def close(self) -> None:
        pass


class _Lines:
    """Lines that begin in the bytes of a part; all of a packed file, whose part says nothing."""

    def __init__(self, listing: Listing, vocab_size: int | None) -> None:
        self._path, self._parser = listing.root, RowParser(vocab_size)
        self._shown = listing.shown or printable_name(listing.root)
        with open_source(listing.root) as rows:
            check_lines(rows, Path(self._shown))
            if not rows.peek(1):
                remedy = "Take it out of {data|`data`}, or fill it."
                raise DataError(self._shown, expected="rows", got="an empty file", remedy=remedy)
            packed = listing.root.open("rb")
            if packed.peek(4)[:4].startswith(PACKED):
                self._file, part = _copied(iter(lambda: rows.read(_BLOCK), b"")), None
                packed.close()
            else:
                self._file, part = packed, listing.part
        self._identity, size = _identity(os.fstat(self._file.fileno())), os.fstat(self._file.fileno()).st_size
        first, last = (0, size) if part is None else (part[0], min(part[1], size))
        self._starts, self.counted = self._scan(first, last)

    def close(self) -> None:
        self._file.close()

    def _scan(self, first: int, last: int) -> tuple[np.ndarray, Counted]:
        """Return where each line begins that does so in bytes [first, last), and where the last one ends."""
        found, digest, weighed, tail = [np.zeros(0 if first else 1, dtype=np.int64)], hashlib.sha256(), False, b""
        at = max(0, first - 1)  # a line end there is the start of our first line
        for block in self._blocks(at, last):
            digest.update(block)
            weighed = weighed or b'"weights"' in tail + block
            tail = block[-16:]
            found.append(np.flatnonzero(np.frombuffer(block, dtype=np.uint8) == _LINE_END) + (at + 1))
            at += len(block)
        weighed = weighed or b'"weights"' in tail + os.pread(self._file.fileno(), 16, at)  # over a border of two parts
        starts = np.concatenate(found)
        starts = starts[starts < last]
        if len(starts):
            starts = np.append(starts, self._line_end(max(last - 1, int(starts[-1]))))
        return starts, Counted(rows=max(0, len(starts) - 1), digest=digest.hexdigest(), weighed=weighed)

    def _blocks(self, first: int, last: int) -> Iterator[bytes]:
        while first < last and (block := os.pread(self._file.fileno(), min(_BLOCK, last - first), first)):
            yield block
            first += len(block)

    def _line_end(self, at: int) -> int:
        """Return the first byte after the line that byte `at` is of."""
        for block in self._blocks(at, 1 << 62):
            if (place := block.find(b"\n")) >= 0:
                return at + place + 1
            at += len(block)
        return at

    def row(self, number: int) -> RawRow | DataError:
        start, stop = map(int, self._starts[number : number + 2])
        line = os.pread(self._file.fileno(), stop - start, start)
        if _identity(os.fstat(self._file.fileno())) != self._identity:
            return _changed(self._path)
        try:
            where, last = f"{self._shown}:{number + 1}", not line.endswith(b"\n")
            return self._parser.parse(line, where=where, offset=start, last=last)
        except DataError as error:
            return error


class _Table:
    def __init__(self, listing: Listing, vocab_size: int | None) -> None:
        self._path, self._parser = listing.root, RowParser(vocab_size)
        self._shown = listing.shown or printable_name(listing.root)
        self._file = listing.root.open("rb")  # what is mapped is this one, also where another takes its name
        self._identity = _identity(os.fstat(self._file.fileno()))
        try:
            self._batches = mapped_batches(self._file, self._shown)
        except DataError:
            self._file.close()
            raise
        self._firsts = [0, *np.cumsum([batch.num_rows for batch in self._batches], dtype=np.int64).tolist()]
        names = self._batches[0].schema.names if self._batches else ()
        digest = hashlib.file_digest(self._file, "sha256").hexdigest()
        self.counted = Counted(rows=self._firsts[-1], digest=digest, weighed=_WEIGHTS in names)

    def close(self) -> None:
        self._file.close()

    def row(self, number: int) -> RawRow | DataError:
        batch, where = bisect.bisect_right(self._firsts, number) - 1, f"{self._shown}:{number + 1}"
        values = row_of(self._batches[batch], number - self._firsts[batch], where)
        if _identity(os.fstat(self._file.fileno())) != self._identity:
            return _changed(self._path)
        try:
            return values if isinstance(values, DataError) else self._parser.take(values, where=where)
        except DataError as error:
            return error


def _copied(blocks: Iterator[bytes]) -> BinaryIO:
    """Return an unnamed file of these blocks."""
    file = tempfile.TemporaryFile()  # noqa: SIM115 - it stays open as long as its rows are read
    for block in blocks:
        file.write(block)
    file.flush()
    return file  # pyright: ignore[reportReturnType]


def _identity(status: os.stat_result) -> tuple[int, int, int]:
    return status.st_ino, status.st_size, status.st_mtime_ns


def _changed(path: Path) -> DataError:
    remedy = "Let whatever writes it finish, then start again."
    return DataError(printable_name(path), expected="a file that stays as it is", got="a change", remedy=remedy)
