"""The global batches of a Trainer: rows of one sequence, made by its own collator, and planned one update ahead.

A loader may call collectives and use random numbers, so only the training thread reads it, one update ahead; the
planner's thread waits for the rows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from queue import SimpleQueue
from typing import Any

import numpy as np
import torch

from lengthwise.core.errors import ConfigError, DataError
from lengthwise.data import NO_LOSS
from lengthwise.data.messages import BESIDE, is_nothing
from lengthwise.models.image_kinds import IMAGE_COLUMNS
from lengthwise.models.images import MODALITIES
from lengthwise.session import Session
from lengthwise.session.row_batch import Row
from lengthwise.session.source import PlannedStep

_IDS, _LABELS, _MASK, _POSITIONS = "input_ids", "labels", "attention_mask", "position_ids"
_CHATS = ("messages", "prompt", "conversations", "chosen")  # columns that TRL formats
_USED_BY_TRL = ("tools", "chat_template_kwargs")
_SAYS_AS_POSITIONS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")


@dataclass(frozen=True, slots=True, kw_only=True)
class Examples:
    """Examples of a data set: their sequences, and the numbers that a Trainer counts."""

    rows: tuple[Mapping[str, np.ndarray], ...]
    num_examples: int

    @property
    def num_tokens(self) -> int:
        """Number of tokens, without padding."""
        return sum(len(row[_IDS]) for row in self.rows)

    @property
    def num_loss_tokens(self) -> int:
        """Number of tokens whose next token has a label."""
        return sum(int((row.get(_LABELS, row[_IDS])[1:] != NO_LOSS).sum()) for row in self.rows)


@dataclass(frozen=True, slots=True)
class RowCollator:
    """A `collate_fn` that calls the user's `collate` for one example at a time, and removes its padding.

    An example that packs several documents, by its `position_ids`, becomes one row per document. An example with images
    keeps the columns of its images.

    Raises:
        DataError: a column does not have one value per token.
    """

    collate: Callable[[list[Any]], Any]

    def __call__(self, examples: Sequence[Any]) -> Examples:
        """Return the examples' rows, in order."""
        rows = tuple(row for example in examples for row in rows_of(self.collate([example])))
        return Examples(rows=rows, num_examples=len(examples))


def refuse_dropped(dataset: Any) -> Any:
    """Return a dataset of chats that TRL formats, after a check that TRL drops no text of its rows.

    Raises:
        DataError: a row has text in a column that other trainers put into the prompt, and that TRL drops. An iterable
            dataset raises when it reads the row.
    """
    first = next(iter(dataset), {})
    names = [name for name in BESIDE if name in first and name not in _USED_BY_TRL]
    if not names or "input_ids" in first or not any(name in first for name in _CHATS):
        return dataset

    def check(row: Mapping[str, Any], number: int) -> dict[str, Any]:
        for name in names:
            if not is_nothing(row[name]):
                remedy = f"Write it into the messages, or remove it: dataset.remove_columns({name!r})."
                expected = "rows with the whole prompt in their messages"
                raise DataError(f"dataset, row {number}", expected=expected, got=f'"{name}"', remedy=remedy)
        return {}

    if not hasattr(dataset, "num_rows"):
        return dataset.map(check, with_indices=True)
    for number, row in enumerate(dataset.select_columns(names)):
        check(row, number)
    return dataset


def rows_of(batch: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the sequences of a collated batch without padding, with columns (length,) or (length, ...), and images."""
    images = {name: batch[name] for name in IMAGE_COLUMNS if batch.get(name) is not None}
    left_out = (*_SAYS_AS_POSITIONS, *IMAGE_COLUMNS, *MODALITIES)
    columns = {name: _array(name, values) for name, values in batch.items() if name not in left_out}
    if _IDS not in columns:
        raise _wrong(f"a column {_IDS}", ", ".join(columns) or "no column")
    shape = columns[_IDS].shape
    for name, values in columns.items():
        if values.shape[: len(shape)] != shape:
            raise _wrong(f"one value per token in {name}, {shape}", f"{values.shape}")
    for number in range(shape[0]):
        row = {name: values[number] for name, values in columns.items()}
        mask, positions = row.pop(_MASK, None), row.pop(_POSITIONS, None)
        kept = np.ones(shape[1], dtype=bool) if mask is None else mask.astype(bool)
        row = {name: values[kept] for name, values in row.items()}
        starts = [0] if positions is None else _starts(positions[kept])
        if images and (shape[0] > 1 or len(starts) > 1):
            raise _wrong("one sequence in an example with images", f"{shape[0]} rows of {len(starts)} documents")
        for start, stop in zip(starts, [*starts[1:], int(kept.sum())], strict=True):
            yield {**{name: values[start:stop] for name, values in row.items()}, **images}


def _starts(positions: np.ndarray) -> list[int]:
    starts = np.flatnonzero(np.diff(positions, prepend=-2) != 1)
    if (positions[starts] != 0).any():
        raise _wrong(f"{_POSITIONS} 0, 1, 2, ... of each document", "others")
    return starts.tolist()


def _array(name: str, values: Any) -> np.ndarray:
    try:
        return torch.as_tensor(values).numpy()
    except (TypeError, ValueError, RuntimeError):
        raise _wrong(f"numbers in {name}", f"{type(values).__name__}") from None


def _wrong(expected: str, got: str) -> DataError:
    remedy = "Give columns of one value per token, and remove others from the data set or the collator."
    return DataError("data_collator", expected=expected, got=got, remedy=remedy)


class PlannedUpdates:
    """The updates of one pass over a loader. rows_of: function that returns the rows of an update, for one plan."""

    def __init__(
        self, session: Session, batches: Iterator[Examples], *, rows_of: Callable[[list[Examples]], Sequence[Row]]
    ) -> None:
        self._batches, self._rows_of = batches, rows_of
        self._given: SimpleQueue[Sequence[Row] | None] = SimpleQueue()
        self._steps = session.batches(self)
        self._read: deque[list[Examples]] = deque()

    def __iter__(self) -> Iterator[Sequence[Row]]:
        """Iterate over the rows of updates, for the planner."""
        return iter(self._given.get, None)

    def next(self, size: int) -> tuple[list[Examples], PlannedStep] | None:
        """Return the next `size` batches (fewer at the end) and their common plan, or None at the end."""
        while len(self._read) < 2 and (read := list(islice(self._batches, size))):
            self._read.append(read)
            self._given.put(self._rows_of(read))
        if not self._read:
            return None
        return self._read.popleft(), next(self._steps)

    def close(self) -> None:
        """Stop planning; the loader stays usable."""
        self._given.put(None)
        self._steps.close()


def checked(batches: Iterator[Any]) -> Iterator[Examples]:
    """Yield the batches of a loader that Trainer made; refuse the user's own, which gives each rank another part."""
    for batch in batches:
        if not isinstance(batch, Examples):
            remedy = "Replace data_collator or the samplers, not get_train_dataloader."
            got = f"a {type(batch).__name__}"
            raise ConfigError("get_train_dataloader", expected="a DataLoader that Trainer made", got=got, remedy=remedy)
        yield batch
