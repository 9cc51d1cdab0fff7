"""What datasets share whose rows others read and tokenize while they are trained on: batches, and slices on their way.

Who reads is asked for lengths as batches need them, and for the slices of a step when it is planned. Rows that are left
out are dropped in passing.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np

from lengthwise.core.errors import DataError
from lengthwise.data.dataset import NumberedRows, StoredDataset, plain_weights
from lengthwise.data.digests import row_digest
from lengthwise.data.prepared import ENCODING
from lengthwise.data.sampler import Batch, Batches, Position, no_loss
from lengthwise.data.shard import ShardSpec, Span, TokenSlices

if TYPE_CHECKING:
    from lengthwise.config import DataSource, RunConfig
    from lengthwise.config.sections import GlobalBatch

STEPS_KEPT = 4  # of slices: of the step that runs, of those that are planned, and of one that is planned meanwhile
_ROWS_AT_ONCE = 64  # whose lengths are asked for at least, where a step has as many rows as fit


def settings_digest(tokenizer_digest: str, sources: Mapping[str, DataSource], *others: Any) -> bytes:
    """Return 32 bytes that differ where a tokenizer, what sources do with rows, or `others`, for JSON, differ."""
    known = {"max_tokens", "too_long", "empty", "bad_rows"}
    settings = {key: source.model_dump(mode="json", include=known) for key, source in sources.items()}
    return hashlib.sha256(json.dumps([ENCODING, tokenizer_digest, settings, *others]).encode()).digest()


class ShardClient(Protocol):
    """Asks one shard, wherever it is."""

    @property
    def spec(self) -> ShardSpec:
        """The shard."""
        ...

    def ask(self, method: str, *arguments: Any) -> Callable[[], Any]:
        """Call a method of the shard; return what waits for its answer, the start that it is of first."""
        ...


class ServedDataset(NumberedRows):
    """Rows whose lengths become known in the order of `batches`. skipped: rows that were left out so far."""

    lengths: Any
    loss_tokens: Any

    def __init__(self) -> None:
        self._errors, self._steps = dict[int, DataError](), deque[Fetched](maxlen=STEPS_KEPT)
        self.skipped: Counter[str] = Counter()

    @property
    def left_out(self) -> str:
        """How many rows of which kind were left out so far, in words."""
        return ", ".join(f"{number} {kind}" for kind, number in self.skipped.items())

    def name(self, row: int) -> str:
        """Return where a row is."""
        raise NotImplementedError

    def digest(self) -> bytes:
        """Return 32 bytes that differ where rows may differ."""
        raise NotImplementedError

    def _known(self, epoch: int, place: int, most: int) -> Iterator[tuple[int, int]]:
        """Yield (place, row) of rows with tokens, or an error, from a place on; ask for `most` lengths at once."""
        raise NotImplementedError

    def _fetched(self, spans: Sequence[Span]) -> Fetched:
        """Ask for slices, without waiting for them."""
        raise NotImplementedError

    def _is_weighed(self, row: int) -> bool:
        """Whether a row, or another of its step, may have weights other than 0 and 1."""
        raise NotImplementedError

    def batches(self, asked: GlobalBatch, start: Position = (0, 0)) -> Iterator[Batch]:
        """Yield batches without end from a place in an epoch's order on, those of `Batches`.

        Raises:
            DataError: a row of the batch stops the run, or none of its tokens has a loss.
        """
        (epoch, place), step = start[:2], 0
        while True:
            is_empty = place == 0
            for ids, end in self._cut(epoch, place, asked):
                self._check_losses(ids)
                step, is_empty = step + 1, False
                yield self._batch(step, epoch, ids, end)
            if is_empty:
                got, remedy = f"none (left out: {self.left_out})", "Add rows, or raise max_tokens."
                raise DataError("data", expected="at least one sequence to train on", got=got, remedy=remedy)
            epoch, place = epoch + 1, 0

    def _batch(self, step: int, epoch: int, ids: list[int], end: tuple[int, int]) -> Batch:
        return Batch(step=step, epoch=epoch, ids=np.array(ids), end=end)

    def _cut(self, epoch: int, place: int, asked: GlobalBatch) -> Iterator[tuple[list[int], tuple[int, int]]]:
        """Yield the rows of each step of an epoch from a place in its order on, and where the next one begins."""
        taken, used = list[int](), 0
        for at, row in self._known(epoch, place, asked.sequences or _ROWS_AT_ONCE):
            used += int(self.lengths[row])
            if taken and asked.tokens is not None and (row in self._errors or used > asked.tokens):
                yield taken, (epoch, at)
                taken, used = [], int(self.lengths[row])
            if row in self._errors:
                raise self._errors[row]
            taken.append(row)
            if len(taken) == asked.sequences:
                yield taken, (epoch, at + 1)
                taken = []
        if taken:
            yield taken, (epoch + 1, 0)

    def _check_losses(self, ids: list[int]) -> None:
        if not self.loss_tokens[ids].any():
            rows = f"{', '.join(self.name(row) for row in ids[:10])}{' ...' if len(ids) > 10 else ''}"
            raise no_loss("data", rows)

    def read_ahead(self, spans: Sequence[Span]) -> None:
        """Ask for the slices of a step, one request a shard, without waiting for them."""
        cut = [(row, start, min(stop, int(self.lengths[row]))) for row, start, stop in spans]
        self._steps.append(self._fetched([each for each in cut if each[1] < each[2]]))

    def _slice(self, row: int, start: int, stop: int) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        for step in reversed(self._steps):
            if (found := step.find(row, start, stop)) is not None:
                return found
        if not self._steps:
            self._steps.append(Fetched())
        self._steps[-1].take_in(self._fetched([(row, 0, int(self.lengths[row]))]))
        found = self._steps[-1].find(row, start, stop)
        assert found is not None, f"tokens {start} to {stop} of row {row}, of {self.lengths[row]}"
        return found

    def read(self, row: int, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """Return ids and labels of tokens [start, stop) of a row, int32 [stop - start] each; wait for them."""
        self.check_row(row)
        start, stop, _ = slice(start, stop).indices(int(self.lengths[row]))
        if start >= stop:
            return np.empty(0, dtype=np.int32), np.empty(0, dtype=np.int32)
        return self._slice(row, start, stop)[:2]

    def read_weights(self, row: int, start: int, stop: int) -> np.ndarray | None:
        """Return what the losses of tokens [start, stop) of a row weigh, float32 [stop - start]; None: all 0 or 1."""
        if not self._is_weighed(row):
            return None
        start, stop, _ = slice(start, stop).indices(int(self.lengths[row]))
        if start >= stop:
            return np.empty(0, dtype=np.float32)
        _, labels, weights = self._slice(row, start, stop)
        return plain_weights(labels) if weights is None else weights

    @property
    def weights(self) -> tuple[tuple[int, float], ...]:
        """The first row of each source, and 1.0: an epoch takes every row once."""
        return ((0, 1.0),)

    def row_digests(self, first: int, last: int) -> np.ndarray:
        """Return what tells rows [first, last), whose lengths are known, from others, uint8 [last - first, 16]."""
        found = bytearray()
        for row in range(first, last):
            length = int(self.lengths[row])
            found += row_digest(*self.read(row, 0, length), self.read_weights(row, 0, length))
        return np.frombuffer(found, dtype=np.uint8).reshape(last - first, -1)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedSteps:
    """The steps of rows that are read meanwhile. known: of each source the longest row that it may have."""

    dataset: ServedDataset
    known: StoredDataset
    config: RunConfig
    is_known: bool = False
    first_lengths: None = None

    @property
    def num_steps(self) -> int:
        """Steps of the whole run."""
        assert self.config.steps is not None, "the run file's rules ask for it"
        return self.config.steps

    @property
    def most_tokens(self) -> int:
        """The most tokens that a global batch can have."""
        longest, asked = int(self.known.lengths.max()), self.config.global_batch
        return longest * (asked.sequences or 1) if asked.tokens is None else max(longest, asked.tokens)

    def after(self, step: int, position: Position | None) -> Iterator[Batch]:
        """Yield what follows the first `step` steps, which are gone through where `position` is None."""
        passed = 0 if position else step
        found = self.dataset.batches(self.config.global_batch, position or (0, 0))
        return islice(found, passed, passed + self.num_steps - step)

    def drawn_lengths(self, most: int) -> np.ndarray:
        """Return the longest that rows may have."""
        return self.known.lengths[:most]

    def check_losses(self) -> None:
        """Do nothing: a step without a loss is refused when it comes."""


Steps: TypeAlias = Batches | ServedSteps
"""Which sequences each step of a run takes, and what of them is known before the first."""


class Fetched:
    """TokenSlices that were asked for together; they are waited for when the first of them is read."""

    def __init__(self) -> None:
        self._of_row = dict[int, list[tuple[int, int, int, Callable[[], TokenSlices]]]]()

    def add(self, spans: Sequence[Span], wait: Callable[[], TokenSlices]) -> None:
        """Note slices that `wait` returns, in the order of their spans."""
        answer, place = functools.cache(wait), 0
        for row, start, stop in spans:
            self._of_row.setdefault(row, []).append((start, stop, place, answer))
            place += stop - start

    def take_in(self, other: Fetched) -> None:
        """Add the slices of another request."""
        for row, spans in other._of_row.items():
            self._of_row.setdefault(row, []).extend(spans)

    def find(self, row: int, start: int, stop: int) -> tuple[np.ndarray, np.ndarray, np.ndarray | None] | None:
        """Return ids, labels and weights of tokens [start, stop) of a row, if they were asked for; wait for them."""
        for first, last, place, answer in self._of_row.get(row, ()):
            if first <= start and stop <= last:
                found, cut = answer(), slice(place + start - first, place + stop - first)
                labels = found.ids if found.labels is None else found.labels
                return found.ids[cut], labels[cut], None if found.weights is None else found.weights[cut]
        return None
