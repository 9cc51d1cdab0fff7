"""The global batch of a Trainer as rows of one sequence each, made by its own collator, one example at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from lengthwise.core.errors import DataError
from lengthwise.data import NO_LOSS
from lengthwise.data.messages import BESIDE, is_nothing

_IDS, _LABELS, _MASK, _POSITIONS = "input_ids", "labels", "attention_mask", "position_ids"
_CHATS = ("messages", "prompt", "conversations", "chosen")  # columns that TRL formats
_USED_BY_TRL = ("tools", "chat_template_kwargs")
_SAYS_AS_POSITIONS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")


@dataclass(frozen=True, slots=True, kw_only=True)
class Examples:
    """Some examples of a data set: their sequences, and what a Trainer counts of them."""

    rows: tuple[Mapping[str, np.ndarray], ...]
    num_examples: int

    @property
    def num_tokens(self) -> int:
        """Tokens, without padding."""
        return sum(len(row[_IDS]) for row in self.rows)

    @property
    def num_loss_tokens(self) -> int:
        """Tokens whose next one has a label."""
        return sum(int((row.get(_LABELS, row[_IDS])[1:] != NO_LOSS).sum()) for row in self.rows)


@dataclass(frozen=True, slots=True)
class RowCollator:
    """A `collate_fn` that has `collate`, the user's own, make each example alone, and takes its padding away.

    An example that packs several documents, as its `position_ids` say, becomes a row for each.

    Raises:
        DataError: a column that has no value for each token.
    """

    collate: Callable[[list[Any]], Any]

    def __call__(self, examples: Sequence[Any]) -> Examples:
        """Return the examples' rows, in order."""
        rows = tuple(row for example in examples for row in rows_of(self.collate([example])))
        return Examples(rows=rows, num_examples=len(examples))


def refuse_dropped(dataset: Any) -> Any:
    """Return a dataset of the `datasets` library that TRL formats, with all that its rows put into their prompts.

    Raises:
        DataError: a row has text in a column that other trainers put into the prompt of a chat, and TRL drops; of an
            iterable dataset when it comes.
    """
    first = next(iter(dataset), {})
    names = [name for name in BESIDE if name in first and name not in _USED_BY_TRL]
    if not names or "input_ids" in first or not any(name in first for name in _CHATS):
        return dataset

    def check(row: Mapping[str, Any], number: int) -> dict[str, Any]:
        for name in names:
            if not is_nothing(row[name]):
                remedy = f"Write it into the messages, or take it out: dataset.remove_columns({name!r})."
                expected = "rows with all of their prompt in their messages"
                raise DataError(f"dataset, row {number}", expected=expected, got=f'"{name}"', remedy=remedy)
        return {}

    if not hasattr(dataset, "num_rows"):
        return dataset.map(check, with_indices=True)
    for number, row in enumerate(dataset.select_columns(names)):
        check(row, number)
    return dataset


def rows_of(batch: Mapping[str, Any]) -> Iterator[dict[str, np.ndarray]]:
    """Yield the sequences of a collated batch, their columns (length,) or (length, ...) each, without padding."""
    columns = {name: _array(name, values) for name, values in batch.items() if name not in _SAYS_AS_POSITIONS}
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
        for start, stop in zip(starts, [*starts[1:], int(kept.sum())], strict=True):
            yield {name: values[start:stop] for name, values in row.items()}


def _starts(positions: np.ndarray) -> list[int]:
    """Return where the documents of a packed row begin."""
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
    remedy = "Give columns of one value per token, and take others out of the data set or the collator."
    return DataError("data_collator", expected=expected, got=got, remedy=remedy)
