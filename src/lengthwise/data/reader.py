"""Reads and tokenizes a stream ahead of the ranks of a node, in a process of its own, and answers them.

A thread reads; the rows that it has read wait here until every rank is past their step. It stops once it is
`ahead_bytes` beyond the last row that a rank asked for. A row's number is unique: its epoch, then its place in that.

Memory: the rows of the steps that run or are planned, `ahead_bytes` beyond them, and one row.
"""

from __future__ import annotations

import functools
import json
import os
import threading
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lengthwise.core.errors import DataError, LengthwiseError
from lengthwise.data.dataset import Held
from lengthwise.data.digests import row_digest
from lengthwise.data.rows import RawRow
from lengthwise.data.shard import Span, TokenSlices, bytes_of
from lengthwise.data.stream_rows import StreamRows
from lengthwise.data.tokenizer import Tokenizer, load_tokenizer
from lengthwise.data.tokens import REFUSED, token_row

if TYPE_CHECKING:
    from lengthwise.config import DataSource

AHEAD_BYTES = 128 << 20
_PLACE_BITS = 40
_MARK_ROWS = 256  # a place to begin at is noted every so many rows


def row_number(epoch: int, place: int) -> int:
    """Return the number of the row at a place in an epoch: larger than those of all before, the place in epoch 0."""
    return epoch << _PLACE_BITS | place


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamSpec:
    """All that a reader is made of. `clients`: how many ranks ask it."""

    sources: tuple[DataSource, ...]
    tokenizer_name: str
    vocab_size: int | None
    clients: int = 1
    ahead_bytes: int = AHEAD_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadRow:
    """A row that was read, without its tokens. length 0: it is left out, `kind` says why; `error`: it stops the run.

    source: which of the sources it is of. digest: of what it holds.
    """

    name: str
    source: int
    length: int = 0
    loss_tokens: int = 0
    loss_weight: float = 0.0
    is_weighed: bool = False
    digest: bytes = b""
    kind: str = ""
    error: DataError | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadRows:
    """Rows from a place in an epoch on. ends: the epoch has no more. marks: (place, JSON) to begin at, among them."""

    rows: list[ReadRow]
    ends: bool
    marks: list[tuple[int, str]]


class Reader:
    """Serves ranks, each of which asks for rows in order, and says which it still needs."""

    def __init__(self, spec: StreamSpec) -> None:
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        self._spec = spec
        self._turn = threading.Condition()
        self._closed = False
        self._rows = OrderedDict[int, tuple[ReadRow, Held | None]]()
        self._ahead, self._ahead_bytes = deque[tuple[int, int]](), 0  # rows beyond `_wanted`, with their bytes
        self._next = self._wanted = 0
        self._ends, self._marks = dict[int, int](), dict[int, str]()
        self._needed, self._least = dict[int, int](), 0  # of each client; of all
        self._error: LengthwiseError | None = None
        self._thread: threading.Thread | None = None

    def describe(self) -> list[Any]:
        """Return what differs where the stream may differ. DataError, or Problems: it cannot be read."""
        with self._turn:  # one rank makes it for all: from Python 3.12 on a cached property has no lock
            return self._source.identity

    def begin(self, epoch: int, place: int, mark: Any) -> None:
        """Begin to read at a mark, which is a place of an epoch; all ranks ask for the same, the first counts."""
        with self._turn:
            if self._thread is None:
                self._next = self._wanted = row_number(epoch, place)
                self._thread = threading.Thread(target=self._read, args=(epoch, place, mark), daemon=True)
                self._thread.start()

    def lengths(self, client: int, epoch: int, place: int, most: int, needed: int) -> ReadRows:
        """Return at most `most` rows from a place of an epoch on, once they are read; fewer where it ends.

        needed: the first row that this client may still ask for. Raises what ends the stream early.
        """
        first = row_number(epoch, place)
        with self._turn:
            self._needed[client] = max(needed, self._needed.get(client, 0))
            self._forget()
            self._want(first + most)
            self._turn.wait_for(lambda: self._next >= first + most or epoch in self._ends or self._error is not None)
            numbers = [number for number in range(first, first + most) if number in self._rows]
            ends = epoch in self._ends and self._ends[epoch] <= place + len(numbers)  # there may be fewer than before
            if self._error is not None and not numbers and not ends:
                raise self._error
            marks = [(at, self._marks[number]) for at, number in enumerate(numbers, place + 1) if number in self._marks]
            return ReadRows(rows=[self._rows[number][0] for number in numbers], ends=ends, marks=marks)

    def slices(self, spans: Sequence[Span]) -> TokenSlices:
        """Return tokens of rows whose lengths were given, and that are still needed."""
        with self._turn:
            held = [(self._rows[number][1], start, stop) for number, start, stop in spans]
        return TokenSlices.of([(each, start, stop) for each, start, stop in held if each is not None])

    @property
    def held_bytes(self) -> int:
        """What the rows take that are held, about."""
        with self._turn:
            return sum(bytes_of(held) for _, held in self._rows.values())

    def close(self) -> None:
        """End the thread."""
        with self._turn:
            self._closed = True
            self._turn.notify_all()
        if self._thread is not None:
            self._thread.join()

    def _forget(self) -> None:
        """Let rows go that no client needs."""
        if len(self._needed) == self._spec.clients:
            self._least = min(self._needed.values())
            while self._rows and (number := next(iter(self._rows))) < self._least:
                del self._rows[number]
                self._marks.pop(number, None)

    def _want(self, stop: int) -> None:
        self._wanted = max(self._wanted, stop)
        while self._ahead and self._ahead[0][0] < self._wanted:
            self._ahead_bytes -= self._ahead.popleft()[1]
        self._turn.notify_all()

    @functools.cached_property
    def _source(self) -> StreamRows:
        return StreamRows(self._spec.sources, self._spec.vocab_size)

    @functools.cached_property
    def _tokenizer(self) -> Tokenizer:
        return load_tokenizer(self._spec.tokenizer_name)

    def _read(self, epoch: int, place: int, mark: Any) -> None:
        """Read epoch after epoch; whatever ends that is for those who wait for rows."""
        error: LengthwiseError | None = None
        try:
            while not self._closed:
                for source, name, row in self._source.rows(mark):
                    read, held = self._tokenized(source, name, row)
                    place += 1
                    text = json.dumps([place, self._source.mark]) if place % _MARK_ROWS == 0 else None
                    if not self._add(row_number(epoch, place - 1), read, held, text):
                        return
                if not place:
                    raise DataError("data", expected="at least one row", got="none", remedy="Add rows.")
                with self._turn:
                    self._ends[epoch] = place
                    epoch, place, mark = epoch + 1, 0, None
                    self._next = row_number(epoch, 0)
                    self._turn.notify_all()
        except LengthwiseError as raised:
            error = raised
        except Exception as raised:  # noqa: BLE001 - of the network and of other libraries, of many kinds
            got = f"{type(raised).__name__}: {' '.join(str(raised).split())[:300]}"
            where = f"data, row {place + 1} of the stream"
            remedy = "See that its machine answers, then go on from here."
            error = DataError(where, expected="rows that can be read", got=got, remedy=remedy)
        with self._turn:
            self._error = error
            self._turn.notify_all()

    def _add(self, number: int, read: ReadRow, held: Held | None, mark: str | None) -> bool:
        """Keep a row, then wait until there is room for the next; False: nobody needs more."""
        size = bytes_of(held)
        with self._turn:
            self._next = number + 1
            if number >= self._least:
                self._rows[number] = read, held
                if mark is not None:
                    self._marks[number] = mark
            if number >= self._wanted:
                self._ahead.append((number, size))
                self._ahead_bytes += size
            self._turn.notify_all()
            self._turn.wait_for(
                lambda: self._closed or self._ahead_bytes <= self._spec.ahead_bytes or self._next < self._wanted
            )
            return not self._closed

    def _tokenized(self, source: int, name: str, row: RawRow | DataError) -> tuple[ReadRow, Held | None]:
        spec = self._spec
        found = token_row(
            row,
            spec.sources[source],
            f"data.{source}",
            tokenizer=lambda: self._tokenizer,
            vocab_size=spec.vocab_size,
        )
        if found.tokens is None:
            error = found.error if found.kind == REFUSED else None
            return ReadRow(name=name, source=source, kind=found.kind, error=error), None
        losses, weight = found.losses
        read = ReadRow(
            name=name,
            source=source,
            length=len(found.tokens),
            loss_tokens=losses,
            loss_weight=weight,
            is_weighed=found.weights is not None,
            digest=row_digest(*found.held),
        )
        return read, found.held
