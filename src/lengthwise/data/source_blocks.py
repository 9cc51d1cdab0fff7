"""Files read in order, as blocks of unparsed rows, which the processes that tokenize parse.

A block is about 64 KB of lines, 256 rows of a table, or one document. Its mark says where the next rows begin.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any, Literal

from lengthwise.core.errors import DataError
from lengthwise.data.rows import RawRow, RowParser, decode_utf8
from lengthwise.data.sources import HEAD, PACKED, Listing, check_lines, is_table, open_source, printable_name
from lengthwise.data.tables import rows_of_table, table_batches

BLOCK_BYTES = 1 << 16
_COPY_BYTES = 4 << 20
_VALUE_BYTES = 4096  # of a row of values, about

# Rows of training data in a .json file have one of these among the first keys of an object, alone or first of an array.
_ROWS_OF_JSON = re.compile(rb'\s*(\[\s*)?\{[^{}\[\]]*"(text|input_ids|messages|conversations|prompt|instruction)"\s*:')


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceBlock:
    """Consecutive rows of a source.

    kind: kind of `content`: `lines` with line ends, an Arrow stream (`table`), rows as `values` by column or an error,
    bytes of a document (`text`, `python`), DataError of a file (`error`), None at the `end` of an epoch. label: name of
    the file in names of rows. shown: its name in messages. first: number of the first row in its file, from 1. offset:
    byte at which `lines` begin. name: name of the document, None for rows. share: share of its file read so far, 0 to
    1. mark: place of the file's next rows, for `read_blocks`. source: number of the source. origin: number of the
    listing.
    """

    kind: Literal["lines", "table", "values", "text", "python", "error", "end"]
    content: Any
    label: str
    shown: str
    first: int = 1
    offset: int = 0
    name: str | None = None
    share: float = 1.0
    mark: Any = None
    source: int = 0
    origin: int = 0

    @property
    def num_bytes(self) -> int:
        """Size of the content in bytes, about."""
        if isinstance(self.content, bytes):
            return len(self.content)
        if self.kind == "lines":
            return sum(map(len, self.content))
        return _VALUE_BYTES * len(self.content) if self.kind == "values" else 0

    def rows(self, parser: RowParser) -> Iterator[RawRow | DataError]:
        """Yield the parsed rows, an error for a bad one."""
        if self.kind in ("text", "python"):
            yield _document(self.content, self.shown, python=self.kind == "python")
        elif self.kind == "lines":
            offset = self.offset
            for number, line in enumerate(self.content, start=self.first):
                of_line = {"where": f"{self.shown}:{number}", "offset": offset, "last": not line.endswith(b"\n")}
                yield _attempt(parser.parse, line, **of_line)
                offset += len(line)
        else:
            values = self.content if self.kind == "values" else rows_of_table(self.content, self.shown, self.first)
            for number, row in enumerate(values, start=self.first):
                yield row if isinstance(row, DataError) else _attempt(parser.take, row, where=f"{self.shown}:{number}")


class BlockGroup(tuple[SourceBlock, ...]):
    """Blocks that one task tokenizes."""

    __slots__ = ()

    def __str__(self) -> str:
        """Return the description of the task, for messages."""
        return f"tokenizing {self[0].shown} from row {self[0].first} on"


def together(blocks: Iterator[SourceBlock], task_bytes: int) -> Iterator[BlockGroup]:
    """Yield groups of blocks of at least `task_bytes`."""
    found, num_bytes = list[SourceBlock](), 0
    for block in blocks:
        found.append(block)
        num_bytes += block.num_bytes
        if num_bytes >= task_bytes or block.kind == "end":
            yield BlockGroup(found)
            found, num_bytes = [], 0
    if found:
        yield BlockGroup(found)


def _attempt(parse: Callable[..., RawRow], content: bytes | Mapping[str, Any], **of_row: Any) -> RawRow | DataError:
    try:
        return parse(content, **of_row)
    except DataError as error:
        return error


def _document(raw: bytes, where: str, *, python: bool) -> RawRow | DataError:
    try:
        text = None if python else decode_utf8(raw, where=where)
    except DataError as error:
        return error
    return RawRow(where=where, python=raw if python else None, text=text, empty="" if raw else "an empty file")


def read_blocks(listing: Listing, mark: Sequence[int] | None = None) -> Iterator[SourceBlock]:
    """Read a listing from a mark on; a wrong file becomes a block of kind `error`.

    mark: (first byte, rows before it) of lines; (rows read, rows read) of a table or of documents.
    """
    first, before = mark or (0, 0)
    if listing.names is None:
        try:
            yield from _of_file(listing, first, before)
        except DataError as error:
            yield SourceBlock(kind="error", content=error, label=listing.label, shown=listing.shown)
        return
    for number, name in enumerate(listing.names[first:], start=first + 1):
        of_block = {"label": listing.label, "name": name, "mark": (number, number), "shown": listing.shown_name(name)}
        of_block["share"] = number / len(listing.names)
        try:
            yield SourceBlock(
                kind="python" if listing.python else "text", content=_raw(listing.root / name), **of_block
            )
        except DataError as error:
            yield SourceBlock(kind="error", content=error, **of_block)


def _raw(path: Path) -> bytes:
    """Return the bytes of a document. DataError if it cannot be read, is no text, or has rows of JSON."""
    with open_source(path, rows=False) as file:
        raw = file.read()
    if raw.startswith(PACKED) or b"\0" in raw[:HEAD]:
        got = f"a file that begins with {raw[:16]!r}"
        raise DataError(printable_name(path), expected="text", got=got, remedy="Move it out of the folder.")
    if path.name.endswith(".json") and _ROWS_OF_JSON.match(raw[:HEAD]):
        expected, got = "text: each file of a folder is one document", "rows of JSON"
        remedy = "Name it as a source of its own, one object a line."
        raise DataError(printable_name(path), expected=expected, got=got, remedy=remedy)
    return raw


def _of_file(listing: Listing, first: int, before: int) -> Iterator[SourceBlock]:
    of_block = {"label": listing.label, "shown": listing.shown}
    with open_source(listing.root) as file:
        if is_table(file):
            for content, number, share in table_batches(file, file.peek(HEAD)[:8], listing.shown, first):
                of_rows = {"first": first + 1, "share": share, "mark": (first + number, first + number)}
                yield SourceBlock(kind="table", content=content, **of_block, **of_rows)
                first += number
            return
        if not first:
            check_lines(file, Path(listing.shown))
        _skip(file, first)
        size = max(1, os.stat(listing.root).st_size)
        while lines := file.readlines(BLOCK_BYTES):
            offset, number = first, before + 1
            first, before = first + sum(map(len, lines)), before + len(lines)
            of_lines = {"first": number, "offset": offset, "share": min(1.0, first / size), "mark": (first, before)}
            yield SourceBlock(kind="lines", content=lines, **of_block, **of_lines)
    if not first:
        raise empty_file(listing)


def empty_file(listing: Listing) -> DataError:
    """Return the error for a file without lines."""
    remedy = "Take it out of {data|`data`}, or fill it."
    return DataError(listing.shown, expected="rows", got="an empty file", remedy=remedy)


def _skip(file: BufferedReader, num_bytes: int) -> None:
    """Skip bytes, of the unpacked content if the file is packed."""
    if file.seekable():
        file.seek(num_bytes)
        return
    while num_bytes and (block := file.read(min(num_bytes, _COPY_BYTES))):
        num_bytes -= len(block)
