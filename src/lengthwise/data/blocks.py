"""Files read in order, as blocks of unparsed rows, which the processes that tokenize parse.

A block has some rows and a mark, from which its file is read on: the number of rows before, and the state of the
library's dataset.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from lengthwise.core.errors import DataError
from lengthwise.data.files import printable_name, readable, version_of
from lengthwise.data.library import of_library
from lengthwise.data.rows import RawRow, RowParser, decode_utf8
from lengthwise.data.sources import HEAD, PACKED, RowFile, changed_file, empty_file

ROWS = 64  # rows of a block
_DOCUMENTS = 4

# Rows of training data in a .json file: one of these among the first keys of an object, alone or first of an array.
_ROWS_OF_JSON = re.compile(rb'\s*(\[\s*)?\{[^{}\[\]]*"(text|input_ids|messages|conversations|prompt|instruction)"\s*:')


@dataclass(frozen=True, slots=True, kw_only=True)
class RowBlock:
    """Consecutive rows of a file.

    form: form of `rows`: lines, columns of a row, or paths of documents below `root`; or `error`, the DataError of a
    file, or `end`, of an epoch, without rows. label: name of the file in names of rows. shown: its name in messages.
    first: number of the first row in its file, from 1. mark: place of the next rows, or None. source: number of the
    source.
    """

    form: Literal["lines", "columns", "texts", "python", "error", "end"]
    rows: Sequence[Any] = ()
    label: str = ""
    shown: str = ""
    root: Path = Path()
    first: int = 1
    error: DataError | None = None
    mark: Any = None
    source: int = 0

    @property
    def has_documents(self) -> bool:
        """Whether rows are named by their paths."""
        return self.form in ("texts", "python")

    @property
    def folder(self) -> Path | None:
        """The folder from which paths in rows begin; None for rows that no file of this machine has."""
        if self.root == Path():
            return None
        return self.root if self.root.is_dir() else self.root.parent

    def __str__(self) -> str:
        """Return the description of the task, for messages."""
        return f"tokenizing {self.shown} from row {self.first} on"

    def parsed(self, parser: RowParser) -> Iterator[tuple[str, RawRow | DataError]]:
        """Yield (name, parsed row, or the error of a bad one) of every row."""
        for number, row in enumerate(self.rows, start=self.first):
            if self.has_documents:
                name, where = row, printable_name(self.root / row)
            else:
                name, where = f"{self.label}:{number}", f"{self.shown}:{number}"
            try:
                if self.form == "lines":
                    found = parser.parse(row, where=where)
                elif self.form == "columns":
                    found = parser.take(row, where=where)
                else:
                    found = _document(self.root / row, where, python=self.form == "python")
            except DataError as error:
                found = error
            yield name, found


def read_blocks(
    file: RowFile, mark: Sequence[Any] | None = None, *, stream: bool = True, versions: Sequence[Any] | None = None
) -> Iterator[RowBlock]:
    """Read a file from a mark on; a wrong file becomes a block of form `error`.

    stream: True reads without a copy in the cache of `datasets`, and with marks. versions: expected versions of its
    files (default: the present ones).
    """
    before, state = mark or (0, None)
    try:
        versions, rows = versions or file.versions(), file.open(stream=stream)
        if state is not None:
            rows.load_state_dict(state)
        for found in _batches(file, rows, before):
            block = block_of(file, found, before)
            file.check_unchanged(versions, before, before + len(block.rows))
            before += len(block.rows)
            yield replace(block, mark=(before, rows.state_dict()) if stream else None)
        file.check_unchanged(versions, 0, len(file.paths))
        if not before:
            raise empty_file(file.shown)
    except DataError as error:
        yield RowBlock(form="error", error=error, label=file.label, shown=file.shown)


def block_of(file: RowFile, found: Mapping[str, Sequence[Any]], before: int) -> RowBlock:
    """Return a batch of columns as a block. before: number of rows of the file before it."""
    if file.names is not None:
        rows: list[Any] = [file.names[number] for number in found["document"]]
    elif file.form == "lines":
        rows = [*found["text"]]
    else:
        rows = [dict(zip(found, values, strict=True)) for values in zip(*found.values(), strict=True)]
    return RowBlock(form=file.form, rows=rows, label=file.label, shown=file.shown, root=file.root, first=before + 1)


def _batches(file: RowFile, rows: Any, before: int) -> Iterator[Mapping[str, Sequence[Any]]]:
    found = iter(rows.iter(_DOCUMENTS if file.names is not None else ROWS))
    for number in itertools.count():
        try:
            batch = next(found, None)
        except Exception as error:  # noqa: BLE001 - of the network and of other libraries, of many kinds
            where = f"{file.shown}, from row {before + 1 + number * ROWS} on"
            raise of_library(where, file.place, error) from None
        if batch is None:
            return
        yield batch


def _document(path: Path, where: str, *, python: bool) -> RawRow:
    """Return a document. DataError if it cannot be read, is no text, or has rows of JSON."""
    before = version_of(path)
    with readable(path):
        raw = path.read_bytes()
    if version_of(path) != before:
        raise changed_file(where)
    if raw.startswith(PACKED) or b"\0" in raw[:HEAD]:
        got = f"a file that begins with {raw[:16]!r}"
        raise DataError(where, expected="text", got=got, remedy="Move it out of the folder.")
    if path.name.endswith(".json") and _ROWS_OF_JSON.match(raw[:HEAD]):
        expected, got = "text: each file of a folder is one document", "rows of JSON"
        remedy = "Name it as a source of its own, one object a line."
        raise DataError(where, expected=expected, got=got, remedy=remedy)
    text = None if python else decode_utf8(raw, where=where)
    return RawRow(where=where, python=raw if python else None, text=text, empty="" if raw else "an empty file")
