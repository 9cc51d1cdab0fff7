"""One shard: rows read, checked and tokenized into a file, by whichever process takes it.

Beside the file of tokens, in `work/`, are a record a row and what is to be known of the shard, the last of which is
there only when all of it is on the disk: a process that dies leaves a shard that is whole or is made again.
"""

from __future__ import annotations

import functools
import json
import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from lengthwise.config import DataSource
from lengthwise.core.errors import DataError
from lengthwise.core.files import sync
from lengthwise.data.dataset import NO_LOSS, plain_weights, sum_of_weights
from lengthwise.data.digests import ROW_DIGEST_BYTES, file_digest, row_digest
from lengthwise.data.load import add_rows
from lengthwise.data.refusals import Refusals
from lengthwise.data.rows import Row
from lengthwise.data.shards import Piece, SourceFile, shown_files
from lengthwise.data.sources import printable_name
from lengthwise.data.tokenizer import Tokenizer, load_tokenizer

WORK = "work"
ROW_RECORD = np.dtype([("length", "<i8"), ("losses", "<i8"), ("weights", "<f8"), ("digest", f"V{ROW_DIGEST_BYTES}")])


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardTask:
    """A shard to be written into `folder`; `keys` are the config paths of the sources."""

    number: int
    folder: Path
    pieces: tuple[Piece, ...]
    sources: tuple[DataSource, ...]
    tokenizer_name: str
    keys: tuple[str, ...]
    vocab_size: int | None

    def __str__(self) -> str:
        """Say in words what is done, and with which files."""
        files = [each.path for piece in self.pieces for each in piece.files]
        return f"writing shard {self.number} from {shown_files(files)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenShard:
    """What is known of a shard when it is written. `piece_rows`: rows of each piece."""

    rows: int
    tokens: int
    labels: bool
    weights: bool
    loss_tokens: int
    largest_id: int
    largest_id_row: int
    piece_rows: tuple[int, ...]
    kinds: dict[str, int]
    skipped: dict[str, int]
    num_bytes: int
    sha256: str


def tokens_name(number: int) -> str:
    """Return the name of a shard's file of tokens."""
    return f"tokens-{number:05d}.bin"


def rows_path(folder: Path, number: int) -> Path:
    """Return where the records of a shard's rows are until the store is whole."""
    return folder / WORK / f"rows-{number:05d}.bin"


def _told_path(folder: Path, number: int) -> Path:
    return folder / WORK / f"shard-{number:05d}.json"


def find_shard(folder: Path, number: int) -> WrittenShard | None:
    """Return a shard that an earlier process wrote whole; None: there is none."""
    try:
        values = json.loads(_told_path(folder, number).read_text(encoding="utf-8"))
        found = WrittenShard(**{**values, "piece_rows": tuple(values["piece_rows"])})
        sizes = [(folder / tokens_name(number)).stat().st_size, rows_path(folder, number).stat().st_size]
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return found if sizes == [found.num_bytes, found.rows * ROW_RECORD.itemsize] else None


def write_shard(task: ShardTask) -> tuple[int, WrittenShard | None, Refusals]:
    """Write a shard; return its number, what is to be known of it, None where rows were refused, and these."""
    refusals, kinds, piece_rows = Refusals(), Counter[str](), list[int]()
    tokenizer = functools.partial(_loaded, task.tokenizer_name)

    def note(row: Row) -> None:
        kind = "ids" if row.ids is not None else "chat" if row.chat is not None else "pair" if row.pair else "text"
        kinds[kind] += not row.empty

    writer = _ShardFiles(task.folder, task.number)
    with writer:
        for piece in task.pieces:
            before = writer.num_rows
            for file in piece.files:
                _refuse_changed(file, refusals.add)
            source, key = task.sources[piece.source], task.keys[piece.source]
            add_rows(
                writer,
                piece.rows,
                source,
                key,
                refusals,
                tokenizer=tokenizer,
                vocab_size=task.vocab_size,
                on_row=note,
            )
            piece_rows.append(writer.num_rows - before)
    if len(refusals):
        writer.remove()
        return task.number, None, refusals
    return task.number, writer.commit(tuple(piece_rows), +kinds), refusals


@functools.cache
def _loaded(name: str) -> Tokenizer:
    return load_tokenizer(name)


def _refuse_changed(file: SourceFile, report: Callable[[DataError], None]) -> None:
    """Report a file that is not the one whose digest was taken."""
    try:
        status = file.path.stat()
    except OSError:
        return  # told when it is read
    if (status.st_size, status.st_mtime_ns) != (file.num_bytes, file.modified_ns):
        got = f"a change ({file.num_bytes} bytes before, {status.st_size} after)"
        remedy = "Let whatever writes it finish, then start again."
        where = printable_name(file.path)
        report(DataError(where, expected="a file that stays as it is", got=got, remedy=remedy))


class _ShardFiles:
    """Takes rows as `load.Rows`; tokens go to the disk at once, labels and weights to files of their own first."""

    def __init__(self, folder: Path, number: int) -> None:
        self._folder, self._number = folder, number
        self._path = folder / tokens_name(number)
        self._labels_path = folder / WORK / f"labels-{number:05d}.bin"
        self._weights_path = folder / WORK / f"weights-{number:05d}.bin"
        self.num_rows = self._num_tokens = self._loss_tokens = self._largest = self._largest_row = 0
        self._skipped = Counter[str]()
        self._labels: BinaryIO | None = None
        self._weights: BinaryIO | None = None

    def __enter__(self) -> _ShardFiles:
        self._tokens = self._path.open("wb")
        self._rows = rows_path(self._folder, self._number).open("wb")
        return self

    def __exit__(self, *_error: object) -> None:
        for file in filter(None, (self._tokens, self._rows, self._labels, self._weights)):
            file.close()

    def add(self, tokens: np.ndarray, labels: np.ndarray | None, weights: np.ndarray | None = None) -> None:
        """Write one sequence, int32 [length] each, weights float32 (see `DatasetBuilder.add`)."""
        if weights is not None and self._weights is None:
            self._begin_weights()
        if labels is not None and np.array_equal(labels, tokens):
            labels = None
        if labels is not None and self._labels is None:
            self._tokens.flush()
            shutil.copyfile(self._path, self._labels_path)
            self._labels = self._labels_path.open("ab")
        self._tokens.write(_written(tokens))
        if self._labels is not None:
            self._labels.write(_written(tokens if labels is None else labels))
        given = plain_weights(tokens if labels is None else labels) if weights is None else weights
        if self._weights is not None:
            self._weights.write(_written(given, "<f4"))
        losses = len(tokens) - 1 if labels is None else int(np.count_nonzero(labels[1:] != NO_LOSS))
        largest = max(int(tokens.max()), 0 if labels is None else int(labels.max()))
        if largest > self._largest:
            self._largest, self._largest_row = largest, self.num_rows
        self._num_tokens += len(tokens)
        self._loss_tokens += losses
        self._note(len(tokens), losses, sum_of_weights(given), row_digest(tokens, labels, weights))

    def skip(self, reason: str) -> None:
        """Note a row that is left out."""
        self._skipped[reason] += 1
        self._note(0, 0, 0.0, bytes(ROW_DIGEST_BYTES))

    def commit(self, piece_rows: tuple[int, ...], kinds: dict[str, int]) -> WrittenShard:
        """Bring all of it to the disk, then say that it is there."""
        for part, path in ((self._labels, self._labels_path), (self._weights, self._weights_path)):
            if part is not None:
                with self._path.open("ab") as file, path.open("rb") as values:
                    shutil.copyfileobj(values, file, 1 << 20)
                path.unlink()
        rows, told = rows_path(self._folder, self._number), _told_path(self._folder, self._number)
        sync(self._path)
        sync(rows)
        found = WrittenShard(
            rows=self.num_rows,
            tokens=self._num_tokens,
            labels=self._labels is not None,
            weights=self._weights is not None,
            loss_tokens=self._loss_tokens,
            largest_id=self._largest,
            largest_id_row=self._largest_row,
            piece_rows=piece_rows,
            kinds=dict(sorted(kinds.items())),
            skipped=dict(self._skipped),
            num_bytes=self._path.stat().st_size,
            sha256=file_digest(self._path),
        )
        unfinished = told.with_suffix(".tmp")
        unfinished.write_text(json.dumps(asdict(found)), encoding="utf-8")
        sync(unfinished)
        unfinished.replace(told)
        sync(told.parent)
        return found

    def remove(self) -> None:
        """Remove what was written of a shard with rows that were refused."""
        for each in (self._path, self._labels_path, self._weights_path, rows_path(self._folder, self._number)):
            each.unlink(missing_ok=True)

    def _begin_weights(self) -> None:
        """Write the weights of the rows so far: 1 where they have a loss."""
        so_far = self._tokens if self._labels is None else self._labels
        so_far.flush()
        self._weights = self._weights_path.open("wb")
        with open(so_far.name, "rb") as file:
            while read := file.read(1 << 20):
                self._weights.write(_written(plain_weights(np.frombuffer(read, dtype="<i4")), "<f4"))

    def _note(self, length: int, losses: int, weights: float, digest: bytes) -> None:
        self._rows.write(np.array([(length, losses, weights, digest)], dtype=ROW_RECORD).tobytes())
        self.num_rows += 1


def _written(values: np.ndarray, kind: str = "<i4") -> memoryview:
    return np.ascontiguousarray(values, dtype=kind).view(np.uint8).data
