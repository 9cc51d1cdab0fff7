"""Whether a `ComputeLoss` returns a share of a step's loss: of two equal rows twice what it returns of one.

It runs the model, so it is not called so at every step, but when it is new: a function of other code, or the same that
refers to other functions, words or switches. Numbers may differ, as what it divides by does from step to step.
"""

from __future__ import annotations

import math
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from itertools import chain, islice
from numbers import Number
from typing import Any

import torch
from torch import Tensor, nn

from lengthwise.core.errors import ConfigError
from lengthwise.core.plan import Microbatch, Piece, Plan
from lengthwise.data import NO_LOSS
from lengthwise.session.loss_checks import (
    ROUNDINGS,
    UNEQUAL,
    Evaluate,
    LossCheck,
    random_states,
    random_states_kept,
)
from lengthwise.session.losses import OfModel
from lengthwise.session.rows import RowBatch
from lengthwise.session.source import PlannedStep

_TOKENS = 64  # of the row
_DEPTH, _MOST = 4, 256  # of what is looked at in what a function refers to


class KnownShare(partial[Tensor]):
    """A `ComputeLoss` that is known to return a share, and is not checked."""


@dataclass
class ShareCheck(LossCheck):
    """The check of one step. known: what functions that passed are made of. planned: the step."""

    known: set[object]
    objective: OfModel
    planned: PlannedStep
    device: torch.device
    made_of: object = None

    def __post_init__(self) -> None:
        self.made_of = parts_of(self.objective.compute_loss)

    @property
    def number(self) -> float:
        """1 where this rank has not checked the function."""
        return float(self.made_of not in self.known)

    def finish(self, evaluate: Evaluate) -> None:
        """Call the function on a row of the step, once and twice, where it is new on some rank."""
        if not self.found:
            return
        losses = []
        for times in (1, 2):
            before = random_states(self.device)
            with random_states_kept(self.device):
                step = short_step(self.planned, self.objective.batch, times)
                losses.append(evaluate(step, replace(self.objective, batch=step.batch)))
                if not all(map(torch.equal, before, random_states(self.device))):
                    losses[-1] = math.nan  # random numbers differ between the two
        once, twice = losses
        apart, least = abs(twice - 2 * once), ROUNDINGS * torch.finfo(torch.float32).eps / self.objective.normalizer
        if apart > max(UNEQUAL * (abs(twice) + 2 * abs(once)), least):
            got = f"{once:g} of a row, {twice:g} of two equal ones"
            expected = "a microbatch's share of the step's loss: a sum over tokens, divided by one number of the step"
            remedy = (
                "Divide a sum by the loss tokens of the step, model(**inputs, num_items_in_batch=n).loss for example."
            )
            raise ConfigError("compute_loss", expected=expected, got=got, remedy=remedy)
        self.known.add(self.made_of)


def short_step(planned: PlannedStep, batch: RowBatch, times: int) -> PlannedStep:
    """Return a step in which each rank has the end of the same row so many times, in one microbatch."""
    plan, row = planned.plan, _short_row(batch)
    ranks = range(plan.ranks)
    length = len(row["input_ids"])
    pieces = (Piece(ranks=(rank,), sequences=tuple(range(rank * times, (rank + 1) * times))) for rank in ranks)
    return PlannedStep(
        batch=RowBatch([row] * (times * plan.ranks)),
        plan=Plan(
            ranks=plan.ranks,
            layers=plan.layers,
            capacity=times * length,
            tokens=(length,) * (times * plan.ranks),
            microbatches=(Microbatch(pieces=tuple(pieces)),),
            schedule=plan.schedule,
        ),
        plan_seconds=0.0,
    )


def _short_row(batch: RowBatch) -> dict[str, Any]:
    """Return the last tokens of a row that has labels there, or all labels."""
    found: dict[str, Any] = {}
    for number, length in enumerate(batch.lengths):
        ids, shift_labels = batch.whole(number)
        start = max(0, length - _TOKENS)
        labels = torch.cat([ids[:1] * 0 + NO_LOSS, shift_labels[:-1]])
        found = {"input_ids": ids[start:], "labels": labels[start:]}
        found |= {name: values[number][start:] for name, values in batch.columns.items()}
        if (found["labels"][1:] != NO_LOSS).any():
            return found
    return found | {"labels": found["input_ids"]}


def parts_of(value: object, depth: int = _DEPTH, seen: set[int] | None = None) -> object:
    """Return what a function is made of, to be compared: code, and the functions, words and switches it refers to.

    Of anything else, and of what was seen before, the type.
    """
    if value is None or isinstance(value, str | bool | bytes | types.CodeType | torch.dtype | Enum | type):
        return value
    seen = set() if seen is None else seen
    if not depth or id(value) in seen or isinstance(value, Number | Tensor):
        return type(value)
    seen.add(id(value))
    return type(value), *(parts_of(each, depth - 1, seen) for each in islice(_inside(value), _MOST))


def _inside(value: object) -> Iterator[object]:
    """Yield what an object refers to; a model, tensors and modules of Python make no mean of a sum."""
    if isinstance(value, types.MethodType):
        yield from (value.__func__, value.__self__)
    elif isinstance(value, types.FunctionType):
        code = value.__code__
        yield from (code, value.__defaults__, value.__kwdefaults__)
        yield from (cell.cell_contents for cell in value.__closure__ or () if cell != types.CellType())
        yield from (value.__globals__[name] for name in code.co_names if name in value.__globals__)
    elif isinstance(value, partial):
        yield from (value.func, value.args, value.keywords)
    elif isinstance(value, Mapping):
        yield from chain.from_iterable(value.items())
    elif isinstance(value, list | tuple):  # without what a function counts in it
        yield from (each for each in value if isinstance(each, bool) or not isinstance(each, Number | Tensor))
    elif (isinstance(value, nn.Module) and next(value.parameters(), None) is None) or _is_plain(value):
        yield vars(value)


def _is_plain(value: object) -> bool:
    return hasattr(value, "__dict__") and not isinstance(value, Tensor | nn.Module | types.ModuleType)
