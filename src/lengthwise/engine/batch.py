"""The sequences of one step, and the tensors that a rank's segments of them become."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from lengthwise.data import NO_LOSS, Dataset
from lengthwise.program import Segment


class StepBatch:
    """A global batch: entry i of a plan's `tokens` is sequence `ids[i]` of the data."""

    def __init__(self, dataset: Dataset, ids: Iterable[int]) -> None:
        self.dataset = dataset
        self.ids = tuple(int(i) for i in ids)
        self.lengths = tuple(int(dataset.lengths[i]) for i in self.ids)
        self.loss_tokens = sum(dataset.loss_tokens(i) for i in self.ids)

    def tensors(self, segments: Sequence[Segment]) -> tuple[Tensor, Tensor, Tensor]:
        """Return (input_ids, position_ids, shift_labels), each (tokens,), of a rank's segments in local order."""
        ids, positions, labels = [], [], []
        for segment in segments:
            sequence, span = self.ids[segment.sequence], slice(segment.start, segment.stop)
            ids.append(self.dataset.tokens(sequence)[span])
            positions.append(np.arange(segment.start, segment.stop))
            labels.append(self.shift_labels(segment.sequence)[span])
        return _tensor(ids), _tensor(positions), _tensor(labels)

    def shift_labels(self, index: int) -> np.ndarray:
        """Return what follows each token of sequence `index`; made from the whole sequence, before any cut."""
        labels = self.dataset.labels(self.ids[index])
        return np.append(labels[1:], NO_LOSS)

    def whole(self, index: int) -> tuple[Tensor, Tensor]:
        """Return (input_ids, shift_labels) of one whole sequence."""
        ids, _, labels = self.tensors([Segment(sequence=index, start=0, stop=self.lengths[index])])
        return ids, labels


def _tensor(parts: Sequence[np.ndarray]) -> Tensor:
    return torch.from_numpy(np.concatenate(parts).astype(np.int64))
