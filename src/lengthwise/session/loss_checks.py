"""Check that a loop's loss is a sum over tokens, or a share of one.

A mean would be right on a single microbatch only. Every step calls a `TokenLoss` on a few tokens of a rank's first
microbatch, whole and in halves, which needs no knowledge of the function. A rank's finding is among the numbers of the
step's end.

A `ComputeLoss` runs the model, so it is checked only when it is new: another function, or a partial of other arguments.
Numbers may differ, because its divisor changes from step to step. For two equal rows it must return twice the value for
one.

On several ranks a loss trains the model alone: each rank would have its share of the gradient of other tensors.
"""

from __future__ import annotations

import copy
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from lengthwise.attention import to_device
from lengthwise.core.errors import ConfigError
from lengthwise.core.plan import Microbatch, Piece, Plan
from lengthwise.data import NO_LOSS
from lengthwise.engine.objective import Objective
from lengthwise.models import has_own_loss
from lengthwise.session.engine import Engine
from lengthwise.session.losses import (
    IN_CHUNKS,
    OF_MODEL,
    OF_USER,
    ComputeLoss,
    LossKind,
    OfModel,
    OfOutputs,
    TokenLoss,
    Tokens,
    Watched,
    described,
    models_called,
    own_share,
)
from lengthwise.session.model import refuse_balance
from lengthwise.session.row_batch import RowBatch, rows_of
from lengthwise.session.source import PlannedStep

_UNEQUAL = 2e-2  # relative difference: a mean differs by far more, rounding in bf16 by less
_ROUNDINGS = 512  # roundings of a number of order 1, by which sums that cancel may differ
_CHECKED_TOKENS = 128
_ROW_TOKENS = 64  # tokens of the row that checks a `ComputeLoss`
_OTHER_MODELS = (
    "Do not run another model in it, such as a teacher, which would see cut and packed rows as one text: give the rows "
    "a column with its values, from token_values of a Session(teacher)."
)

Evaluate: TypeAlias = Callable[[PlannedStep, Objective], float]
"""Returns the loss of a step. Collective."""


@dataclass(kw_only=True)
class LossCheck:
    """A check of one step's loss; on several ranks also that it trains nothing but the model.

    others: trained tensors outside of the model on this rank, by id. found: True if a rank `suspects` the loss.
    is_of_others: True if a rank has `others`. The step's end sets both.
    """

    others: dict[int, Tensor] = field(default_factory=dict)
    found: bool = False
    is_of_others: bool = False

    @property
    def suspects(self) -> bool:
        """Whether this rank has to look at the loss, or found it wrong."""
        return False

    @property
    def number(self) -> float:
        """This rank's findings in one number, which all ranks get."""
        return float(self.suspects + 2 * bool(self.others))

    def take(self, numbers: Sequence[float]) -> None:
        """Take the `number` of all ranks."""
        self.found = any(number % 2 for number in numbers)
        self.is_of_others = any(number >= 2 for number in numbers)

    def watched(self, engine: Engine, objective: Objective) -> Objective:
        """Return the objective; on several ranks it also collects `others`."""
        if engine.transport.world_size == 1:  # all gradients are on this rank
            return objective
        own = frozenset(map(id, engine.model.parameters()))
        return Watched(objective=objective, own=own, others=self.others)

    def finish(self, evaluate: Evaluate) -> None:
        """Refuse the loss after the step, on all ranks, if it is wrong. Collective."""
        del evaluate
        if self.is_of_others:
            got = ", ".join(map(described, islice(self.others.values(), 3))) or "others, on another rank"
            expected = "a loss that trains parameters of the model, whose gradients are summed over the ranks"
            remedy = "Put it into the head before optimizer and session: model.lm_head.scale = nn.Parameter(...)."
            raise ConfigError("loss", expected=expected, got=got, remedy=remedy)


@dataclass(kw_only=True)
class SumCheck(LossCheck):
    """The check of a `TokenLoss`, on tokens of this rank's first microbatch with at least two."""

    sums: Tensor | None = None  # over all these tokens and over both halves, (3,), in fp64
    least: float = 0.0  # smallest difference that rounding does not explain
    models: Sequence[str] = ()  # other models that the loss runs
    is_due: bool = True

    def compare(self, loss: TokenLoss, output: Any, tokens: Tokens, labels_of: Callable[[], Tensor]) -> None:
        """Call the loss on tokens with labels, whole and in halves; do not check a loss that fails on a part.

        labels_of: function that returns the tokens' labels on the host, without waiting for the device.
        """
        if not self.is_due:
            return
        labels = labels_of().numpy()
        numbers = np.flatnonzero(labels != NO_LOSS)
        numbers = numbers if len(numbers) > 1 else np.arange(len(labels))
        if len(numbers) < 2:
            return
        self.is_due, chosen = False, min(len(numbers), _CHECKED_TOKENS)
        numbers = numbers[np.linspace(0, len(numbers) - 1, chosen).astype(int)]
        device, found = tokens.input_ids.device, list[Tensor]()
        parts = [to_device(torch.from_numpy(each), device) for each in (numbers, *np.array_split(numbers, 2))]
        before = _random_states(device)
        with torch.no_grad(), _random_states_kept(device), models_called() as self.models, suppress(Exception):
            for part in parts:  # the user's function may need more than a part has
                found.append(loss(_part_of(output, len(labels), part), tokens.part(part)).detach().double().reshape(()))
                if not all(map(torch.equal, before, _random_states(device))):
                    return  # random numbers differ from part to part
            self.sums = torch.stack(found)
            self.least = _ROUNDINGS * torch.finfo(torch.promote_types(output.logits.dtype, torch.float32)).eps

    @property
    def is_wrong(self) -> bool:
        """Whether the halves fail to add up to the whole."""
        whole, *halves = self._numbers()
        apart = abs(whole - sum(halves))
        return math.isfinite(whole) and not apart <= max(_UNEQUAL * (abs(whole) + sum(map(abs, halves))), self.least)

    @property
    def suspects(self) -> bool:
        """Whether the halves fail to add up, or the loss runs other models."""
        return self.is_wrong or bool(self.models)

    def finish(self, evaluate: Evaluate) -> None:
        """Refuse the loss on all ranks if one found it wrong; only that rank shows its numbers."""
        super().finish(evaluate)
        if self.found:
            whole, *halves = self._numbers()
            got = f"{whole:g} for some tokens, {sum(halves):g} for their two halves"
            got = got if self.is_wrong else "another value, on another rank"
            got = f"a run of {self.models[0]}, another model" if self.models else got
            remedy = f'Return a sum, reduction="sum" for example; the session divides it once. {_OTHER_MODELS}'
            raise ConfigError("loss", expected="the sum over a microbatch's tokens", got=got, remedy=remedy)

    def _numbers(self) -> list[float]:
        return [math.nan] * 3 if self.sums is None else self.sums.tolist()


class KnownShare(partial[Tensor]):
    """A `ComputeLoss` known to return a share, so it needs no check; it may make all logits of a microbatch.

    It calls the model once, with all inputs that it gets, and leaves balance losses of routers to the engine.
    """

    kind = replace(IN_CHUNKS, whole_logits=True)

    def of_labels(self, labels_alone: bool) -> KnownShare:
        """Set whether only tokens with a label count; return itself."""
        self.kind = replace(self.kind, labels_alone=labels_alone)
        return self


class ShareInChunks(KnownShare):
    """A `KnownShare` that makes logits of a few tokens or words at a time."""

    kind = IN_CHUNKS


@dataclass(kw_only=True)
class ShareCheck(LossCheck):
    """The check of a `ComputeLoss`. known: functions that passed, as keys of `_known_by`. planned: the step."""

    known: deque[object]
    objective: OfModel
    planned: PlannedStep
    device: torch.device
    made_of: object = None

    def __post_init__(self) -> None:
        self.made_of = _known_by(self.objective.compute_loss)

    @property
    def suspects(self) -> bool:
        """Whether this rank has not checked the function."""
        return self.made_of not in self.known

    def finish(self, evaluate: Evaluate) -> None:
        """Call the function on one row of the step and on two equal ones, if it is new on some rank."""
        super().finish(evaluate)
        if not self.found:
            return
        losses, models = list[float](), list[str]()
        for times in (1, 2):
            before = _random_states(self.device)
            with _random_states_kept(self.device):
                step = _short_step(self.planned, self.objective.batch, times)
                with models_called(self.objective.model) as models:
                    losses.append(evaluate(step, replace(self.objective, batch=step.batch)))
                if not all(map(torch.equal, before, _random_states(self.device))):
                    losses[-1] = math.nan  # random numbers differ between the two
        once, twice = losses
        apart, least = abs(twice - 2 * once), _ROUNDINGS * torch.finfo(torch.float32).eps / self.objective.normalizer
        if models or apart > max(_UNEQUAL * (abs(twice) + 2 * abs(once)), least):
            got = f"{once:g} for a row, {twice:g} for two equal rows"
            got = f"a run of {models[0]}, another model" if models else got
            expected = "a microbatch's share of the step's loss: a sum over tokens, divided by one number of the step"
            remedy = "Divide a sum by the step's loss tokens, for example model(**inputs, num_items_in_batch=n).loss. "
            remedy += _OTHER_MODELS
            raise ConfigError(self.objective.name, expected=expected, got=got, remedy=remedy)
        self.known.append(self.made_of)


def kind_of(loss: TokenLoss | None, compute_loss: ComputeLoss | None, *, is_own: bool = False) -> LossKind:
    """Return the properties of a loss that plans depend on. is_own: True if the model computes its own loss."""
    if isinstance(compute_loss, KnownShare):
        return compute_loss.kind
    return IN_CHUNKS if loss is None and compute_loss is None and not is_own else OF_USER


def objective_of(
    engine: Engine,
    model: nn.Module,
    planned: PlannedStep,
    *,
    loss: TokenLoss | None,
    compute_loss: ComputeLoss | None,
    normalizer: float | None,
    known: deque[object],
) -> tuple[Objective, LossCheck | None]:
    """Return the objective of a step, by one of the losses, the model's own or the next token's, and its check.

    model: the engine's model in its wrap. known: compute_loss functions that passed; new ones are added.

    Raises:
        ConfigError: two losses were given, the normalizer is not a finite number above 0, or the model's own loss does
            not take it, or the rows' weights.
        ModelRefused: the model has a balance loss, which `compute_loss` would not count right.
    """
    if loss is not None and compute_loss is not None:
        raise ConfigError("loss", expected="loss or compute_loss", got="both", remedy="Leave one out.")
    divisor = planned.batch.loss_weight if normalizer is None else float(normalizer)
    if not 0 < divisor < math.inf:
        expected = "a token with a label in the step" if normalizer is None else "a finite normalizer above 0"
        remedy = "Give normalizer, or other sequences."
        raise ConfigError("normalizer", expected=expected, got=f"{divisor:g}", remedy=remedy)
    if loss is not None:
        of_tokens = SumCheck()
        of_outputs = OfOutputs(batch=rows_of(planned), loss=loss, divisor=divisor, check=of_tokens.compare)
        return of_tokens.watched(engine, of_outputs), of_tokens
    name = "compute_loss"
    if compute_loss is None:
        if not has_own_loss(engine.model):
            return engine.next_token(planned.batch, divisor), None
        name, compute_loss = OF_MODEL, own_share(engine.model, rows_of(planned), divisor)
    elif not isinstance(compute_loss, KnownShare):
        refuse_balance(engine.model, name)
    objective = OfModel(batch=rows_of(planned), compute_loss=compute_loss, model=model, normalizer=divisor, name=name)
    checked: Any = {"known": known, "objective": objective, "planned": planned, "device": engine.device}
    check = LossCheck() if isinstance(compute_loss, KnownShare) else ShareCheck(**checked)
    return check.watched(engine, objective), check


def _random_states(device: torch.device) -> list[Tensor]:
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])]


def _random_states_kept(device: torch.device) -> AbstractContextManager[None]:
    """Restore those states at the end of the block."""
    return torch.random.fork_rng([device] if device.type == "cuda" else [])


def _part_of(output: Any, num_tokens: int, part: Tensor) -> Any:
    """Return a model's outputs for some tokens, with every tensor (1, tokens, ...) or (tokens, ...) indexed."""

    def cut(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(cut, value))
        if not isinstance(value, Tensor):
            return value
        if tuple(value.shape[:2]) == (1, num_tokens):
            return value[:, part]
        return value[part] if value.dim() and len(value) == num_tokens else value

    cut_output = copy.copy(output)
    for name, value in output.items():
        cut_output[name] = cut(value)
    return cut_output


def _short_step(planned: PlannedStep, batch: RowBatch, times: int) -> PlannedStep:
    """Return a step of one microbatch in which each rank has the end of the same row `times` times."""
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
    """Return the last tokens of the first row that has labels there; without such a row give all tokens labels."""
    found: dict[str, Any] = {}
    for number, length in enumerate(batch.lengths):
        ids, shift_labels = batch.whole(number)
        start = max(0, length - _ROW_TOKENS)
        labels = torch.cat([ids[:1] * 0 + NO_LOSS, shift_labels[:-1]])
        found = {"input_ids": ids[start:], "labels": labels[start:]}
        found |= {name: values[number][start:] for name, values in batch.columns.items()}
        if (found["labels"][1:] != NO_LOSS).any():
            return found
    return found | {"labels": found["input_ids"]}


def _known_by(given: object) -> object:
    """Return what makes a function another one: itself; of a partial its parts. Numbers and tensors differ by step."""
    if isinstance(given, partial):
        return _known_by(given.func), _known_by(given.args), _known_by(given.keywords)
    if isinstance(given, Mapping):
        return {key: _known_by(each) for key, each in given.items()}
    if isinstance(given, list | tuple):
        return [_known_by(each) for each in given]
    return given if callable(given) or isinstance(given, str | bool | None) else type(given)
