"""The sequences of one step, and the tensors of a rank's segments."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Self

import numpy as np
import torch
from torch import Tensor

from lengthwise.core.errors import DataError
from lengthwise.core.plan import Images, Plan, line_to
from lengthwise.core.prefixes import SharedPrefixes
from lengthwise.data import NO_LOSS, Dataset
from lengthwise.data.dataset import DatasetBuilder
from lengthwise.data.image_files import PixelsAhead
from lengthwise.data.sampler import Position
from lengthwise.models.images import ImageReader, MicrobatchImages, RowImages
from lengthwise.program import MutualSpans, Segment

NO_PLACEHOLDERS: Mapping[int, str] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class ReadsFiles:
    """How the images of stored rows are read."""

    reader: ImageReader
    pixels: PixelsAhead

    def row(self, dataset: Dataset, row: int) -> RowImages | None:
        """Return the images of a row, None without any. DataError: its tokens do not fit them."""
        files, name = dataset.images(row), dataset.name(row)
        if not files:
            return None
        ids, _ = dataset.read(row, 0, int(dataset.lengths[row]))
        sizes = [(file.grid, self.pixels.processor.num_tokens(file)) for file in files]
        return self.reader.read_files(ids, sizes, lambda image: self.pixels.take(files[image], name), name)


class StepBatch:
    """A global batch: entry i of a plan's `tokens` is sequence `ids[i]` of the data, or its end (`planned_by`).

    loss_weight: sum of all tokens' loss weights, the divisor of the summed loss; without weights `loss_tokens`. end,
    digest: those of `Batch`. placeholders: ids of tokens that are refused when they are read (`models.placeholders`).
    sees: reads the images of rows; None refuses them.
    """

    def __init__(
        self,
        dataset: Dataset,
        ids: Iterable[int],
        end: Position | None = None,
        digest: str | None = None,
        placeholders: Mapping[int, str] = NO_PLACEHOLDERS,
        sees: ReadsFiles | None = None,
    ) -> None:
        self.dataset, self.end, self._digest, self._placeholders = dataset, end, digest, placeholders
        self._sees, self._seen = sees, dict[int, RowImages | None]()
        self._reader = None if sees is None else sees.reader
        self.ids = tuple(int(i) for i in ids)
        self.lengths = tuple(int(dataset.lengths[i]) for i in self.ids)
        self.loss_tokens = int(dataset.loss_tokens[list(self.ids)].sum())
        self.loss_weight = float(dataset.loss_weights[list(self.ids)].sum())
        self._starts: Sequence[tuple[int, int]] = [(row, 0) for row in range(len(self.ids))]

    def planned_by(self, plan: Plan) -> Self:
        """Return the batch for segments of a plan, whose sequences may continue others.

        Its first sequences are the ends of the batch's, in order. Later ones are read from a sequence that continues
        them.
        """
        found, firsts, row_of = copy.copy(self), plan.firsts, dict[int, int]()
        for row in range(len(self.ids)):
            assert firsts[row] + plan.tokens[row] == self.lengths[row], f"sequence {row} of {self.lengths[row]} tokens"
            for sequence in line_to(row, plan.parents):
                row_of.setdefault(sequence, row)
        found._starts = [(row_of[sequence], first) for sequence, first in enumerate(firsts)]
        return found

    def shared_prefixes(self) -> SharedPrefixes | None:
        """Return the prefixes without labels that sequences share; None without any, or if they are read later."""
        return None

    def images(self, segments: Sequence[Segment]) -> MicrobatchImages | None:
        """Return the images of a rank's segments, or None without any.

        Raises:
            DataError: an image cannot be read, or does not fit its tokens.
        """
        if self._reader is None:
            return None
        places = list(self.places(segments))
        found = {index: self._images_of(index) for index, _, _ in places}
        rows = {index: images for index, images in found.items() if images is not None}
        return self._reader.microbatch(rows, places)

    def image_work(self) -> Images:
        """Return the work on the images of each sequence; () if none has images."""
        if self._reader is None:
            return ()
        rows = (self._images_of(index) for index in range(len(self.ids)))
        found = tuple(() if row is None else self._reader.work(row) for row in rows)
        return found if any(found) else ()

    def _images_of(self, index: int) -> RowImages | None:
        if index not in self._seen:
            self._seen[index] = None if self._sees is None else self._sees.row(self.dataset, self.ids[index])
        return self._seen[index]

    def mutual(self, plan: Plan) -> MutualSpans | None:
        """Return the spans of a plan's sequences whose tokens see each other in both directions, or None."""
        if self._reader is None or self._reader.mutual == "none":
            return None
        segments = [Segment(sequence=each, start=0, stop=tokens) for each, tokens in enumerate(plan.tokens)]
        spans = tuple(
            tuple((first - start, last - start) for first, last in self._spans_of(row) if start <= first < stop)
            for row, start, stop in self.places(segments)
        )
        return MutualSpans(spans=spans, in_windows=self._reader.mutual == "windows") if any(spans) else None

    def _spans_of(self, index: int) -> Sequence[tuple[int, int]]:
        found = self._images_of(index)
        return () if found is None else found.mutual

    def places(self, segments: Iterable[Segment]) -> Iterator[tuple[int, int, int]]:
        """Yield (index, start, stop) of each segment of a plan: tokens of the batch's sequence of this index."""
        for segment in segments:
            index, first = self._starts[segment.sequence]
            yield index, first + segment.start, first + segment.stop

    @property
    def identity(self) -> object:
        """Identity of the batch, for JSON; ranks compare it before they run a step."""
        return self.ids if self._digest is None else (self.ids, self._digest)

    def tensors(self, segments: Sequence[Segment]) -> tuple[Tensor, Tensor, Tensor]:
        """Return (input_ids, position_ids, shift_labels), each (tokens,), of a rank's segments in local order.

        Raises:
            DataError: a token stands for an image or a sound.
        """
        return self._tensors(list(self.places(segments)))

    def _tensors(self, places: Sequence[tuple[int, int, int]]) -> tuple[Tensor, Tensor, Tensor]:
        ids, labels = [], []
        for index, start, stop in places:
            row = self.ids[index]
            ids.append(self.dataset.read(row, start, stop)[0])
            refuse_placeholders(ids[-1], self._refused(row), lambda row=row: self.dataset.name(row))
            labels.append(self.shift_labels(index, start, stop))
        return _tensor(ids), _tensor([np.arange(start, stop) for _, start, stop in places]), _tensor(labels)

    def _refused(self, row: int) -> Mapping[int, str]:
        if self._sees is None or not self.dataset.images(row):
            return self._placeholders
        return {token: key for token, key in self._placeholders.items() if token != self._sees.reader.token}

    def positions(self, segments: Sequence[Segment]) -> Tensor:
        """Return the positions of these segments' tokens in their sequences, (tokens,)."""
        return _tensor([np.arange(start, stop) for _, start, stop in self.places(segments)])

    def read_ahead(self, segments: Sequence[Segment]) -> None:
        """Begin to read these segments from disk, and to decode their images, without waiting."""
        places = list(self.places(segments))
        self.dataset.read_ahead([(self.ids[index], start, stop + 1) for index, start, stop in places])
        for index, start, stop in places:
            if self._sees is not None and (images := self._images_of(index)) is not None:
                row = self.ids[index]
                files = [self.dataset.images(row)[image] for image in images.within(start, stop)]
                self._sees.pixels.begin(files, self.dataset.name(row))

    def sequences(self, segments: Sequence[Segment]) -> Tensor:
        """Return the number of the sequence of each token in these segments, (tokens,)."""
        return _tensor([np.full(stop - start, self.ids[index]) for index, start, stop in self.places(segments)])

    def shift_labels(self, index: int, start: int, stop: int) -> np.ndarray:
        """Return the label after each token from `start` to `stop`, int32 [stop - start]; `NO_LOSS` after the last."""
        following = self.dataset.read(self.ids[index], start + 1, min(stop + 1, self.lengths[index]))[1]
        return np.pad(following, (0, stop - start - len(following)), constant_values=NO_LOSS)

    def weights(self, segments: Sequence[Segment]) -> Tensor | None:
        """Return the loss weights of the tokens of a rank's segments, (tokens,) in fp32, or None if all are equal."""
        found = []
        for index, start, stop in self.places(segments):
            weights = self.dataset.read_weights(self.ids[index], start + 1, min(stop + 1, self.lengths[index]))
            if weights is None:
                return None
            found.append(np.pad(weights, (0, stop - start - len(weights))))
        return torch.from_numpy(np.concatenate(found)) if found else None

    def whole(self, index: int) -> tuple[Tensor, Tensor]:
        """Return (input_ids, shift_labels) of a whole sequence, (tokens,) each."""
        ids, _, labels = self._tensors([(index, 0, self.lengths[index])])
        return ids, labels


def refuse_placeholders(ids: np.ndarray, names: Mapping[int, str], where: str | Callable[[], str]) -> None:
    """Refuse tokens, (tokens,), that stand for an image or a sound. names: the config's keys of such tokens, by id.

    Raises:
        DataError: there is one; the first is named.
    """
    found = ids[np.isin(ids, list(names))] if names else ids[:0]
    if found.size:
        first = int(found[0])
        got = f"the token {first}, which stands for an image or a sound ({names[first]})"
        remedy = (
            "Remove such rows, or use plain TRL or Transformers: images train in some families, and without stages."
        )
        raise DataError(where if isinstance(where, str) else where(), expected="tokens of text", got=got, remedy=remedy)


def random_batch(lengths: Sequence[int], *, vocab: int) -> StepBatch:
    """Return a batch of random tokens, always the same, for passes outside of training."""
    random, builder = np.random.default_rng(0), DatasetBuilder()
    builder.start_source("random", "random", None)
    for length in lengths:
        builder.add(random.integers(0, vocab, length, dtype=np.int32), None)
    return StepBatch(builder.finish(), range(len(lengths)))


def _tensor(parts: Sequence[np.ndarray]) -> Tensor:
    return torch.from_numpy(np.concatenate([np.empty(0, dtype=np.int64), *parts], dtype=np.int64))
