"""Indexed datasets as Megatron-LM writes them: `NAME.bin` with all ids, `NAME.idx` with where each sequence is.

    .idx   "MMIDIDX\\0\\0", version (uint64: 1), kind of the ids (uint8), sequences s and entries d (uint64 each);
           int32 [s] ids of each sequence, int64 [s] byte of the .bin where it starts,
           int64 [d] the first sequence of each document, and s at the end; int8 [s] modes in multimodal ones
    .bin   ids, one sequence after the other

All numbers are little-endian. A row is a document; it is read where it lies, memory-mapped. Lengths come from the .idx
alone; opening goes through the ids once where their kind has values that are no ids of the model.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, NoReturn

import numpy as np

from lengthwise.core.errors import DataError
from lengthwise.data.ahead import read_ahead
from lengthwise.data.dataset import TOO_LONG, NumberedRows, digest_of_parts, too_long, write_protect
from lengthwise.data.digests import ROW_DIGEST_BYTES, row_digest
from lengthwise.data.sources import printable_name

if TYPE_CHECKING:
    from lengthwise.config import DataSource

INDEX, IDS = ".idx", ".bin"
BAD, EMPTY = "bad", "empty"
_MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<QBQQ")  # version, kind, sequences, entries of documents
_VERSION = 1
_KINDS = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
_FLOATS = {6: "float64", 7: "float32"}
_LIMIT = 1 << 31  # ids are int32 in training
_AT_ONCE = 1 << 24  # ids that are looked at together
_AGAIN = "Copy it again, or write it again with Megatron's preprocess_data.py."

Report = Callable[[DataError], None]


class _Index(NamedTuple):
    """What an .idx says: `starts` is the first id of each document, then the end of all, int64 [documents + 1]."""

    kind: np.dtype
    starts: np.ndarray


def indexed_prefix(path: Path) -> Path | None:
    """Return the path of an indexed dataset without its ending; None for what names none.

    It is named by one of its two files, or by what they have in common.
    """
    if path.suffix in (INDEX, IDS) and not path.is_dir():
        return path.with_suffix("")
    return path if not path.exists() and any(_beside(path, each).is_file() for each in (INDEX, IDS)) else None


def open_indexed(source: DataSource, *, key: str, vocab_size: int | None, report: Report) -> IndexedDataset | None:
    """Open the indexed dataset that a source names; what is wrong with it is reported, and None returned.

    `vocab_size` None: ids below 2^31.
    """
    prefix = None if source.path is None else indexed_prefix(source.path)
    assert prefix is not None, "an indexed dataset has a path"
    refused = list[DataError]()
    try:
        dataset = IndexedDataset(prefix, source, key, vocab_size, refused.append)
    except DataError as error:
        report(error)
        return None
    except OSError as error:
        got, remedy = error.strerror or str(error), "Correct the path or its permissions."
        where = printable_name(error.filename or prefix)
        report(DataError(where, expected="a file that can be read", got=got, remedy=remedy))
        return None
    for error in refused:
        report(error)
    return None if refused else dataset


class IndexedDataset(NumberedRows):
    """A `Dataset` of the documents of an indexed dataset. Memory: 32 bytes a row."""

    def __init__(self, prefix: Path, source: DataSource, key: str, vocab_size: int | None, report: Report) -> None:
        """Map it. DataError, or OSError, for files that are not whole; rows that are refused are reported."""
        self._prefix, self._key = printable_name(prefix), key
        self.weights = ((0, source.weight),)
        index = _read_index(_beside(prefix, INDEX))
        self._tokens, self._starts = _map_ids(_beside(prefix, IDS), index), index.starts
        self.lengths = np.diff(self._starts)
        bad = self._bad_rows(_LIMIT if vocab_size is None else vocab_size, source, report)
        self.lengths[bad] = 0
        long = self._long_rows(source, report)
        self.lengths[long] = 0
        skipped = {BAD: bad, EMPTY: self._empty_rows(source, report), TOO_LONG: long}
        self.skipped: Mapping[str, int] = {reason: len(rows) for reason, rows in skipped.items() if len(rows)}
        self.loss_tokens = np.maximum(self.lengths - 1, 0)
        self.ids = np.flatnonzero(self.lengths).astype(np.int64, copy=False)
        write_protect(self.lengths, self.loss_tokens, self.ids)

    def read(self, row: int, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """Return ids and labels of tokens [start, stop) of a row, int32 [stop - start] each; labels are the ids."""
        self.check_row(row)
        first = int(self._starts[row])
        ids = self._tokens[first : first + int(self.lengths[row])][start:stop].astype(np.int32, copy=False)
        write_protect(ids)
        return ids, ids

    def read_ahead(self, row: int, start: int, stop: int) -> None:
        """Begin to read tokens [start, stop) of a row."""
        first = int(self._starts[row])
        read_ahead(self._tokens[first : first + int(self.lengths[row])][start:stop])

    @property
    def loss_weights(self) -> np.ndarray:
        """What the losses of each row's tokens weigh together: one each."""
        return self.loss_tokens

    def read_weights(self, row: int, start: int, stop: int) -> np.ndarray | None:
        """Return None: the format has no weights."""
        del row, start, stop
        return None

    def row_digests(self, first: int, last: int) -> np.ndarray:
        """Return what tells rows [first, last) from others, uint8 [last - first, 16]."""
        found = b"".join(row_digest(self.read(row, 0, _LIMIT)[0], None) for row in range(first, last))
        return np.frombuffer(found, dtype=np.uint8).reshape(-1, ROW_DIGEST_BYTES)

    def digest(self) -> bytes:
        """Return the digest of all rows, the same wherever they lie; the first call reads all of them."""
        return self._digest

    @cached_property
    def _digest(self) -> bytes:
        return digest_of_parts(self)

    def name(self, row: int) -> str:
        """Return where a row is: `folder/NAME:3`, the third document."""
        self.check_row(row)
        return f"{self._prefix}:{row + 1}"

    def source_key(self, row: int) -> str:
        """Return the config path of the source: `data.0`."""
        del row
        return self._key

    def _bad_rows(self, limit: int, source: DataSource, report: Report) -> np.ndarray:
        """Return rows with ids that are negative, or `limit` or more; report them where they stop the run."""
        kind, rows = np.iinfo(self._tokens.dtype), list[np.ndarray]()
        if kind.min >= 0 and kind.max < limit:
            return self.lengths[:0]
        for first in range(0, len(self._tokens), _AT_ONCE):
            part = self._tokens[first : first + _AT_ONCE]
            if part.min() >= 0 and part.max() < limit:
                continue
            places = first + np.flatnonzero((part < 0) | (part >= limit))
            found, firsts = np.unique(np.searchsorted(self._starts, places, side="right") - 1, return_index=True)
            rows.append(found)
            for row, place in zip(found, places[firsts], strict=True) if source.bad_rows == "stop" else ():
                got = f"id {self._tokens[place]} at token {place - self._starts[row] + 1}"
                remedy = "Take the tokenizer that this was made with, and its model."
                report(DataError(self.name(int(row)), expected=f"ids from 0 to {limit - 1}", got=got, remedy=remedy))
        return np.unique(np.concatenate([self.lengths[:0], *rows]))

    def _empty_rows(self, source: DataSource, report: Report) -> np.ndarray:
        rows = np.flatnonzero(np.diff(self._starts) == 0)
        for row in rows if source.empty == "error" else ():
            remedy = f"Take it out, or {{skip_empty|set {self._key}.empty: skip}} to leave such rows out."
            report(DataError(self.name(int(row)), expected="a row with tokens", got="an empty document", remedy=remedy))
        return rows

    def _long_rows(self, source: DataSource, report: Report) -> np.ndarray:
        if source.max_tokens is None:
            return self.lengths[:0]
        rows = np.flatnonzero(self.lengths > source.max_tokens)
        for row in rows if source.too_long == "error" else ():
            report(too_long(self.name(int(row)), int(self.lengths[row]), source.max_tokens, self._key))
        return rows


def _beside(prefix: Path, ending: str) -> Path:
    return prefix.with_name(prefix.name + ending)


def _size(path: Path) -> int:
    """Return the bytes of a regular file; DataError for what is none."""
    if not path.is_file():
        got = "something else" if path.exists() else "nothing there"
        remedy = f"An indexed dataset is two files, NAME{INDEX} and NAME{IDS}: copy both, or correct the path."
        raise DataError(printable_name(path), expected="a regular file", got=got, remedy=remedy)
    return path.stat().st_size


def _read_index(path: Path) -> _Index:
    size, begin = _size(path), len(_MAGIC) + _HEADER.size
    with path.open("rb") as file:
        head = file.read(begin)
    if len(head) < begin or not head.startswith(_MAGIC):
        _refuse(path, 'an index that begins with "MMIDIDX", a version, a kind and two counts', f"{head[:16]!r}")
    version, code, sequences, entries = _HEADER.unpack(head[len(_MAGIC) :])
    if version != _VERSION:
        _refuse(path, f"version {_VERSION}", f"version {version}", "Write it again with Megatron-LM or Megatron-Core.")
    if code not in _KINDS:
        got = f"kind {code}{f' ({_FLOATS[code]})' if code in _FLOATS else ''}"
        _refuse(path, "ids in whole numbers (kinds 1 to 5 and 8)", got, "Write token ids.")
    expected = begin + 12 * sequences + 8 * entries
    if size == expected + sequences and sequences:
        got = "a mode for each sequence: multimodal data is not trained on yet"
        _refuse(path, "an index of text", got, "Write it without modes, if all of it is text.")
    if size != expected:
        got = f"{size}: it is cut off, or no index"
        _refuse(path, f"{expected} bytes, as its {sequences} sequences and {entries} entries of documents take", got)
    mapped = np.memmap(path, dtype="u1", mode="r", offset=begin) if size > begin else np.empty(0, dtype="u1")
    lengths = np.asarray(mapped[: 4 * sequences]).view("<i4")
    pointers = np.asarray(mapped[4 * sequences : 12 * sequences]).view("<i8")
    documents = np.asarray(mapped[12 * sequences :]).view("<i8")
    kind = np.dtype(_KINDS[code])
    _check_sequences(path, lengths, pointers, documents, kind)
    ends = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(lengths, dtype=np.int64)])
    return _Index(kind, ends[documents])


def _check_sequences(
    path: Path, lengths: np.ndarray, pointers: np.ndarray, documents: np.ndarray, kind: np.dtype
) -> None:
    """Refuse lengths, pointers and documents of which some tokens would be none's or several's."""
    if not len(lengths):
        _refuse(path, "sequences", "none", "Take it out of {data|`data`}.")
    if lengths.min() < 0:
        _refuse(path, "lengths of 0 or more", f"{lengths.min()}")
    ends = np.cumsum(lengths, dtype=np.int64) * kind.itemsize
    wrong = np.flatnonzero(pointers != ends - lengths.astype(np.int64) * kind.itemsize)
    if len(wrong):
        place = int(wrong[0])
        got = f"sequence {place + 1} at byte {pointers[place]} of the {IDS}, not where the one before it ends"
        _refuse(path, "sequences one after the other", got)
    if len(documents) < 2 or documents[0] != 0 or documents[-1] != len(lengths) or np.any(np.diff(documents) < 0):
        shown = "none" if not len(documents) else f"entries from {documents[0]} to {documents[-1]}"
        if len(documents) and np.any(np.diff(documents) < 0):
            shown += ", not ascending"
        remedy = "Write it again, and end each document (end_document) before finalize."
        _refuse(path, f"documents that take sequences 0 to {len(lengths)}", shown, remedy)


def _map_ids(path: Path, index: _Index) -> np.ndarray:
    size, expected = _size(path), int(index.starts[-1]) * index.kind.itemsize
    if size != expected:
        _refuse(path, f"{expected} bytes, as its index says", f"{size}")
    if not size:
        return np.empty(0, dtype=index.kind)
    return np.asarray(np.memmap(path, dtype=index.kind, mode="r"))


def _refuse(path: Path, expected: str, got: str, remedy: str = _AGAIN) -> NoReturn:
    raise DataError(printable_name(path), expected=expected, got=got, remedy=remedy)
