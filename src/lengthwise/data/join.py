"""Several datasets as one: the rows of the first, then those of the next; their tokens stay where they are."""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from lengthwise.data.dataset import Dataset, NumberedRows, digest_of_parts, plain_weights, write_protect


def join_datasets(parts: Sequence[Dataset]) -> Dataset:
    """Return one dataset of all rows of all parts, in order; one part is returned as it is."""
    return parts[0] if len(parts) == 1 else JoinedDataset(parts)


class JoinedDataset(NumberedRows):
    """A `Dataset` of several; 24 bytes a row, for lengths, tokens with a loss and ids."""

    def __init__(self, parts: Sequence[Dataset]) -> None:
        self._parts = tuple(parts)
        self._firsts = [0, *np.cumsum([len(each.lengths) for each in parts]).tolist()]
        self.lengths: np.ndarray = np.concatenate([each.lengths for each in parts])
        self.loss_tokens: np.ndarray = np.concatenate([each.loss_tokens for each in parts])
        weighed = any(each.loss_weights is not each.loss_tokens for each in parts)
        self._loss_weights = np.concatenate([each.loss_weights for each in parts]) if weighed else None
        self.ids: np.ndarray = np.concatenate(
            [each.ids + first for first, each in zip(self._firsts, parts, strict=False)]
        )
        self.weights = tuple(
            (first + row, weight)
            for first, each in zip(self._firsts, parts, strict=False)
            for row, weight in each.weights
        )
        self.skipped: Mapping[str, int] = sum((Counter(each.skipped) for each in parts), Counter())
        write_protect(self.lengths, self.loss_tokens, self._loss_weights, self.ids)

    @property
    def loss_weights(self) -> np.ndarray:
        """What the losses of each row's tokens weigh together."""
        return self.loss_tokens if self._loss_weights is None else self._loss_weights

    def read(self, row: int, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """Return views of ids and labels of tokens [start, stop) of a row, int32 [stop - start] each."""
        part, within = self._place(row)
        return part.read(within, start, stop)

    def read_weights(self, row: int, start: int, stop: int) -> np.ndarray | None:
        """Return the weights of tokens [start, stop) of a row, float32 [stop - start], where a part has any."""
        if self._loss_weights is None:
            return None
        part, within = self._place(row)
        found = part.read_weights(within, start, stop)
        return plain_weights(part.read(within, start, stop)[1]) if found is None else found

    def read_ahead(self, spans: Sequence[tuple[int, int, int]]) -> None:
        """Begin to read tokens [start, stop) of rows."""
        for row, start, stop in spans:
            part, within = self._place(row)
            part.read_ahead([(within, start, stop)])

    def row_digests(self, first: int, last: int) -> np.ndarray:
        """Return what tells rows [first, last) from others, uint8 [last - first, 16]."""
        found = [np.empty((0, 16), dtype=np.uint8)]
        for start, part in zip(self._firsts, self._parts, strict=False):
            begin, end = max(first - start, 0), min(last - start, len(part.lengths))
            if begin < end:
                found.append(part.row_digests(begin, end))
        return np.concatenate(found)

    def digest(self) -> bytes:
        """Return the digest of all rows, the same wherever they lie."""
        return digest_of_parts(self)

    def name(self, row: int) -> str:
        """Return where a row is."""
        part, within = self._place(row)
        return part.name(within)

    def source_key(self, row: int) -> str:
        """Return the config path of a row's source: `data.0`."""
        part, within = self._place(row)
        return part.source_key(within)

    def _place(self, row: int) -> tuple[Dataset, int]:
        self.check_row(row)
        number = bisect.bisect_right(self._firsts, row) - 1
        return self._parts[number], row - self._firsts[number]
