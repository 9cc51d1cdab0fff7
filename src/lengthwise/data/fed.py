"""The dataset of rows that feeds tokenize during training: lengths become known as batches need them.

Names and order of rows, and so the batches, are the same as if the sources were read at the start. The longest row is
not known in advance, so sources give `max_tokens`. A rank asks feeds (`feed`) for the next rows, and for its slices
once a step is planned.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice, pairwise
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from lengthwise.core.errors import Collector, DataError
from lengthwise.data.dataset import DatasetBuilder, StoredDataset, plain_weights
from lengthwise.data.feed import FedRow, FedRows, FeedClient, FeedSpec, RowSpan, TokenSlices
from lengthwise.data.in_order import HashOrder, StreamOrder
from lengthwise.data.prepared import ENCODING
from lengthwise.data.refusals import Refusals
from lengthwise.data.sampler import Batch, Batches, Position, no_loss
from lengthwise.data.sources import list_source
from lengthwise.data.turns import BlockTurns, HashTurns, PlacedRow, Turns

if TYPE_CHECKING:
    from lengthwise.config import DataSource, RunConfig
    from lengthwise.config.sections import GlobalBatch

STEPS_KEPT = 4  # whose slices are kept: the running step, the planned ones, and one that is being planned
_ROWS_AT_ONCE = 64  # to ask for, if steps are by tokens


def streamed(sources: Sequence[DataSource], *, seed: int, tokenizer_digest: str, **of_tokenizer: Any) -> FedDataset:
    """Return the dataset of streams, from one feed. of_tokenizer: `tokenizer_name` and `vocab_size` of its spec."""
    spec = FeedSpec(name="the stream", order=StreamOrder(sources), sources=tuple(sources), **of_tokenizer)
    return FedDataset([spec], BlockTurns(int(sources[0].streaming), seed=seed), tokenizer_digest=tokenizer_digest)


def divided(sources: Sequence[DataSource], *, seed: int, tokenizer_digest: str, **of_tokenizer: Any) -> FedDataset:
    """Return the dataset of `remote` sources, with `remote` feeds a source: some files each, or equal parts of files.

    of_tokenizer: as for `streamed`. Raises DataError, or Problems, for missing files and prepared data.
    """
    refusals, specs = Refusals(), list[FeedSpec]()
    for index, source in enumerate(sources):
        files, wanted = list_source(source, refusals.add, key=f"data.{index}", meanwhile="remote"), int(source.remote)
        shares = -(-wanted // max(1, len(files)))
        parts = [(index, replace(file, share=(share, shares))) for file in files for share in range(shares)]
        cuts = [len(parts) * number // wanted for number in range(wanted + 1)]
        for number, (first, last) in enumerate(pairwise(cuts), start=1):
            name, order = f"data.{index}, actor {number} of {wanted}", HashOrder(parts[first:last], seed=seed)
            specs.append(FeedSpec(name=name, order=order, sources=tuple(sources), **of_tokenizer))
    refusals.raise_all("data")
    return FedDataset(specs, HashTurns(seed=seed), tokenizer_digest=tokenizer_digest)


class FedDataset:
    """A `Dataset` of the rows of the last steps and of rows read beyond them, by their ids. Empty before `attach`.

    tokenizer_digest: "" if no tokenizer loads. skipped: rows left out so far, by kind. on_restart: gets a line when a
    feed was started again.
    """

    weights = ((0, 1.0),)  # an epoch takes every row once

    def __init__(self, specs: Sequence[FeedSpec], turns: Turns, *, tokenizer_digest: str) -> None:
        self.specs, self._turns, self._tokenizer_digest = tuple(specs), turns, tokenizer_digest
        self._known: Sequence[Any] = (None,)
        self._rows = dict[int, PlacedRow]()
        self._taken = deque[list[PlacedRow]]()  # of the newest steps
        self._begins = deque[Any]()  # where each feed reads the newest steps from, and the next
        self._slices = deque[_Slices](maxlen=STEPS_KEPT)
        self.skipped: Counter[str] = Counter()
        self.on_restart: Callable[[str], None] = lambda _line: None
        self.lengths: Any = _Column(self._rows, "length")
        self.loss_tokens: Any = _Column(self._rows, "loss_tokens")
        self.loss_weights: Any = _Column(self._rows, "loss_weight")

    def attach(self, clients: Sequence[FeedClient], number: int = 0) -> None:
        """Ask these clients from now on, one for each spec. number: of this rank among the ranks that ask a feed.

        Raises DataError, or Problems, if rows cannot be read.
        """
        self._clients, self._number, problems = clients, number, Collector()
        answers = [problems.attempt(wait) for wait in [client("describe") for client in clients]]
        problems.raise_all()
        self._starts = [{born} for born, _ in filter(None, answers)]
        self._identities = [identity for _, identity in filter(None, answers)]
        self._known = self._turns.attach(self._identities)

    @property
    def left_out(self) -> str:
        """The rows left out so far, in words."""
        return ", ".join(f"{number} {kind}" for kind, number in self.skipped.items())

    def batches(self, asked: GlobalBatch, start: Position = (0, 0)) -> Iterator[Batch]:
        """Yield the batches that `Batches` would, without end, from a position on.

        Raises:
            DataError: a row stops the run, or no token of a batch has a loss.
        """
        (epoch, place), step = start[:2], 0
        for old in (self._rows, self._taken, self._begins):
            old.clear()
        self._turns.begin(start)
        self._begins.append(self._turns.begins(epoch, place))
        while True:
            is_empty = place == 0
            for turns, (end_epoch, end) in self._cut(epoch, place, asked):
                step, is_empty, ids = step + 1, False, [turn.id for turn in turns]
                self._check_losses(ids)
                self._take(turns)
                self._begins.append(self._turns.begins(end_epoch, end))
                digest = hashlib.sha256(b"".join(turn.row.digest for turn in turns)).hexdigest()
                position = self._turns.position(end_epoch, end)
                yield Batch(step=step, epoch=epoch, ids=np.array(ids), end=position, digest=digest)
            if is_empty:
                got, remedy = f"none (left out: {self.left_out})", "Add rows, or raise max_tokens."
                raise DataError("data", expected="at least one sequence to train on", got=got, remedy=remedy)
            epoch, place = epoch + 1, 0

    def _cut(self, epoch: int, place: int, asked: GlobalBatch) -> Iterator[tuple[list[PlacedRow], tuple[int, int]]]:
        """Yield the rows of every step of an epoch from a place on, and where the next step begins."""
        taken, used = list[PlacedRow](), 0
        for at, turn in self._turns.rows(epoch, place, asked.sequences or _ROWS_AT_ONCE, self._ask):
            row = turn.row
            if not row.length and row.error is None:
                self.skipped[row.kind] += 1
                continue
            used += row.length
            if taken and asked.tokens is not None and (row.error is not None or used > asked.tokens):
                yield taken, (epoch, at)
                taken, used = [], row.length
            if row.error is not None:
                raise row.error
            if (before := self._rows.get(turn.id)) is not None:  # of an epoch whose steps still run
                turn.is_weighed = before.is_weighed
            self._rows[turn.id] = turn
            taken.append(turn)
            if len(taken) == asked.sequences:
                yield taken, (epoch, at + 1)
                taken = []
        if taken:
            yield taken, (epoch + 1, 0)

    def _take(self, turns: list[PlacedRow]) -> None:
        """Note the rows of a new step, and drop the rows of the oldest one."""
        if any(turn.row.is_weighed for turn in turns):
            for turn in turns:
                turn.is_weighed = True
        self._taken.append(turns)
        if len(self._taken) > STEPS_KEPT + 1:
            self._begins.popleft()
            for turn in self._taken.popleft():
                if self._rows[turn.id] is turn:
                    del self._rows[turn.id]

    def _ask(self, asked: Sequence[tuple[int, int, int]]) -> list[tuple[list[FedRow], bool]]:
        found = list[tuple[list[FedRow], bool]]()
        for (feed, first, most), waiting in zip(asked, [self._asked(*each) for each in asked], strict=True):
            rows, answer = list[FedRow](), self._checked(feed, waiting())
            rows += answer.rows
            while len(rows) < most and not answer.ends:
                answer = self._checked(feed, self._asked(feed, first + len(rows), most - len(rows))())
                assert answer.rows or answer.ends, f"no row {first + len(rows)} of {self.specs[feed].name}"
                rows += answer.rows
            found.append((rows, answer.ends))
        return found

    def _asked(self, feed: int, first: int, most: int) -> Callable[[], tuple[str, FedRows]]:
        return self._clients[feed]("rows", self._number, *self._begins[0][feed], first, most)

    def _checked(self, feed: int, answer: tuple[str, Any]) -> Any:
        """Return the answer of a feed; report a new start of the feed, and refuse changed files.

        Answers of the old start may be read after answers of the new one.
        """
        born, found = answer
        if born not in self._starts[feed]:
            name = self.specs[feed].name
            self.on_restart(f"{name} ended and was started again; it reads on from where it was")
            if self._clients[feed]("describe")()[1] != self._identities[feed]:
                remedy = "Let whatever writes it finish, then start again."
                raise DataError(name, expected="files that do not change", got="a change", remedy=remedy)
            self._starts[feed].add(born)
        return found

    def _check_losses(self, ids: list[int]) -> None:
        if not self.loss_tokens[ids].any():
            rows = f"{', '.join(self.name(row) for row in ids[:10])}{' ...' if len(ids) > 10 else ''}"
            raise no_loss("data", rows)

    def read_ahead(self, spans: Sequence[RowSpan]) -> None:
        """Ask every feed for its slices of a step, without waiting for them."""
        cut = [(row, start, min(stop, int(self.lengths[row]))) for row, start, stop in spans]
        self._slices.append(self._ask_slices([each for each in cut if each[1] < each[2]]))

    def _ask_slices(self, spans: Sequence[RowSpan]) -> _Slices:
        found, by_feed = _Slices(), dict[int, list[RowSpan]]()
        for span in spans:
            by_feed.setdefault(self._rows[span[0]].feed, []).append(span)
        for feed, own in by_feed.items():
            numbered = [(self._rows[row].number, start, stop) for row, start, stop in own]
            wait = self._clients[feed]("slices", self._begins[0][feed][0], numbered)
            found.add(own, lambda feed=feed, wait=wait: self._checked(feed, wait()))
        return found

    def _slice(self, row: int, start: int, stop: int) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        for step in reversed(self._slices):
            if (found := step.find(row, start, stop)) is not None:
                return found
        self.read_ahead([(row, 0, int(self.lengths[row]))])
        return self._slice(row, start, stop)

    def read(self, row: int, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """Return ids and labels of tokens [start, stop) of a row, int32 [stop - start] each; wait for them."""
        start, stop, _ = slice(start, stop).indices(self._row(row).length)
        if start >= stop:
            return np.empty(0, dtype=np.int32), np.empty(0, dtype=np.int32)
        return self._slice(row, start, stop)[:2]

    def read_weights(self, row: int, start: int, stop: int) -> np.ndarray | None:
        """Return the loss weights of tokens [start, stop) of a row, float32 [stop - start]; None if all are 0 or 1."""
        if not self._rows[row].is_weighed:
            return None
        start, stop, _ = slice(start, stop).indices(self._row(row).length)
        if start >= stop:
            return np.empty(0, dtype=np.float32)
        _, labels, weights = self._slice(row, start, stop)
        return plain_weights(labels) if weights is None else weights

    @property
    def ids(self) -> np.ndarray:
        """The known rows, int64."""
        return np.array([*self._rows], dtype=np.int64)

    def digest(self) -> bytes:
        """Return a digest of files, settings and tokenizer, 32 bytes; before `attach`, without the files."""
        known = {"max_tokens", "too_long", "empty", "bad_rows"}
        sources = enumerate(self.specs[0].sources)
        settings = {f"data.{number}": source.model_dump(mode="json", include=known) for number, source in sources}
        values = [ENCODING, self._tokenizer_digest, settings, self.specs[0].vocab_size, *self._known]
        return hashlib.sha256(json.dumps(values).encode()).digest()

    def name(self, row: int) -> str:
        """Return the place of a row: `train.jsonl:3`, `org/name:train:3`, or the path of a document."""
        return self._row(row).name

    def source_key(self, row: int) -> str:
        """Return the config path of a row's source: `data.0`."""
        return f"data.{self._row(row).source}"

    def _row(self, row: int) -> FedRow:
        if row not in self._rows:
            raise IndexError(f"row {row}: it did not come yet, or its step is over")
        return self._rows[row].row


class _Column:
    """One number of every row, indexed as an array."""

    def __init__(self, rows: Mapping[int, PlacedRow], name: str) -> None:
        self._rows, self._name = rows, name

    def __getitem__(self, asked: Any) -> Any:
        if isinstance(asked, list | np.ndarray):
            return np.array([self[row] for row in asked])
        return getattr(self._rows[int(asked)].row, self._name)

    def __len__(self) -> int:
        return len(self._rows)


class _Slices:
    """The slices of one request to every feed; the first read of a feed's slices waits for them."""

    def __init__(self) -> None:
        self._of_row = dict[int, list[tuple[int, int, int, Callable[[], TokenSlices]]]]()

    def add(self, spans: Sequence[RowSpan], wait: Callable[[], TokenSlices]) -> None:
        """Add the spans of one feed. wait: returns their slices in the same order."""
        answer, place = functools.cache(wait), 0
        for row, start, stop in spans:
            self._of_row.setdefault(row, []).append((start, stop, place, answer))
            place += stop - start

    def find(self, row: int, start: int, stop: int) -> tuple[np.ndarray, np.ndarray, np.ndarray | None] | None:
        """Return ids, labels and weights of tokens [start, stop) of a row; None if they were not asked for."""
        for first, last, place, answer in self._of_row.get(row, ()):
            if first <= start and stop <= last:
                found, cut = answer(), slice(place + start - first, place + stop - first)
                labels = found.ids if found.labels is None else found.labels
                return found.ids[cut], labels[cut], None if found.weights is None else found.weights[cut]
        return None


def longest_rows(sources: Sequence[DataSource]) -> StoredDataset:
    """Return a dataset of one row of `max_tokens` for every source, for forecasts and limits."""
    builder = DatasetBuilder()
    for index, source in enumerate(sources):
        assert source.max_tokens is not None, "the run file's rules ask for it"
        builder.start_source(f"data.{index}", "", ("any row, as long as max_tokens allows",))
        builder.add(np.zeros(source.max_tokens, dtype=np.int32), None)
    return builder.finish()


@dataclass(frozen=True, slots=True, kw_only=True)
class FedSteps:
    """The steps of rows from feeds. known: the longest row that every source may have."""

    dataset: FedDataset
    known: StoredDataset
    config: RunConfig
    is_known: bool = False

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
        """Yield the steps after the first `step`; if `position` is None, read these again."""
        passed = 0 if position else step
        found = self.dataset.batches(self.config.global_batch, position or (0, 0))
        return islice(found, passed, passed + self.num_steps - step)

    def drawn_lengths(self, most: int) -> np.ndarray:
        """Return the longest lengths that rows may have."""
        return self.known.lengths[:most]

    def check_losses(self) -> None:
        """Do nothing: a step without a loss is refused when it comes."""


Steps: TypeAlias = Batches | FedSteps
"""The sequences of every step of a run."""
