"""Find rows of a Trainer that are too long for any step, or have no labels, before the first step.

Lengths and labels are read if the rows are a list, or a `datasets.Dataset`, with a column `input_ids`; only the first
16M tokens of labels, which takes about a second. At most 100 suspicious rows are collated for a closer look.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import datasets
import numpy as np
import pyarrow
import torch

from lengthwise.core.errors import DataError, LengthwiseError, raise_problems
from lengthwise.core.names import counted
from lengthwise.data import NO_LOSS
from lengthwise.integrations.batches import Examples
from lengthwise.session import Session

_IDS, _LABELS = "input_ids", "labels"
_MOST_TOKENS, _MOST_COLLATED, _SHOWN, _AT_ONCE = 1 << 24, 100, 5, 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownRows:
    """Rows of a data set with a length. where: the Trainer's argument. collate: function from rows to `Examples`."""

    where: str
    rows: Any
    collate: Callable[[list[Any]], Any]

    def too_long(self, limit: int, *, held: str) -> DataError | None:
        """Return an error for rows of more than `limit` tokens, or None. held: description of the limit."""
        suspects = np.flatnonzero(_lengths(self.rows) > limit)
        found = self._collated(suspects, lambda row: max((len(each[_IDS]) for each in row.rows), default=0))
        named = [(number, tokens) for number, tokens in found if tokens > limit]
        if not named:
            return None
        named.sort(key=lambda row: -row[1])
        shown = ", ".join(f"row {number} ({tokens} tokens)" for number, tokens in named[:_SHOWN])
        more = f" and {len(named) - _SHOWN} more" if len(named) > _SHOWN else ""
        more += f"; {len(suspects) - len(found)} others seem longer too" if len(suspects) > len(found) else ""
        remedy = "Run on more ranks, raise capacity_tokens, or remove these rows."
        got = f"{len(named)} longer: {shown}{more}"
        return DataError(self.where, expected=f"at most {limit} tokens, {held}", got=got, remedy=remedy)

    def without_label(self, *, warns: bool) -> DataError | None:
        """Warn, if `warns`, of rows without a label; return an error if no row has one."""
        counts = _label_counts(self.rows)
        suspects = np.flatnonzero(counts == 0)
        if not len(suspects):
            return None
        found = self._collated(suspects, lambda row: row.num_loss_tokens)
        named = [number for number, tokens in found if not tokens]
        if not named or len(named) < len(found):  # the collator makes labels
            return None
        numbers = f"{', '.join(map(str, suspects[:_SHOWN]))}{' ...' if len(suspects) > _SHOWN else ''}"
        if len(counts) == len(self.rows) and not (counts > 0).any():
            got, remedy = f"none in {counted(len(suspects), 'row')}", "Give labels that are not -100."
            return DataError(self.where, expected="a token with a label", got=got, remedy=remedy)
        if warns:
            what = f"{counted(len(suspects), 'row')} without a label, which adds nothing to the loss"
            warnings.warn(f"{self.where}: {what}: {numbers}", stacklevel=3)
        return None

    def _collated(self, numbers: np.ndarray, of: Callable[[Examples], int]) -> list[tuple[int, int]]:
        found = list[tuple[int, int]]()
        with torch.random.fork_rng(devices=[]):  # the collator may use random numbers
            for number in map(int, numbers[:_MOST_COLLATED]):
                made = self.collate([self.rows[number]])
                if isinstance(made, Examples):
                    found.append((number, of(made)))
        return found


def rows_of_training(trainer: Any) -> list[KnownRows]:
    """Return the rows that training and its evaluations read, with the columns that Trainer keeps."""
    args, evaluated = trainer.args, trainer.eval_dataset
    given = {"train_dataset": trainer.train_dataset}
    if args.eval_strategy != "no" or args.eval_on_start:
        parts = evaluated if isinstance(evaluated, dict) else {"": evaluated}
        given |= {f"eval_dataset{'.' * bool(name)}{name}": rows for name, rows in parts.items()}
    found = list[KnownRows]()
    for where, rows in given.items():
        collate = trainer._collator(trainer.data_collator)
        if isinstance(rows, datasets.Dataset):
            rows = trainer._remove_unused_columns(rows, description=None)
        else:
            collate = trainer._get_collator_with_removed_columns(collate)
        found.append(KnownRows(where=where, rows=rows, collate=collate))
    return found


def rows_of_loader(loader: Any) -> list[KnownRows]:
    """Return the rows of an evaluation's loader, if it has a `collate_fn`."""
    rows, collate = getattr(loader, "dataset", None), getattr(loader, "collate_fn", None)
    return [] if collate is None else [KnownRows(where="eval_dataset", rows=rows, collate=collate)]


def check_rows(given: Sequence[KnownRows], session: Session) -> None:
    """Check before the first step that rows fit the ranks, and that one has a label."""
    ranks = counted(session.world_size, "rank")
    held = f"the longest sequence that fits on {ranks} of capacity_tokens {session.capacity_tokens}"
    limit, problems = session.longest_tokens, list[LengthwiseError]()
    for rows in given:
        found = (rows.too_long(limit, held=held), rows.without_label(warns=session.rank == 0))
        problems += [error for error in found if error is not None]
    raise_problems(problems)


def warn_of_no_label(trainer: Any) -> bool:
    """Warn on rank 0 that no token of an update has a label; return True."""
    if not trainer.args.process_index:
        what = "no token of the batch has a label, so its gradients are 0; later such batches are not reported"
        warnings.warn(f"step {trainer.state.global_step + 1}: {what}", stacklevel=2)
    return True


def _lengths(rows: Any) -> np.ndarray:
    """Return the tokens of each row, (rows,), before the collator, or (0,) if they cannot be read."""
    if _is_list(rows, _IDS):
        return np.array([len(row[_IDS]) for row in rows])
    return np.concatenate([np.zeros(0, int), *(lengths for lengths, _ in _lists(rows, _IDS))])


def _label_counts(rows: Any) -> np.ndarray:
    """Return the number of labels of each of the first rows, without a row's first token; -1 for rows of one token.

    The result is (0,) if labels cannot be read.
    """
    found, tokens = [np.zeros(0, int)], 0
    if _is_list(rows, _LABELS):
        parts: Iterator[Any] = (([len(row[_LABELS])], np.asarray(row[_LABELS])) for row in rows)
    else:
        parts = ((lengths, read()) for lengths, read in _lists(rows, _LABELS))
    for given, labels in parts:
        lengths = np.asarray(given)
        ends = np.cumsum(lengths)
        has_label = labels != NO_LOSS
        has_label[(ends - lengths)[lengths > 0]] = False
        so_far = np.concatenate([[0], np.cumsum(has_label)])
        found.append(np.where(lengths > 1, so_far[ends] - so_far[ends - lengths], -1))
        tokens += len(labels)
        if tokens > _MOST_TOKENS:
            break
    return np.concatenate(found)


def _is_list(rows: Any, name: str) -> bool:
    return isinstance(rows, list | tuple) and all(
        isinstance(row, Mapping) and isinstance(row.get(name), Sequence | np.ndarray | torch.Tensor) for row in rows
    )


def _lists(rows: Any, name: str) -> Iterator[tuple[np.ndarray, Callable[[], np.ndarray]]]:
    """Yield, for parts of a `datasets.Dataset`, the lengths of a column's lists, and a function that reads them."""
    if not isinstance(rows, datasets.Dataset) or rows.format["type"] == "custom" or name not in rows.column_names:
        return
    table: Any
    for table in rows.select_columns([name]).with_format("arrow").iter(_AT_ONCE):
        column = table.column(name)
        kind, nulls = column.type, column.null_count
        if nulls or not (pyarrow.types.is_list(kind) or pyarrow.types.is_large_list(kind)):
            return
        lists: Any = column.combine_chunks()
        yield lists.value_lengths().to_numpy(), partial(_numbers, lists)


def _numbers(lists: Any) -> np.ndarray:
    return lists.flatten().to_numpy(zero_copy_only=False)
