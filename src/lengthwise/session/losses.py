"""A loop's own losses in place of the mean next-token loss.

A rank's microbatch has parts of some sequences, cut and packed. Every loss here is a sum over its tokens, so it is
exact under any cut; a mean, a collective or a statistic of the batch is not, and gives another loss.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from threading import get_ident
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel

from lengthwise.attention import to_device
from lengthwise.core.errors import ConfigError
from lengthwise.core.names import counted
from lengthwise.data import NO_LOSS
from lengthwise.engine.objective import ForwardPass, Objective
from lengthwise.models import token_losses, whole_model
from lengthwise.models.adapter import collecting_routers, planned_output, run_planned
from lengthwise.session.misuse import shown
from lengthwise.session.row_batch import RowBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """This rank's tokens of a microbatch, all (tokens,), in the order of the model's outputs.

    shift_labels: token to predict after each token, -100 without a loss. sequences: number of each token's row in the
    step. columns: the rows' other columns by name, (tokens, ...). is_check: True if this call only checks on some
    tokens that the loss is a sum; a loop's own counters should skip it.
    """

    input_ids: Tensor
    position_ids: Tensor
    shift_labels: Tensor
    sequences: Tensor
    columns: Mapping[str, Tensor] = field(default_factory=dict)
    is_check: bool = False

    def part(self, part: Tensor) -> Tokens:
        """Return the tokens of these numbers, for a check."""
        return Tokens(
            input_ids=self.input_ids[part],
            position_ids=self.position_ids[part],
            shift_labels=self.shift_labels[part],
            sequences=self.sequences[part],
            columns={name: values[part] for name, values in self.columns.items()},
            is_check=True,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LossKind:
    """The properties of a loss that plans depend on.

    whole_logits: True if the loss may need all logits of a microbatch at once. labels_alone: True if tokens without a
    label are known not to count, so that rows may share them.
    """

    whole_logits: bool
    labels_alone: bool


IN_CHUNKS = LossKind(whole_logits=False, labels_alone=True)
OF_USER = LossKind(whole_logits=True, labels_alone=False)

TokenLoss: TypeAlias = Callable[[Any, Tokens], Tensor]
"""Returns a sum over `Tokens`, from the model's outputs (with `logits`, (1, tokens, vocabulary)) and the tokens."""
ComputeLoss: TypeAlias = Callable[[nn.Module, dict[str, Any]], Tensor]
"""Returns a microbatch's share of the step's loss, from a model and its inputs, as Trainer's `compute_loss`."""
TokenValues: TypeAlias = Callable[[Any, Tokens], Tensor]
"""Returns one value per token, (tokens,), or several, (tokens, k), from the arguments of a `TokenLoss`."""
CheckLoss: TypeAlias = Callable[[TokenLoss, Any, Tokens, Callable[[], Tensor]], None]
"""Checks a `TokenLoss` with outputs, tokens, and a function that returns the tokens' labels on the host."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OfOutputs:
    """An `Objective` that a `TokenLoss` computes from the model's outputs."""

    batch: RowBatch
    loss: TokenLoss
    divisor: float
    check: CheckLoss | None = None
    rows_beyond: int = 0

    def __call__(self, forward: ForwardPass) -> Tensor:
        """Return the sum over the rank's tokens."""
        output = planned_output(forward.model, forward.planned, forward.input_ids, forward.position_ids)
        if forward.collect_router is not None:
            forward.collect_router([logits.flatten(0, -2) for logits in output.router_logits])
        tokens = tokens_of(self.batch, forward)
        found = one_number("loss", self.loss(output, tokens), forward.input_ids.device)
        if self.check is not None:
            self.check(self.loss, output, tokens, lambda: self.batch.tensors(forward.segments)[2])
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class OfModel:
    """An `Objective` that a function of a model and its inputs computes; model or function shifts the labels.

    `model` is the function's argument; a planned forward of any of its parts counts. The row has one more token of
    padding, and labels are moved one to the right, so that the usual shift pairs each token with its successor in the
    sequence, however the sequence was cut and packed. name: the function's name in messages.
    """

    batch: RowBatch
    compute_loss: ComputeLoss
    model: nn.Module
    normalizer: float
    name: str = "compute_loss"
    divisor: float = 1.0
    rows_beyond: int = 1

    def __call__(self, forward: ForwardPass) -> Tensor:
        """Return this rank's part of the loss."""
        planned, device = forward.planned, forward.input_ids.device
        padding = planned.num_rows - planned.num_tokens

        def row(values: Tensor, left: int = 0, value: int = 0) -> Tensor:
            padded = F.pad(values.movedim(0, -1), (left, padding - left), value=value)
            return padded.movedim(-1, 0)[None]

        inputs = {
            "input_ids": row(forward.input_ids),
            "position_ids": row(forward.position_ids),
            "labels": row(forward.shift_labels, left=1, value=NO_LOSS),
            "use_cache": False,
            "lengthwise": planned,
            **{name: row(to_device(self.batch.column(name, forward.segments), device)) for name in self.batch.columns},
        }
        routers = collecting_routers(forward.model, planned, forward.collect_router)
        with _without_plan(forward.model), routers as switch:
            inputs |= switch
            found = run_planned(forward.model, planned, lambda: self.compute_loss(self.model, inputs), once=False)
        return one_number(self.name, found, device)


@contextmanager
def _without_plan(model: nn.Module) -> Iterator[None]:
    """Call a `loss_function` that the user has set without the plan in its inputs, as plain forwards do."""
    attributes = vars(whole_model(model))
    own = attributes.get("_loss_function")
    if own is None:
        yield
        return

    def call(*arguments: Any, lengthwise: object = None, **given: Any) -> Any:
        del lengthwise
        return own(*arguments, **given)

    attributes["_loss_function"] = call
    try:
        yield
    finally:
        attributes["_loss_function"] = own


OF_MODEL = "loss of the model"  # in messages


def own_share(model: nn.Module, batch: RowBatch, normalizer: float) -> ComputeLoss:
    """Return the model's own loss as a `ComputeLoss` that keeps all its parts."""
    whole: Any = whole_model(model)
    if batch.is_weighed:
        expected = "rows without weights: a forward, forward hook or loss_function of your own does not get them"
        raise ConfigError(OF_MODEL, expected=expected, got="rows with weights", remedy="Give loss= a function.")
    made_of = {"forward": whole.forward, "loss_function": whole.loss_function}
    for part, function in made_of.items():
        signature = inspect.signature(function)
        try:
            signature.bind_partial(num_items_in_batch=normalizer)
        except TypeError:
            expected = f"a {part} that takes num_items_in_batch, by which it divides a sum over the tokens"
            got, remedy = f"{part}{signature}", "Add the argument and **kwargs, or give loss=."
            raise ConfigError(OF_MODEL, expected=expected, got=got, remedy=remedy) from None
    return partial(_own_share, normalizer=normalizer, **made_of)


def _own_share(model: nn.Module, inputs: dict[str, Any], *, normalizer: float, **_made_of: object) -> Any:
    return model(**inputs, num_items_in_batch=normalizer).loss


def tokens_of(batch: RowBatch, forward: ForwardPass) -> Tokens:
    """Return a rank's tokens of a microbatch, as a loss gets them."""
    device, segments = forward.input_ids.device, forward.segments
    return Tokens(
        input_ids=forward.input_ids,
        position_ids=forward.position_ids,
        shift_labels=forward.shift_labels,
        sequences=to_device(batch.sequences(segments), device),
        columns={name: to_device(batch.column(name, segments), device) for name in batch.columns},
    )


def log_probabilities(output: Any, tokens: Tokens) -> Tensor:
    """Return the log-probability of each label, (tokens,), in fp32 or wider, 0 without a label.

    Use it inside a `TokenValues` beside other values. Alone, `values=None` gives the same without logits of all tokens
    at once.
    """
    return -token_losses(output.logits[0], tokens.shift_labels)


_IN_GRAPH = "Return the sum over the tokens, in the graph of the outputs: no .item(), .detach() or torch.no_grad()."


def one_number(
    what: str, found: object, device: torch.device, *, of: str = "the model's outputs", remedy: str = _IN_GRAPH
) -> Tensor:
    """Return a loop function's result as a tensor (), on the device; refuse others, and one that lacks a gradient."""
    got = None  # `shown` would read a tensor's value, which waits for the device
    if isinstance(found, Tensor):
        needs = torch.is_grad_enabled() and not found.requires_grad
        if found.numel() == 1 and found.is_floating_point() and not found.is_meta and not needs:
            return found.reshape(()).to(device)
        got = f"{str(found.dtype).removeprefix('torch.')} of {tuple(found.shape)}"
        got += " on the meta device" if found.is_meta else f", which does not depend on {of}" if needs else ""
    expected = f"a tensor of one number, computed from {of}"
    raise ConfigError(what, expected=expected, got=got or shown(found), remedy=remedy)


def leaves_beside(loss: Tensor, given: Collection[Any]) -> list[Tensor]:
    """Return the leaves that the gradient of a loss reaches, without those behind the nodes `given` of its graph."""
    found = [loss] if loss.is_leaf and loss.requires_grad else list[Tensor]()
    seen, left = {None, *given}, list[Any]([loss.grad_fn])
    while left:
        if (node := left.pop()) in seen:
            continue
        seen.add(node)
        if node.name() == "torch::autograd::AccumulateGrad":
            found.append(node.variable)
        left += [each for each, _ in node.next_functions]
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Watched:
    """An `Objective` that collects the leaves outside of the model that its loss reaches beside the decoder's outputs.

    own: ids of the model's parameters. others: leaves found so far, by id.
    """

    objective: Objective
    own: Collection[int]
    others: dict[int, Tensor]

    @property
    def divisor(self) -> float:
        """Divisor of the sum."""
        return self.objective.divisor

    @property
    def rows_beyond(self) -> int:
        """Least number of padding rows."""
        return self.objective.rows_beyond

    def __call__(self, forward: ForwardPass) -> Tensor:
        """Return the objective's sum over the rank's tokens."""
        with _decoder_ends(forward.model) as given:
            loss = self.objective(forward)
        self.others.update((id(each), each) for each in leaves_beside(loss, given) if id(each) not in self.own)
        return loss


@contextmanager
def _decoder_ends(model: Any) -> Iterator[set[Any]]:
    """Collect the nodes of the graph at which the decoder's outputs inside the block end."""
    found = set[Any]()

    def note(_module: nn.Module, _asked: Any, output: Any) -> None:
        found.update(each.grad_fn for each in tree_leaves(output) if isinstance(each, Tensor))

    handle = model.get_decoder().register_forward_hook(note)
    try:
        yield found
    finally:
        handle.remove()


def gradients_by(where: str, loss: Tensor, leaves: Sequence[Tensor], model: nn.Module) -> tuple[Tensor, ...]:
    """Return the gradients of a loss by the gathered values that it is computed from; 0 where it depends on none.

    where: the function's name in messages.

    Raises:
        ConfigError: the loss depends on other tensors that need a gradient, which would be lost.
    """
    given = {id(each) for each in leaves}
    if beside := [each for each in leaves_beside(loss, ()) if id(each) not in given]:
        names = {id(each): f"{name} of the model" for name, each in model.named_parameters()}
        first = names.get(id(beside[0]), described(beside[0]))
        more = f" and {counted(len(beside) - 1, 'more tensor')}" if len(beside) > 1 else ""
        got = f"one of {first}{more} as well"
        remedy = "Leave such terms out: run a session.backward of their own for them, which adds its gradients."
        raise ConfigError(where, expected="a loss of the gathered values alone", got=got, remedy=remedy)
    return torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)


@contextmanager
def models_called(own: nn.Module | None = None) -> Iterator[list[str]]:
    """Collect the classes of Hugging Face models other than `own` that run inside the block, such as a teacher."""
    found, modules, here = list[str](), set() if own is None else set(own.modules()), get_ident()

    def note(module: nn.Module, _arguments: Any) -> None:
        if isinstance(module, PreTrainedModel) and module not in modules and get_ident() == here:
            found.append(type(module).__name__)

    handle = register_module_forward_pre_hook(note)
    try:
        yield found
    finally:
        handle.remove()


def described(leaf: Tensor) -> str:
    """Describe a tensor outside of the model that needs a gradient."""
    return f"a {'parameter' if isinstance(leaf, nn.Parameter) else 'tensor'} {tuple(leaf.shape)} beside the model"
