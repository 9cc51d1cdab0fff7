"""Indexed datasets as Megatron-LM writes them: `NAME.bin` with all ids, `NAME.idx` with where each sequence is.

    .idx   "MMIDIDX\\0\\0", version (uint64: 1), kind of the ids (uint8), sequences s and entries d (uint64 each);
           int32 [s] ids of each sequence, int64 [s] byte of the .bin where it starts,
           int64 [d] the first sequence of each document, and s at the end; int8 [s] modes in multimodal ones
    .bin   ids, one sequence after the other

All numbers are little-endian. A row is a document. Both files are memory-mapped.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import numpy as np

from lengthwise.core.errors import DataError
from lengthwise.data.rows import Row

INDEX, IDS = ".idx", ".bin"
_MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<QBQQ")  # version, kind, sequences, entries of documents
_VERSION = 1
_KINDS = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
_FLOATS = {6: "float64", 7: "float32"}
_LIMIT = 1 << 31  # ids are int32 in training
_AGAIN = "Copy it again, or write it again with Megatron's preprocess_data.py."


def indexed_prefix(path: Path) -> Path | None:
    """Return the path of an indexed dataset without its ending; None for what names none.

    It is named by one of its two files, or by what they have in common.
    """
    if path.suffix in (INDEX, IDS) and not path.is_dir():
        return path.with_suffix("")
    return path if not path.exists() and any(beside(path, each).is_file() for each in (INDEX, IDS)) else None


def beside(prefix: Path, ending: str) -> Path:
    """Return the path of one of the two files."""
    return prefix.with_name(prefix.name + ending)


def document_starts(prefix: Path) -> tuple[np.ndarray, np.dtype]:
    """Return the first id of each document, then the end of all, int64 [documents + 1], and the kind of the ids.

    Raises:
        DataError: the files are not whole, or do not agree.
        OSError: one cannot be read.
    """
    path = beside(prefix, INDEX)
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
    starts = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(lengths, dtype=np.int64)])[documents]
    size, expected = _size(beside(prefix, IDS)), int(starts[-1]) * kind.itemsize
    if size != expected:
        _refuse(beside(prefix, IDS), f"{expected} bytes, as its index says", f"{size}")
    return starts, kind


def read_documents(prefix: Path, limit: int | None, part: tuple[int, int] | None = None) -> Iterator[Row | DataError]:
    """Yield the documents of an indexed dataset, or those of [first, last); an error for one with ids that are none.

    `limit`: below what ids must be; None: 2^31. Raises DataError and OSError as `document_starts`.
    """
    starts, kind = document_starts(prefix)
    path, limit = beside(prefix, IDS), limit or _LIMIT
    found = np.memmap(path, dtype=kind, mode="r") if starts[-1] else np.empty(0, dtype=kind)
    first, last = part or (0, len(starts) - 1)
    for number, row in enumerate(range(first, last), start=1):
        where, ids = f"{_printable(prefix)}:{number}", np.asarray(found[starts[row] : starts[row + 1]])
        if len(ids) and not 0 <= ids.min() <= ids.max() < limit:
            bad = np.flatnonzero((ids < 0) | (ids >= limit))
            got, remedy = f"id {ids[bad[0]]} at token {bad[0] + 1}", "Take the tokenizer and model it was made for."
            yield DataError(where, expected=f"ids from 0 to {limit - 1}", got=got, remedy=remedy)
        else:
            yield Row(where=where, ids=ids.astype(np.int32), empty="" if len(ids) else "an empty document")


def _printable(path: Path) -> str:
    return str(path).encode("utf-8", "backslashreplace").decode("utf-8")


def _size(path: Path) -> int:
    """Return the bytes of a regular file; DataError for what is none."""
    if not path.is_file():
        got = "something else" if path.exists() else "nothing there"
        remedy = f"An indexed dataset is two files, NAME{INDEX} and NAME{IDS}: copy both, or correct the path."
        raise DataError(_printable(path), expected="a regular file", got=got, remedy=remedy)
    return path.stat().st_size


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


def _refuse(path: Path, expected: str, got: str, remedy: str = _AGAIN) -> NoReturn:
    raise DataError(_printable(path), expected=expected, got=got, remedy=remedy)
