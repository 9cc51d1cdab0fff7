"""A feed: reads and tokenizes rows ahead of the ranks that ask it, and keeps them until no rank needs them.

A feed runs in a process of each node for a stream, in actors of Ray for `remote` data. A thread reads ahead, up to
`ahead_bytes` beyond the last row requested. Rows are numbered by epoch, then by place in the order of the feed. Every
request says where the oldest step of its rank begins, so a feed that was started again reads on from there: its end
loses nothing.

Memory: the rows of the running and planned steps, `ahead_bytes` beyond them, and a block.
"""

from __future__ import annotations

import functools
import os
import secrets
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from lengthwise.core.errors import DataError, LengthwiseError
from lengthwise.data.blocks import RowBlock
from lengthwise.data.dataset import RowArrays, plain_weights
from lengthwise.data.image_files import ImageFile
from lengthwise.data.in_order import HashOrder, StreamOrder
from lengthwise.data.tokenizer import tokenizer_of_process
from lengthwise.data.tokens import END, REFUSED, Runner, Tokenizing, TokenRow

if TYPE_CHECKING:
    from lengthwise.config import DataSource

AHEAD_BYTES = 128 << 20
_ROW_BYTES = 500  # memory of a row beside its tokens, about
_PLACE_BITS = 40

RowSpan = tuple[int, int, int]
"""(row, start, stop): tokens [start, stop) of a row."""
ReadFrom = tuple[int, int, Any]
"""(epoch, place in the feed's order, mark of that place): where a feed begins to read."""


def row_number(epoch: int, place: int) -> int:
    """Return the number of the row at a place of an epoch; numbers increase, and in epoch 0 they are the places."""
    return epoch << _PLACE_BITS | place


def place_of(number: int) -> tuple[int, int]:
    """Return (epoch, place) of a row number."""
    return number >> _PLACE_BITS, number & ((1 << _PLACE_BITS) - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedSpec:
    """The settings of a feed.

    name: its name in messages. sources: all sources of the run. sees: True if rows may have images. clients: number of
    ranks that ask it (default 1). ahead_bytes: bytes to read ahead (default 128 MiB).
    """

    name: str
    order: StreamOrder | HashOrder
    sources: tuple[DataSource, ...]
    tokenizer_name: str
    vocab_size: int | None
    sees: bool = False
    clients: int = 1
    ahead_bytes: int = AHEAD_BYTES

    @property
    def tokenizing(self) -> Tokenizing:
        """The tokenization of its rows."""
        keys = tuple(f"data.{number}" for number in range(len(self.sources)))
        tokenizer = functools.partial(tokenizer_of_process, self.tokenizer_name)
        return Tokenizing(
            sources=self.sources, keys=keys, tokenizer=tokenizer, vocab_size=self.vocab_size, sees=self.sees
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedRow:
    """A row without its tokens.

    source: number of its source. length: its tokens; 0 if it is left out, for the reason `kind`. digest: digest of ids,
    labels, weights and images. error: the error that ends the run, or None. mark: mark of the next row, if there is
    one.
    """

    name: str
    source: int
    length: int = 0
    loss_tokens: int = 0
    loss_weight: float = 0.0
    is_weighed: bool = False
    digest: bytes = b""
    images: Sequence[ImageFile] = ()
    kind: str = ""
    error: DataError | None = None
    mark: Any = None

    @staticmethod
    def of(row: TokenRow) -> FeedRow:
        """Return a row without its tokens."""
        of_row: dict[str, Any] = {"name": row.name, "source": row.source, "kind": row.kind, "mark": row.mark}
        if row.tokens is None:
            return FeedRow(**of_row, error=row.error if row.kind == REFUSED else None)
        losses, weight = row.losses
        numbers = {"length": len(row.tokens), "loss_tokens": losses, "loss_weight": weight}
        beside = {"is_weighed": row.weights is not None, "digest": row.digest, "images": row.images}
        return FeedRow(**of_row, **numbers, **beside)


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedRows:
    """Consecutive rows of an epoch. ends: True if the epoch has no more."""

    rows: list[FeedRow]
    ends: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenSlices:
    """Ids, labels (None if they are the ids) and weights (None if all are 0 or 1) of spans, joined, (tokens,) each."""

    ids: np.ndarray
    labels: np.ndarray | None
    weights: np.ndarray | None

    @classmethod
    def of(cls, spans: Sequence[tuple[RowArrays, int, int]]) -> TokenSlices:
        """Join tokens [start, stop) of each row."""
        has_labels = any(labels is not None for (_, labels, _), _, _ in spans)
        has_weights = any(weights is not None for (*_, weights), _, _ in spans)
        ids, labels, weights = [], [], []
        for (its_ids, its_labels, its_weights), start, stop in spans:
            its_labels = its_ids if its_labels is None else its_labels
            ids.append(its_ids[start:stop])
            labels.append(its_labels[start:stop])
            if has_weights:
                weights.append(plain_weights(labels[-1]) if its_weights is None else its_weights[start:stop])
        return cls(
            ids=np.concatenate(ids),
            labels=np.concatenate(labels) if has_labels else None,
            weights=np.concatenate(weights) if has_weights else None,
        )


class Feed:
    """Serves rows, in order, to the ranks of a node or a run.

    born: random name of this start of the feed. run: function that tokenizes blocks, here or in other processes.
    """

    def __init__(self, spec: FeedSpec, run: Runner = map) -> None:
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        self.born, self._spec, self._run = secrets.token_hex(8), spec, run
        self._condition = threading.Condition()
        self._rows = OrderedDict[int, tuple[FeedRow, RowArrays | None]]()
        self._ahead, self._ahead_bytes = deque[tuple[int, int]](), 0  # (number, bytes) of rows beyond `_wanted`
        self._first: int | None = None  # number of the first row read
        self._next = self._wanted = 0
        self._ends = dict[int, int]()
        self._needed, self._least = dict[int, int](), 0  # per client; least of all
        self._error: LengthwiseError | None = None
        self._reading: threading.Thread | None = None  # any other thread ends

    def describe(self) -> tuple[str, list[Any]]:
        """Return `born` and the identity of the rows; raise DataError, or Problems, if they cannot be read."""
        with self._condition:  # one rank computes it for all: from Python 3.12 on a cached property has no lock
            return self.born, self._spec.order.identity

    def rows(self, client: int, start: ReadFrom, needed: int, first: int, most: int) -> tuple[str, FeedRows]:
        """Return `born` and up to `most` rows from number `first` on; fewer if the epoch or an error ends them.

        needed: first row that this client may still request. start: where to begin to read for it.
        """
        epoch, place = place_of(first)
        with self._condition:
            if needed < self._least:  # the client goes back
                self._first, self._least = None, 0
                self._needed.clear()
            self._begin(start)
            self._needed[client] = max(needed, self._needed.get(client, 0))
            self._forget()
            self._want(first + most)
            self._condition.wait_for(
                lambda: self._next >= first + most or epoch in self._ends or self._error is not None
            )
            numbers = [number for number in range(first, first + most) if number in self._rows]
            ends = epoch in self._ends and self._ends[epoch] <= place + len(numbers)  # there may be fewer than before
            if self._error is not None and not numbers and not ends:
                raise self._error
            return self.born, FeedRows(rows=[self._rows[number][0] for number in numbers], ends=ends)

    def slices(self, start: ReadFrom, spans: Sequence[RowSpan]) -> tuple[str, TokenSlices]:
        """Return `born` and tokens of rows that `rows` has returned and that are still needed."""
        last = max(number for number, _, _ in spans)
        with self._condition:
            self._begin(start)
            self._want(last + 1)
            self._condition.wait_for(lambda: self._next > last or self._error is not None)
            if self._error is not None and last not in self._rows:
                raise self._error
            arrays = [(self._rows[number][1], start, stop) for number, start, stop in spans]
        return self.born, TokenSlices.of([(each, start, stop) for each, start, stop in arrays if each is not None])

    @property
    def held_bytes(self) -> int:
        """Memory of the kept rows in bytes, about."""
        with self._condition:
            return sum(_bytes_of(arrays) for _, arrays in self._rows.values())

    def close(self) -> None:
        """End the thread, and close the files."""
        with self._condition:
            reading, self._reading = self._reading, None
            self._condition.notify_all()
        if reading is not None:
            reading.join()
        self._spec.order.close()

    def _begin(self, start: ReadFrom) -> None:
        """Start to read from a position, unless it was read; after a restart a rank may request later rows first."""
        number = row_number(*start[:2])
        if self._first is not None and self._first <= number:
            return
        self._first = self._next = self._wanted = number
        for kept in (self._rows, self._ahead, self._ends):
            kept.clear()
        self._ahead_bytes, self._error = 0, None
        self._reading = threading.Thread(target=self._read, args=start, name="feed", daemon=True)
        self._reading.start()

    def _forget(self) -> None:
        if len(self._needed) == self._spec.clients:
            self._least = min(self._needed.values())
            while self._rows and (number := next(iter(self._rows))) < self._least:
                del self._rows[number]

    def _want(self, stop: int) -> None:
        self._wanted = max(self._wanted, stop)
        while self._ahead and self._ahead[0][0] < self._wanted:
            self._ahead_bytes -= self._ahead.popleft()[1]
        self._condition.notify_all()

    @property
    def _is_over(self) -> bool:
        return self._reading is not threading.current_thread()

    def _read(self, epoch: int, place: int, mark: Any) -> None:
        """Read epoch after epoch; keep the error that ends it, for the ranks that wait."""
        error: LengthwiseError | None = None
        try:
            with closing(self._spec.tokenizing.run(self._run, self._blocks(epoch, place, mark))) as found:
                for row in (row for rows in found for row in rows):
                    if row.error is not None and not row.is_row:
                        raise row.error
                    if row.kind == END:
                        going_on = self._end(epoch, place)
                        epoch, place = epoch + 1, 0
                    else:
                        going_on, place = self._add(row_number(epoch, place), row), place + 1
                    if not going_on:
                        return
        except LengthwiseError as raised:
            error = raised
        except BaseException as raised:  # noqa: BLE001 - of disks and other libraries; a panic of Rust is no Exception
            got = f"{type(raised).__name__}: {' '.join(str(raised).split())[:300]}"
            remedy = "Correct the cause, then go on from here."
            error = DataError(f"{self._spec.name}, row {place + 1}", expected="tokens", got=got, remedy=remedy)
        with self._condition:
            if not self._is_over:
                self._error = error
                self._condition.notify_all()

    def _blocks(self, epoch: int, place: int, mark: Any) -> Iterator[RowBlock]:
        """Yield the blocks of epoch after epoch."""
        while True:
            block = None
            for block in self._spec.order.blocks(epoch, place, mark):
                yield block
            if block is None and not place:
                raise DataError("data", expected="at least one row", got="none", remedy="Add rows.")
            yield RowBlock(form="end", shown=self._spec.name)
            epoch, place = epoch + 1, 0

    def _end(self, epoch: int, place: int) -> bool:
        """Note the end of an epoch; return True if more rows are needed."""
        with self._condition:
            if not self._is_over:
                self._ends[epoch], self._next = place, row_number(epoch + 1, 0)
                self._condition.notify_all()
            return not self._is_over

    def _add(self, number: int, row: TokenRow) -> bool:
        """Keep a row and wait for room for the next; return True if more rows are needed."""
        arrays = None if row.tokens is None else row.arrays
        size, may_go_on = _bytes_of(arrays), self._may_go_on
        with self._condition:
            if self._is_over:
                return False
            self._next = number + 1
            if number >= self._least:
                self._rows[number] = FeedRow.of(row), arrays
            if number >= self._wanted:
                self._ahead.append((number, size))
                self._ahead_bytes += size
            self._condition.notify_all()
            self._condition.wait_for(may_go_on)
            return not self._is_over

    def _may_go_on(self) -> bool:
        is_far = place_of(self._next)[0] > place_of(self._wanted)[0] + 1  # more rows would repeat the kept ones
        has_room = self._ahead_bytes <= self._spec.ahead_bytes and not is_far
        return self._is_over or has_room or self._next < self._wanted


def _bytes_of(arrays: RowArrays | None) -> int:
    """Return the memory of a row in bytes, about."""
    return _ROW_BYTES + sum(each.nbytes for each in arrays or () if each is not None)


FeedClient = Callable[..., Callable[[], Any]]
"""Function that calls a feed's method by name, and returns a function that waits for its answer, (born, ...)."""
