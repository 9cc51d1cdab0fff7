"""Rows of sources from the first to the last, from any place on that was marked: what a stream reads.

Files of this machine are read as any source is, so rows, names and errors are the same; a dataset of a hub and a URL
are read by the `datasets` library, whose state is the mark. A mark is what JSON holds.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from lengthwise.core.errors import DataError
from lengthwise.data.hub import hub_stream
from lengthwise.data.refusals import Refusals, at_line, where_at
from lengthwise.data.rows import RawRow, RowParser
from lengthwise.data.sources import (
    PART_BYTES,
    Listing,
    Report,
    is_table,
    open_source,
    parts_of,
    printable_name,
    raw_listings,
    read_rows,
)

if TYPE_CHECKING:
    from lengthwise.config import DataSource

_EDGE_BYTES = 1 << 16  # of a file's begin and end, by which it is known again
_NO_END = 1 << 62
_KINDS = {"json": r"\.jsonl?(\.gz|\.zst)?", "parquet": r"\.parquet", "arrow": r"\.arrow"}  # by the end of a URL

Read = tuple[str, RawRow | DataError]
"""The name of a row, and the row or what is wrong with it."""


class _Source(Protocol):
    identity: list[Any]
    """What differs where the rows may differ."""
    mark: Any
    """Where the rows after the last that was read begin."""

    def rows(self, mark: Any) -> Iterator[Read]: ...


class StreamRows:
    """Rows of all sources, one source after another. DataError, or Problems, for what is not there or no stream."""

    def __init__(self, sources: Sequence[DataSource], vocab_size: int | None) -> None:
        refusals, self._sources, self._at = Refusals(), list[_Source](), 0
        for number, source in enumerate(sources):
            try:
                if source.dataset is not None or source.url is not None:
                    self._sources.append(_Library(source, vocab_size))
                else:
                    self._sources.append(_Files(source, f"data.{number}", vocab_size, refusals.add))
            except DataError as error:
                refusals.add(error)
        refusals.raise_all("data")

    @property
    def identity(self) -> list[Any]:
        """What differs where the rows may differ, without reading them."""
        return [each.identity for each in self._sources]

    def rows(self, mark: Any = None) -> Iterator[tuple[int, str, RawRow | DataError]]:
        """Yield (source, name, row) in order, from a mark on. DataError for files that cannot be read."""
        first, inner = mark or (0, None)
        for number, source in enumerate(self._sources[first:], start=first):
            self._at = number
            for name, row in source.rows(inner):
                yield number, name, row
            inner = None

    @property
    def mark(self) -> Any:
        """Where the rows after the last that was yielded begin."""
        return [self._at, self._sources[self._at].mark]


class _Files:
    """A mark is (part, rows of it that were read, rows of its file before it)."""

    def __init__(self, source: DataSource, key: str, vocab_size: int | None, report: Report) -> None:
        self._vocab_size, self._parts, self.identity = vocab_size, list[Listing](), list[Any]()
        for listing in raw_listings(source, key, "streaming", report):
            self._parts += parts_of(listing, PART_BYTES)
            self.identity.append([listing.label, *(_content(path, listing) for path in listing.paths)])
        self.mark: Any = [0, 0, 0]

    def rows(self, mark: Any) -> Iterator[Read]:
        part, done, before = mark or (0, 0, 0)
        for number, listing in enumerate(self._parts[part:], start=part):
            problems = list[DataError]()
            if not (listing.part or (0,))[0]:
                before = 0  # rows of another file
            passed = done if done and _is_table(listing) else 0  # groups of rows that nobody reads again
            read = replace(listing, part=(done, _NO_END)) if passed else listing
            count = passed
            for row in read_rows(read, self._vocab_size, problems.append):
                count += 1
                if problems:  # a document that cannot be read has no row
                    raise problems[0]
                if count > done:
                    self.mark = [number, count, before]
                    yield _named(listing, row, count, before)
            if problems:
                raise problems[0]
            done, before = 0, before + count


def _is_table(listing: Listing) -> bool:
    if listing.names is not None:
        return False
    with open_source(listing.root) as file:
        return is_table(file)


def _named(listing: Listing, row: RawRow | DataError, count: int, before: int) -> Read:
    """Return the name of a row, and the row or its error with its line in the file, not in what was read of it."""
    if listing.names is not None:
        return listing.names[count - 1], row
    line = before + count
    if isinstance(row, DataError):
        row = at_line(row, line)
    elif not row.where.endswith(f":{line}"):  # of a later part
        row = replace(row, where=where_at(row.where, line))
    return f"{listing.label}:{line}", row


def _content(path: Path, listing: Listing) -> list[Any]:
    """Return the size of a file, and of a file of rows the digest of its begin and end; its time differs by node."""
    size = path.stat().st_size
    if listing.names is not None:
        return [size]
    with path.open("rb") as file:
        found = hashlib.sha256(file.read(_EDGE_BYTES))
        file.seek(max(0, size - _EDGE_BYTES))
        found.update(file.read(_EDGE_BYTES))
    return [size, found.hexdigest()]


class _Library:
    """A mark is (rows that were read, the state of the library's dataset)."""

    def __init__(self, source: DataSource, vocab_size: int | None) -> None:
        self._parser, self._source = RowParser(vocab_size), source
        url = source.url
        self._shown = printable_name(url or f"{source.dataset}:{source.split}")
        if url is None:
            assert source.dataset is not None, "a source of the library is a dataset or a URL"
            self._asked: Any = {"path": source.dataset, "name": source.subset, "revision": source.revision}
        else:
            kind = next((kind for kind, ending in _KINDS.items() if re.search(rf"{ending}(\?|$)", url.lower())), None)
            if kind is None:
                expected, remedy = "a URL of .jsonl, .jsonl.gz, .jsonl.zst, .parquet or .arrow", "Name such files."
                raise DataError(self._shown, expected=expected, got="another ending", remedy=remedy)
            self._asked = {"path": kind, "data_files": [url]}
        self._split = source.split or "train"
        self._dataset, self.identity = hub_stream(self._asked, self._split, self._shown)
        self._number = 0
        self._reading: Any = None

    @property
    def mark(self) -> Any:
        """Copy the library's state, which costs more than a row does: asked for now and then."""
        return [self._number, self._reading.state_dict()]

    def rows(self, mark: Any) -> Iterator[Read]:
        (self._number, state), self._reading = mark or (0, None), self._dataset()
        if state is not None:
            self._reading.load_state_dict(state)
        for values in self._reading:
            self._number += 1
            name = f"{self._shown}:{self._number}"
            try:
                row: RawRow | DataError = self._parser.take(values, where=name)
            except DataError as error:
                row = error
            yield name, row
