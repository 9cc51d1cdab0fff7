"""Sources read in order from any mark on, for preparing and for streams.

Local files are read by `source_blocks`, datasets of a hub and URLs by the `datasets` library, whose state is the mark.
Marks are JSON values.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lengthwise.core.errors import DataError
from lengthwise.data.hub import hub_stream
from lengthwise.data.refusals import Refusals
from lengthwise.data.source_blocks import SourceBlock, read_blocks
from lengthwise.data.sources import Listing, changed_file, open_source, printable_name, raw_listings, version_of

if TYPE_CHECKING:
    from lengthwise.config import DataSource

_EDGE_BYTES = 1 << 16  # of the begin and end of a file that its digest covers
_KINDS = {"json": r"\.jsonl?(\.gz|\.zst)?", "parquet": r"\.parquet", "arrow": r"\.arrow"}  # by the end of a URL
_BLOCK_ROWS, _MARK_ROWS = 16, 256  # copying the library's state costs more than a row


def listed_blocks(listings: Sequence[tuple[int, Listing]], mark: Any = None) -> Iterator[SourceBlock]:
    """Read (source number, listing) pairs from a mark on; a mark is (listing, mark in it)."""
    first, inner = mark or (0, None)
    for number, (source, listing) in enumerate(listings[first:], start=first):
        for block in read_blocks(listing, inner):
            after = (number + 1, None) if block.mark is None else (number, block.mark)
            yield replace(block, source=source, origin=number, mark=after)
        inner = None


class StreamOrder:
    """All rows of streams, one source after the other. A mark is (source, mark in it)."""

    def __init__(self, sources: Sequence[DataSource]) -> None:
        self._sources = sources

    @cached_property
    def _streams(self) -> list[_Files | _Library]:
        refusals, found = Refusals(), list[_Files | _Library]()
        for number, source in enumerate(self._sources):
            try:
                of_library = source.dataset is not None or source.url is not None
                found.append(_Library(source) if of_library else _Files(source, number, refusals))
            except DataError as error:
                refusals.add(error)
        refusals.raise_all("data")
        return found

    @property
    def identity(self) -> list[Any]:
        """Values that differ if the rows may differ; raises DataError, or Problems, for sources that are no stream."""
        return [each.identity for each in self._streams]

    def blocks(self, epoch: int = 0, place: int = 0, mark: Any = None) -> Iterator[SourceBlock]:
        """Read from a mark on, or from the first row at place 0."""
        del epoch
        first, inner = (mark if place else None) or (0, None)
        for number, stream in enumerate(self._streams[first:], start=first):
            for block in stream.blocks(inner):
                yield replace(block, source=number, mark=block.mark and (number, block.mark))
            inner = None

    def close(self) -> None:
        """Do nothing: reading closes its files."""


class _Files:
    def __init__(self, source: DataSource, number: int, refusals: Refusals) -> None:
        self._listings = [(number, each) for each in raw_listings(source, f"data.{number}", "streaming", refusals.add)]
        self.identity, self._versions = list[list[Any]](), dict[Path, Any]()
        for _, listing in self._listings:
            self.identity.append([listing.label])
            for path in listing.paths:
                content, self._versions[path] = _content(path, listing)
                self.identity[-1].append(content)

    def blocks(self, mark: Any) -> Iterator[SourceBlock]:
        last = None
        for block in listed_blocks(self._listings, mark):
            root = self._listings[block.origin][1].root
            path = root if block.name is None else root / block.name
            if path != last and block.kind != "error" and version_of(path.stat()) != self._versions[path]:
                yield replace(block, kind="error", content=changed_file(path))
                return
            last = path
            yield block


def _content(path: Path, listing: Listing) -> tuple[list[Any], tuple[int, int, int]]:
    """Return (size of a file, digest of the begin and end of a file of rows), and its version.

    Nodes agree on size and digest; versions differ by node.
    """
    if listing.names is not None:
        status = path.stat()
        return [status.st_size], version_of(status)
    with open_source(path), path.open("rb") as file:
        status = os.fstat(file.fileno())
        found = hashlib.sha256(file.read(_EDGE_BYTES))
        file.seek(max(0, status.st_size - _EDGE_BYTES))
        found.update(file.read(_EDGE_BYTES))
    return [status.st_size, found.hexdigest()], version_of(status)


class _Library:
    """A dataset of the library. A mark is (rows read, state of the library's dataset)."""

    def __init__(self, source: DataSource) -> None:
        url = source.url
        self._shown = printable_name(url or f"{source.dataset}:{source.split}")
        if url is None:
            assert source.dataset is not None, "a source of the library is a dataset or a URL"
            arguments: dict[str, Any] = {"path": source.dataset, "name": source.subset, "revision": source.revision}
        else:
            kind = next((kind for kind, ending in _KINDS.items() if re.search(rf"{ending}(\?|$)", url.lower())), None)
            if kind is None:
                expected, remedy = "a URL of .jsonl, .jsonl.gz, .jsonl.zst, .parquet or .arrow", "Name such files."
                raise DataError(self._shown, expected=expected, got="another ending", remedy=remedy)
            arguments = {"path": kind, "data_files": [url]}
        self._dataset, self.identity = hub_stream(arguments, source.split or "train", self._shown)

    def blocks(self, mark: Any) -> Iterator[SourceBlock]:
        (number, state), reading = mark or (0, None), self._dataset()
        if state is not None:
            reading.load_state_dict(state)
        of_block: dict[str, Any] = {"label": self._shown, "shown": self._shown}
        values = list[Any]()
        try:
            for row in reading:
                values.append(row)
                number += 1
                if number % _BLOCK_ROWS == 0:
                    mark = (number, reading.state_dict()) if number % _MARK_ROWS == 0 else None
                    yield SourceBlock(
                        kind="values", content=values, first=number - len(values) + 1, mark=mark, **of_block
                    )
                    values = []
        except Exception as raised:  # noqa: BLE001 - of the network and of other libraries, of many kinds
            error = self._broken(raised, number + 1)
        else:
            error = None
        if values:
            yield SourceBlock(kind="values", content=values, first=number - len(values) + 1, **of_block)
        if error is not None:
            yield SourceBlock(kind="error", content=error, **of_block)

    def _broken(self, raised: Exception, number: int) -> DataError:
        got = f"{type(raised).__name__}: {' '.join(str(raised).split())[:300]}"
        remedy = "See that its machine answers, then go on from here."
        return DataError(f"{self._shown}:{number}", expected="rows that can be read", got=got, remedy=remedy)
