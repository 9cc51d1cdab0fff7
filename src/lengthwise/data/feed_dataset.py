"""The dataset of rows that feeds tokenize during training: a rank learns lengths as batches need them.

Names, order and batches are the same as if the sources were read at the start. The longest row is not known in
advance, so sources give `max_tokens`. A rank asks feeds (`data/feed.py`) for the next rows, and for its slices once a
step is planned.
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
from lengthwise.data.dataset import Dataset, DatasetBuilder, StoredDataset, plain_weights
from lengthwise.data.feed import FeedClient, FeedRow, FeedRows, FeedSpec, RowSpan, TokenSlices
from lengthwise.data.feed_order import BlockShuffle, GlobalShuffle, PlacedRow, RowOrder
from lengthwise.data.in_order import HashOrder, StreamOrder
from lengthwise.data.prepared import ENCODING
from lengthwise.data.refusals import Refusals
from lengthwise.data.sampler import Batch, Batches, Position, no_loss
from lengthwise.data.sources import list_source

if TYPE_CHECKING:
    from lengthwise.config import DataSource, RunConfig
    from lengthwise.config.sections import GlobalBatch
    from lengthwise.data.image_files import ImageFile

STEPS_KEPT = 4  # steps whose slices are kept: the running, the planned, and one that is being planned
_ROWS_AT_ONCE = 64  # rows of a request, if steps are by tokens


def streamed(sources: Sequence[DataSource], *, seed: int, tokenizer_digest: str, **of_tokenizer: Any) -> FeedDataset:
    """Return the dataset of streams, from one feed. of_tokenizer: `tokenizer_name` and `vocab_size` of `FeedSpec`."""
    spec = FeedSpec(name="the stream", order=StreamOrder(sources), sources=tuple(sources), **of_tokenizer)
    return FeedDataset([spec], BlockShuffle(int(sources[0].streaming), seed=seed), tokenizer_digest=tokenizer_digest)


def divided(sources: Sequence[DataSource], *, seed: int, tokenizer_digest: str, **of_tokenizer: Any) -> FeedDataset:
    """Return the dataset of `remote` sources, with `remote` feeds a source: some files each, or equal parts of files.

    of_tokenizer: as for `streamed`.
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
    return FeedDataset(specs, GlobalShuffle(seed=seed), tokenizer_digest=tokenizer_digest)


class FeedDataset:
    """A `Dataset` of the rows of the newest steps and of rows read beyond them. Empty before `attach`.

    tokenizer_digest: digest of the tokenizer, "" if none loads. skipped: number of rows left out so far, by reason.
    on_restart: function that is called with a line for the user when a feed was started again.
    """

    weights = ((0, 1.0),)  # an epoch takes every row once
    first_with_images = None

    def __init__(self, specs: Sequence[FeedSpec], order: RowOrder, *, tokenizer_digest: str) -> None:
        self.specs, self._order, self._tokenizer_digest = tuple(specs), order, tokenizer_digest
        self._digested: Sequence[Any] = (None,)  # feeds' part of `digest`
        self._rows = dict[int, PlacedRow]()
        self._steps = deque[list[PlacedRow]]()  # rows of the newest steps
        self._read_from = deque[Any]()  # per step of `_steps`, and for the next one: `RowOrder.read_from`
        self._slices = deque[_Slices](maxlen=STEPS_KEPT)
        self._seeing = deque[_Slices](maxlen=STEPS_KEPT + 1)  # per step of `_steps`: its rows with images, whole
        self.skipped: Counter[str] = Counter()
        self.on_restart: Callable[[str], None] = lambda _line: None
        self.lengths: Any = _Column(self._rows, "length")
        self.loss_tokens: Any = _Column(self._rows, "loss_tokens")
        self.loss_weights: Any = _Column(self._rows, "loss_weight")

    def attach(self, clients: Sequence[FeedClient], number: int = 0) -> None:
        """Use these clients, one per spec. number: number of this rank among the clients of a feed."""
        self._clients, self._number, problems = clients, number, Collector()
        answers = [problems.attempt(wait) for wait in [client("describe") for client in clients]]
        problems.raise_all()
        self._starts = [{born} for born, _ in filter(None, answers)]
        self._identities = [identity for _, identity in filter(None, answers)]
        self._digested = self._order.attach(self._identities)

    @property
    def left_out(self) -> str:
        """Numbers of rows left out so far, in words."""
        return ", ".join(f"{number} {kind}" for kind, number in self.skipped.items())

    def batches(self, batch_size: GlobalBatch, start: Position = (0, 0)) -> Iterator[Batch]:
        """Yield the batches that `Batches` would, without end, from a position on."""
        (epoch, place), step = start[:2], 0
        for old in (self._rows, self._steps, self._read_from, self._seeing):
            old.clear()
        self._order.begin(start)
        self._read_from.append(self._order.read_from(epoch, place))
        while True:
            is_empty = place == 0
            for rows, (end_epoch, end) in self._cut(epoch, place, batch_size):
                step, is_empty, ids = step + 1, False, [placed.id for placed in rows]
                self._check_losses(ids)
                self._add_step(rows)
                self._read_from.append(self._order.read_from(end_epoch, end))
                digest = hashlib.sha256(b"".join(placed.row.digest for placed in rows)).hexdigest()
                position = self._order.position(end_epoch, end)
                yield Batch(step=step, epoch=epoch, ids=np.array(ids), end=position, digest=digest)
            if is_empty:
                got, remedy = f"none (left out: {self.left_out})", "Add rows, or raise max_tokens."
                raise DataError("data", expected="at least one sequence to train on", got=got, remedy=remedy)
            epoch, place = epoch + 1, 0

    def _cut(
        self, epoch: int, place: int, batch_size: GlobalBatch
    ) -> Iterator[tuple[list[PlacedRow], tuple[int, int]]]:
        """Yield (rows of a step, (epoch, place) of the next step) from a place to the end of the epoch."""
        step, tokens = list[PlacedRow](), 0
        for at, placed in self._order.rows(epoch, place, batch_size.sequences or _ROWS_AT_ONCE, self._request):
            row = placed.row
            if not row.length and row.error is None:
                self.skipped[row.kind] += 1
                continue
            tokens += row.length
            if step and batch_size.tokens is not None and (row.error is not None or tokens > batch_size.tokens):
                yield step, (epoch, at)
                step, tokens = [], row.length
            if row.error is not None:
                raise row.error
            if (before := self._rows.get(placed.id)) is not None:  # of an epoch whose steps still run
                placed.is_weighed = before.is_weighed
            self._rows[placed.id] = placed
            step.append(placed)
            if len(step) == batch_size.sequences:
                yield step, (epoch, at + 1)
                step = []
        if step:
            yield step, (epoch + 1, 0)

    def _add_step(self, rows: list[PlacedRow]) -> None:
        """Keep the rows of a new step, and drop the rows of the oldest one."""
        if any(placed.row.is_weighed for placed in rows):
            for placed in rows:
                placed.is_weighed = True
        self._steps.append(rows)
        # Each rank needs the places of images in a row, to plan the step.
        self._seeing.append(self._ask_slices([(each.id, 0, each.row.length) for each in rows if each.row.images]))
        if len(self._steps) > STEPS_KEPT + 1:
            self._read_from.popleft()
            for placed in self._steps.popleft():
                if self._rows[placed.id] is placed:
                    del self._rows[placed.id]

    def _request(self, requests: Sequence[tuple[int, int, int]]) -> list[tuple[list[FeedRow], bool]]:
        """Return (rows, True if their epoch ends) for every (feed, first number, number of rows)."""
        answers = list[tuple[list[FeedRow], bool]]()
        for (feed, first, most), wait in zip(requests, [self._sent(*each) for each in requests], strict=True):
            rows, answer = list[FeedRow](), self._checked(feed, wait())
            rows += answer.rows
            while len(rows) < most and not answer.ends:
                answer = self._checked(feed, self._sent(feed, first + len(rows), most - len(rows))())
                assert answer.rows or answer.ends, f"no row {first + len(rows)} of {self.specs[feed].name}"
                rows += answer.rows
            answers.append((rows, answer.ends))
        return answers

    def _sent(self, feed: int, first: int, most: int) -> Callable[[], tuple[str, FeedRows]]:
        return self._clients[feed]("rows", self._number, *self._read_from[0][feed], first, most)

    def _checked(self, feed: int, answer: tuple[str, Any]) -> Any:
        """Return the content of an answer; report that the feed was started again, and refuse changed files.

        Answers of the old start may be read after answers of the new one.
        """
        born, content = answer
        if born not in self._starts[feed]:
            name = self.specs[feed].name
            self.on_restart(f"{name} ended and was started again; it reads on from where it was")
            if self._clients[feed]("describe")()[1] != self._identities[feed]:
                remedy = "Let whatever writes it finish, then start again."
                raise DataError(name, expected="files that do not change", got="a change", remedy=remedy)
            self._starts[feed].add(born)
        return content

    def _check_losses(self, ids: list[int]) -> None:
        if not self.loss_tokens[ids].any():
            rows = f"{', '.join(self.name(row) for row in ids[:10])}{' ...' if len(ids) > 10 else ''}"
            raise no_loss("data", rows)

    def read_ahead(self, spans: Sequence[RowSpan]) -> None:
        """Request the slices of a step from every feed, and return at once."""
        cut = [(row, start, min(stop, int(self.lengths[row]))) for row, start, stop in spans if not self.images(row)]
        self._slices.append(self._ask_slices([each for each in cut if each[1] < each[2]]))

    def _ask_slices(self, spans: Sequence[RowSpan]) -> _Slices:
        slices, by_feed = _Slices(), dict[int, list[RowSpan]]()
        for span in spans:
            by_feed.setdefault(self._rows[span[0]].feed, []).append(span)
        for feed, own in by_feed.items():
            numbered = [(self._rows[row].number, start, stop) for row, start, stop in own]
            wait = self._clients[feed]("slices", self._read_from[0][feed][0], numbered)
            slices.add(own, lambda feed=feed, wait=wait: self._checked(feed, wait()))
        return slices

    def _slice(self, row: int, start: int, stop: int) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        for slices in (*reversed(self._slices), *reversed(self._seeing)):
            if (arrays := slices.find(row, start, stop)) is not None:
                return arrays
        self._slices.append(self._ask_slices([(row, 0, int(self.lengths[row]))]))
        return self._slice(row, start, stop)

    def read(self, row: int, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        start, stop, _ = slice(start, stop).indices(self._row(row).length)
        if start >= stop:
            return np.empty(0, dtype=np.int32), np.empty(0, dtype=np.int32)
        return self._slice(row, start, stop)[:2]

    def read_weights(self, row: int, start: int, stop: int) -> np.ndarray | None:
        if not self._rows[row].is_weighed:
            return None
        start, stop, _ = slice(start, stop).indices(self._row(row).length)
        if start >= stop:
            return np.empty(0, dtype=np.float32)
        _, labels, weights = self._slice(row, start, stop)
        return plain_weights(labels) if weights is None else weights

    @property
    def ids(self) -> np.ndarray:
        """Ids of the rows of the newest steps, int64."""
        return np.array([*self._rows], dtype=np.int64)

    def digest(self) -> bytes:
        """Return a digest of files, settings and tokenizer, 32 bytes; before `attach`, without the files."""
        keys = {"max_tokens", "too_long", "empty", "bad_rows"}
        sources = enumerate(self.specs[0].sources)
        settings = {f"data.{number}": source.model_dump(mode="json", include=keys) for number, source in sources}
        values = [ENCODING, self._tokenizer_digest, settings, self.specs[0].vocab_size, *self._digested]
        return hashlib.sha256(json.dumps(values).encode()).digest()

    def images(self, row: int) -> Sequence[ImageFile]:
        """Return the images of a row, in the order of their tokens."""
        return self._row(row).images

    def name(self, row: int) -> str:
        return self._row(row).name

    def source_key(self, row: int) -> str:
        return f"data.{self._row(row).source}"

    def _row(self, row: int) -> FeedRow:
        if row not in self._rows:
            raise IndexError(f"row {row}: it did not come yet, or its step is over")
        return self._rows[row].row


class _Column:
    """A field of all rows, indexed by row ids as an array."""

    def __init__(self, rows: Mapping[int, PlacedRow], name: str) -> None:
        self._rows, self._name = rows, name

    def __getitem__(self, ids: Any) -> Any:
        if isinstance(ids, list | np.ndarray):
            return np.array([self[row] for row in ids])
        return getattr(self._rows[int(ids)].row, self._name)

    def __len__(self) -> int:
        return len(self._rows)


class _Slices:
    """The slices of a step; the first read of a feed's slices waits for its answer."""

    def __init__(self) -> None:
        self._of_row = dict[int, list[tuple[int, int, int, Callable[[], TokenSlices]]]]()

    def add(self, spans: Sequence[RowSpan], wait: Callable[[], TokenSlices]) -> None:
        """Add the spans of a feed. wait: function that returns their slices, in the same order."""
        answer, place = functools.cache(wait), 0
        for row, start, stop in spans:
            self._of_row.setdefault(row, []).append((start, stop, place, answer))
            place += stop - start

    def find(self, row: int, start: int, stop: int) -> tuple[np.ndarray, np.ndarray, np.ndarray | None] | None:
        """Return ids, labels and weights of tokens [start, stop) of a row; None if no span has them."""
        for first, last, place, answer in self._of_row.get(row, ()):
            if first <= start and stop <= last:
                slices, cut = answer(), slice(place + start - first, place + stop - first)
                labels = slices.ids if slices.labels is None else slices.labels
                return slices.ids[cut], labels[cut], None if slices.weights is None else slices.weights[cut]
        return None


def longest_rows(sources: Sequence[DataSource], first: Dataset | None = None) -> StoredDataset:
    """Return a dataset of one row per source, as long as its `max_tokens`, for forecasts and limits.

    first: first rows of a stream. If one of them has images, the dataset has them, too.
    """
    builder = DatasetBuilder()
    row = None if first is None else first.first_with_images
    images = () if first is None or row is None else first.images(row)
    for index, source in enumerate(sources):
        assert source.max_tokens is not None, "the run file's rules ask for it"
        builder.start_source(f"data.{index}", "", ("any row, as long as max_tokens allows",))
        builder.add(np.zeros(source.max_tokens, dtype=np.int32), None, images=images)
    return builder.finish()


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedSteps:
    """The steps of a run on feeds. known: a dataset of the longest row that each source may have."""

    dataset: FeedDataset
    known: StoredDataset
    config: RunConfig
    is_known: bool = False

    @property
    def num_steps(self) -> int:
        """Number of steps of the run."""
        assert self.config.steps is not None, "the run file's rules ask for it"
        return self.config.steps

    @property
    def most_tokens(self) -> int:
        """Largest possible number of tokens of a global batch."""
        longest, batch_size = int(self.known.lengths.max()), self.config.global_batch
        return longest * (batch_size.sequences or 1) if batch_size.tokens is None else max(longest, batch_size.tokens)

    def after(self, step: int, position: Position | None) -> Iterator[Batch]:
        """Yield the steps after the first `step`; if `position` is None, read these again."""
        passed = 0 if position else step
        batches = self.dataset.batches(self.config.global_batch, position or (0, 0))
        return islice(batches, passed, passed + self.num_steps - step)

    def drawn_lengths(self, most: int) -> np.ndarray:
        """Return the longest length that rows of each source may have, of at most `most` sources."""
        return self.known.lengths[:most]

    def check_losses(self) -> None:
        """Do nothing: a step without a loss is refused when it comes."""


Steps: TypeAlias = Batches | FeedSteps
"""The steps of a run, from stored rows or from feeds."""
