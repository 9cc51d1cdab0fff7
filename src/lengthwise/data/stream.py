"""A `Dataset` of a stream: rows come once, in file order or shuffled in blocks, and go when their steps are done.

Nobody knows how many rows there are before they end; then the next epoch begins with the first. A rank asks its node's
reader (`reader`) for the next rows' lengths, and for the slices that it computes. Rows of a block are ordered as those
of data that is read at the start, so a block as large as the stream makes the same batches. Where a step begins is an
epoch, a place in that order, and a mark from which the rows of its block are read again.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from lengthwise.core.errors import DataError
from lengthwise.data.dataset import DatasetBuilder, StoredDataset
from lengthwise.data.reader import ReadRow, StreamSpec, row_number
from lengthwise.data.sampler import Batch, Position, epoch_order
from lengthwise.data.served import STEPS_KEPT, Fetched, ServedDataset, settings_digest
from lengthwise.data.shard import Span
from lengthwise.data.stream_rows import StreamRows
from lengthwise.data.tokenizer import Tokenizer
from lengthwise.data.tokens import BAD, REFUSED, token_row

if TYPE_CHECKING:
    from lengthwise.config import DataSource
    from lengthwise.config.sections import GlobalBatch

_NO_MARK = json.dumps([0, None])


class ReaderClient(Protocol):
    """Asks the reader of its node. number: of this client among those of the reader."""

    number: int

    def ask(self, method: str, *arguments: Any) -> Callable[[], Any]:
        """Call a method of the reader; return what waits for its answer."""
        ...


class StreamDataset(ServedDataset):
    """Rows of a stream that are still needed, by `row_number`. It has none before `attach`.

    tokenizer_digest: of what makes tokens of texts; "" where none loads.
    """

    def __init__(self, spec: StreamSpec, *, tokenizer_digest: str, seed: int) -> None:
        super().__init__()
        self.spec, self._seed, self._tokenizer_digest = spec, seed, tokenizer_digest
        self._block = int(spec.sources[0].streaming)
        self._identity: list[Any] | None = None
        self._rows = dict[int, ReadRow]()
        self._weighed = set[int]()
        self._marks = deque[tuple[int, str]]()  # of this epoch: the last at or before where the next step begins first
        self._begins = deque[int](maxlen=STEPS_KEPT + 1)  # the first row that may be of a step, of the newest steps
        self.lengths: Any = _Numbers(self._rows, "length")
        self.loss_tokens: Any = _Numbers(self._rows, "loss_tokens")
        self.loss_weights: Any = _Numbers(self._rows, "loss_weight")

    def attach(self, client: ReaderClient) -> None:
        """Ask this client from now on. DataError, or Problems, for a stream that cannot be read."""
        self._client, self._identity = client, client.ask("describe")()

    def batches(self, asked: GlobalBatch, start: Position = (0, 0)) -> Iterator[Batch]:
        """Yield batches without end from a place on, those of the same rows read at once; as `ServedDataset`."""
        epoch, place = start[:2]
        read_from, mark = json.loads(start[2]) if len(start) > 2 else (0, None)
        if read_from > self._block_of(place):  # a mark of a run of smaller blocks
            read_from, mark = 0, None
        self._marks.append((0, json.dumps([read_from, mark])))
        self._client.ask("begin", epoch, read_from, mark)()
        self._begin = row_number(epoch, self._block_of(place))
        yield from super().batches(asked, start)

    def _block_of(self, place: int) -> int:
        return place - place % self._block

    def _batch(self, step: int, epoch: int, ids: list[int], end: tuple[int, int]) -> Batch:
        rows = [self._rows[row] for row in ids]
        if any(row.is_weighed for row in rows):
            self._weighed.update(ids)
        self._begins.append(self._begin)
        self._begin = row_number(end[0], self._block_of(end[1]))
        for row in [row for row in self._rows if row < self._begins[0]]:
            del self._rows[row]
            self._weighed.discard(row)
        digest = hashlib.sha256(b"".join(row.digest for row in rows)).hexdigest()
        return Batch(step=step, epoch=epoch, ids=np.array(ids), end=self._position(epoch, end), digest=digest)

    def _position(self, epoch: int, end: tuple[int, int]) -> Position:
        if end[0] != epoch:
            return end
        while len(self._marks) > 1 and self._marks[1][0] <= self._block_of(end[1]):
            self._marks.popleft()
        return (*end, self._marks[0][1])

    def _known(self, epoch: int, place: int, most: int) -> Iterator[tuple[int, int]]:
        """Yield (place, row) of rows with tokens, or an error, block after block."""
        if self._block_of(place) == 0:
            self._marks.clear()
            self._marks.append((0, _NO_MARK))
        ends = False
        while not ends:
            first = self._block_of(place)
            number, ends = self._read_rows(epoch, first, most if self._block == 1 else self._block)
            order = np.arange(first, first + number)
            if self._block > 1:
                order = epoch_order(order, seed=self._seed, epoch=epoch)
            for at in order[place - first :].tolist():
                row = row_number(epoch, at)
                if self._rows[row].length or row in self._errors:
                    yield place, row
                place += 1

    def _read_rows(self, epoch: int, place: int, most: int) -> tuple[int, bool]:
        """Ask for the rows from a place on, `most` unless the epoch ends; return how many came, and whether it does."""
        came, ends = 0, False
        while came < most and not ends:
            needed = self._begins[0] if self._begins else self._begin
            found = self._client.ask("lengths", self._client.number, epoch, place + came, most - came, needed)()
            for number, row in enumerate(found.rows, start=row_number(epoch, place + came)):
                self._rows[number] = row
                if row.error is not None:
                    self._errors[number] = row.error
                elif not row.length:
                    self.skipped[row.kind] += 1
            self._marks.extend(found.marks)
            came, ends = came + len(found.rows), found.ends
        return came, ends

    def _fetched(self, spans: Sequence[Span]) -> Fetched:
        found = Fetched()
        if spans:
            found.add(spans, self._client.ask("slices", list(spans)))
        return found

    def _is_weighed(self, row: int) -> bool:
        return row in self._weighed

    @property
    def ids(self) -> np.ndarray:
        """The rows that are still needed and not left out."""
        return np.array([number for number, row in self._rows.items() if row.length], dtype=np.int64)

    @property
    def num_rows(self) -> int:
        """How many rows are still needed."""
        return len(self._rows)

    def check_row(self, row: int) -> None:
        """Raise IndexError for a row that did not come yet, or is not needed any more."""
        if row not in self._rows:
            raise IndexError(f"row {row} of a stream")

    def digest(self) -> bytes:
        """Return 32 bytes that differ where files, settings or tokenizer do; before `attach`, without the files."""
        sources = {f"data.{number}": source for number, source in enumerate(self.spec.sources)}
        return settings_digest(self._tokenizer_digest, sources, self.spec.vocab_size, self._identity)

    def name(self, row: int) -> str:
        """Return where a row is: `train.jsonl:3`, `org/name:train:3`, or the file's path inside its folder."""
        self.check_row(row)
        return self._rows[row].name

    def source_key(self, row: int) -> str:
        """Return the config path of a row's source: `data.0`."""
        self.check_row(row)
        return f"data.{self._rows[row].source}"


def first_rows(
    sources: Sequence[DataSource],
    *,
    tokenizer: Callable[[], Tokenizer],
    vocab_size: int | None,
    sequences: int | None,
    tokens: int | None = None,
    on_bad_row: Callable[[DataError], None] = lambda _error: None,
) -> StoredDataset:
    """Read the first rows of a stream: so many sequences, or so many tokens. DataError for a row that stops the run."""
    builder, loaded, read, held = DatasetBuilder(), functools.cache(tokenizer), 0, 0
    for number, name, row in StreamRows(sources, vocab_size).rows():
        key = f"data.{number}"
        found = token_row(row, sources[number], key, tokenizer=loaded, vocab_size=vocab_size)
        builder.start_source(key, name, (name,))
        if found.tokens is None:
            if found.error is not None and found.kind == REFUSED:
                raise found.error
            if found.error is not None and found.kind == BAD:
                on_bad_row(found.error)
            builder.skip(found.kind)
            continue
        builder.add(found.tokens, found.labels, found.weights)
        read, held = read + 1, held + len(found.tokens)
        if read == sequences or (tokens is not None and held >= tokens):
            break
    if not read:
        where, expected = "data", "at least one sequence to train on"
        raise DataError(where, expected=expected, got="none", remedy="Add rows, or raise max_tokens.")
    return builder.finish()


class _Numbers:
    """A number of each row, asked for as of an array."""

    def __init__(self, rows: dict[int, ReadRow], name: str) -> None:
        self._rows, self._name = rows, name

    def __getitem__(self, asked: Any) -> Any:
        if isinstance(asked, list | np.ndarray):
            return np.array([getattr(self._rows[int(row)], self._name) for row in asked])
        return getattr(self._rows[int(asked)], self._name)

    def __len__(self) -> int:
        return len(self._rows)
