"""Raw rows of a source, read and tokenized ahead of who trains on them: what one actor of a remote loader is.

A shard is asked by row numbers alone: for lengths in the order of an epoch, then for slices of rows. From what was last
asked for it knows what comes next, and tokenizes that in a thread of its own. What it has read is no state: rows that
are not in its cache are tokenized again, so one that starts anew loses and repeats nothing.

Memory: the cache has two halves of `cache_bytes`, rows that nobody took a slice of yet and those that somebody did, of
which the oldest go first; beside it about 60 bytes a row.
"""

from __future__ import annotations

import bisect
import contextlib
import functools
import os
import secrets
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from lengthwise.core.errors import DataError, LengthwiseError
from lengthwise.data.dataset import Held, plain_weights
from lengthwise.data.numbered import Counted, RowsByNumber, numbered
from lengthwise.data.sampler import epoch_keys
from lengthwise.data.sources import Listing
from lengthwise.data.tokenizer import Tokenizer, load_tokenizer
from lengthwise.data.tokens import REFUSED, token_row

if TYPE_CHECKING:
    from lengthwise.config import DataSource

CACHE_BYTES = 256 << 20
_ROW_BYTES = 500  # what a row in the cache takes beside its tokens, about
_UNKNOWN = -1

Span = tuple[int, int, int]
"""Tokens [start, stop) of a row: (row, start, stop)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardSpec:
    """All that a shard is made of. `name`: in messages. `key`: the config path of its source. `parts`: its rows."""

    name: str
    key: str
    source: DataSource
    parts: tuple[Listing, ...]
    tokenizer_name: str
    vocab_size: int | None
    seed: int
    cache_bytes: int = CACHE_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """Of rows in the order that they were asked for: tokens, tokens with a loss, what those weigh; int64 and float64.

    left_out: by row, the kind of those without tokens, and the error of those that stop the run.
    """

    tokens: np.ndarray
    loss_tokens: np.ndarray
    loss_weights: np.ndarray
    left_out: dict[int, tuple[str, DataError | None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenSlices:
    """Ids, labels and weights of spans, one after the other, (tokens,); None: labels are the ids, weights 0 and 1."""

    ids: np.ndarray
    labels: np.ndarray | None
    weights: np.ndarray | None

    @classmethod
    def of(cls, spans: Sequence[tuple[Held, int, int]]) -> TokenSlices:
        """Cut tokens [start, stop) of each row."""
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


class Shard:
    """Serves a shard to one caller at a time; all rows of the run are numbered, and `first` is the first of these."""

    def __init__(self, spec: ShardSpec) -> None:
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        self._spec, self.born = spec, secrets.token_hex(8)
        self._turn = threading.Condition()
        self._wanted = self._closed = False
        self._fresh, self._taken = _Cache(spec.cache_bytes // 2), _Cache(spec.cache_bytes // 2)
        self._left_out = dict[int, tuple[str, DataError | None]]()
        self._order: _Order | None = None
        self._thread: threading.Thread | None = None

    def describe(self) -> tuple[str, list[Counted] | LengthwiseError]:
        """Return what tells this start from others, and the rows of each part, or why they cannot be read."""
        try:
            return self.born, [part.counted for part in self._parts]
        except LengthwiseError as error:
            return self.born, error

    def lengths(self, first: int, epoch: int, rows: np.ndarray) -> tuple[str, Lengths]:
        """Return the lengths of `rows`, the next ones in the order of an epoch; those that follow are read ahead."""
        with self._asking():
            rows = rows - first
            self._go_to(first, epoch, int(rows[-1]))
            for row in rows.tolist():
                if self._numbers[row, 0] == _UNKNOWN:
                    self._fresh.add(row, self._tokenized(row))
            tokens, losses, weights = (self._numbers[rows, column] for column in range(3))
            left_out = {row + first: self._left_out[row] for row in rows.tolist() if row in self._left_out}
        counts = {"tokens": tokens.astype(np.int64), "loss_tokens": losses.astype(np.int64)}
        return self.born, Lengths(**counts, loss_weights=weights, left_out=left_out)

    def slices(self, first: int, spans: Sequence[Span]) -> tuple[str, TokenSlices]:
        """Return tokens of rows."""
        with self._asking():
            held = [(self._take(row - first), start, stop) for row, start, stop in spans]
        return self.born, TokenSlices.of(held)

    @property
    def held_bytes(self) -> int:
        """What the cache holds."""
        return self._fresh.num_bytes + self._taken.num_bytes

    def close(self) -> None:
        """End the thread, and close the files."""
        with self._turn:
            self._closed = True
            self._turn.notify_all()
        if self._thread is not None:
            self._thread.join()
        for each in self.__dict__.get("_parts", ()):
            each.close()

    @contextlib.contextmanager
    def _asking(self) -> Iterator[None]:
        """Let a caller have its turn before the next row is read ahead."""
        self._wanted = True
        with self._turn:
            try:
                yield
            finally:
                self._wanted = False
                self._turn.notify_all()

    @functools.cached_property
    def _parts(self) -> list[RowsByNumber]:
        return [numbered(part, self._spec.vocab_size) for part in self._spec.parts]

    @functools.cached_property
    def _firsts(self) -> list[int]:
        return [0, *np.cumsum([part.counted.rows for part in self._parts], dtype=np.int64).tolist()]

    @functools.cached_property
    def _numbers(self) -> np.ndarray:
        """Tokens, loss tokens and loss weights of each row, (rows, 3); -1 until they are known."""
        return np.full((self._firsts[-1], 3), float(_UNKNOWN))

    @functools.cached_property
    def _tokenizer(self) -> Tokenizer:
        return load_tokenizer(self._spec.tokenizer_name)

    def _go_to(self, first: int, epoch: int, row: int) -> None:
        """Read ahead what follows a row in the order of an epoch; what is further on already stays there."""
        if self._order is None or self._order.epoch < epoch:
            self._order = _Order(self._firsts[-1], first, seed=self._spec.seed, epoch=epoch)
        self._order.pass_by(epoch, row)
        if self._thread is None:
            self._thread = threading.Thread(target=self._read_ahead, name="read ahead", daemon=True)
            self._thread.start()

    def _read_ahead(self) -> None:
        while True:
            with self._turn:
                order = self._turn.wait_for(self._next_order)
                if self._closed:
                    return
                row = order.next()
                if self._numbers[row, 0] != 0 and row not in self._fresh and row not in self._taken:
                    self._fresh.add(row, self._tokenized(row))

    def _next_order(self) -> Any:
        """Return where the next row to read ahead comes from, once there is room for one and nobody asks."""
        assert self._order is not None, "who reads ahead was asked for lengths"
        may_go_on = not (self._wanted or self._fresh.is_full or self._order.is_far)
        return self._order if may_go_on or self._closed else None

    def _take(self, row: int) -> Held:
        held = self._taken.get(row)
        if held is None:
            held = self._fresh.pop(row) or self._tokenized(row)
            assert held is not None, f"row {row} has no tokens, and was asked for"
            self._taken.push(row, held)
        return held

    def _tokenized(self, row: int) -> Held | None:
        part = bisect.bisect_right(self._firsts, row) - 1
        read, spec = self._parts[part].row(row - self._firsts[part]), self._spec
        of_source = {"tokenizer": lambda: self._tokenizer, "vocab_size": spec.vocab_size}
        found = token_row(read, spec.source, spec.key, **of_source)
        if found.tokens is None:
            self._numbers[row] = 0
            error = found.error if found.kind == REFUSED else None
            self._left_out[row] = (found.kind, error)
            return None
        self._numbers[row] = len(found.tokens), *found.losses
        return found.held


class _Cache:
    """Rows of at most so many bytes together."""

    def __init__(self, most_bytes: int) -> None:
        self._most, self.num_bytes = most_bytes, 0
        self._rows = OrderedDict[int, Held]()
        self.is_full = False

    def __contains__(self, row: int) -> bool:
        return row in self._rows

    def get(self, row: int) -> Held | None:
        return self._rows.get(row)

    def add(self, row: int, held: Held | None) -> None:
        """Keep a row if there is room."""
        if held is None or row in self._rows:
            return
        fits = self.num_bytes + bytes_of(held) <= self._most
        self.is_full = not fits and bool(self._rows)  # else nothing that goes would make room
        if fits:
            self._rows[row] = held
            self.num_bytes += bytes_of(held)

    def push(self, row: int, held: Held) -> None:
        """Keep a row, and let the oldest go for it; one that is larger than all of the room is not kept."""
        size = bytes_of(held)
        while self._rows and self.num_bytes + size > self._most:
            self.num_bytes -= bytes_of(self._rows.popitem(last=False)[1])
        if size <= self._most:
            self._rows[row] = held
            self.num_bytes += size

    def pop(self, row: int) -> Held | None:
        held = self._rows.pop(row, None)
        if held is not None:
            self.num_bytes -= bytes_of(held)
            self.is_full = False
        return held


def bytes_of(held: Held | None) -> int:
    """Return what a row takes in memory, about; None: one without tokens."""
    return _ROW_BYTES + sum(each.nbytes for each in held or () if each is not None)


class _Order:
    """The rows of a shard in the order of one epoch after another, from the last that was asked for on."""

    def __init__(self, rows: int, first: int, *, seed: int, epoch: int) -> None:
        self._ids, self._first, self._seed = np.arange(rows), first, seed
        self._gone = 0  # rows since the last that was asked for
        self._begin(epoch)

    def _begin(self, epoch: int) -> None:
        keys = epoch_keys(self._ids + self._first, seed=self._seed, epoch=epoch)
        self._rows = np.argsort(keys, kind="stable")
        self._keys = keys[self._rows]
        self.epoch, self._place = epoch, 0

    @property
    def is_far(self) -> bool:
        """Whether all rows were gone through since lengths were asked for: more would only come round again."""
        return self._gone >= len(self._rows)

    def pass_by(self, epoch: int, row: int) -> None:
        self._gone = 0
        if epoch != self.epoch:  # which is ahead already
            return
        key = epoch_keys(np.array([row + self._first]), seed=self._seed, epoch=epoch)
        self._place = max(self._place, int(np.searchsorted(self._keys, key[0])) + 1)

    def next(self) -> int:
        if self._place == len(self._rows):
            self._begin(self.epoch + 1)
        self._place, self._gone = self._place + 1, self._gone + 1
        return int(self._rows[self._place - 1])
