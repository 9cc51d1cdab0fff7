"""A loop's own optimizer, pointed at this rank's slices of the master weights: its groups, arguments and states stay.

An optimizer that computes each entry by itself gives the same on a slice as on the whole. The others are refused by
name. What its user keeps is the object: schedulers change its groups, `step` updates the slices, and a hook then
publishes them to all ranks.

Offloaded, slices and states are in the host's memory, and a hook before `step` copies the sum of gradients there.

After a backward a parameter's own gradient would be this rank's share, or nothing: torch's clipping of it would change
no slice, and its norm would differ by rank, without an error. So any use of one raises until the next backward.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lengthwise.core.errors import ConfigError, LengthwiseError, raise_problems
from lengthwise.engine.flat_layout import Run
from lengthwise.engine.parameters import Parameters
from lengthwise.engine.replicated import FlatParameters

BY_ENTRY: Mapping[str, tuple[str, ...]] = {  # classes by the package that has them
    "torch": (
        *("AdamW", "Adam", "Adamax", "NAdam", "RAdam", "SGD", "ASGD", "RMSprop", "Rprop", "Adagrad", "Adadelta"),
    ),
    "lion_pytorch": ("Lion",),
    "lengthwise": ("Lion",),
}
_WHY_NOT = {
    "Adafactor": "its update of an entry depends on the rows and columns of the matrix",
    "Muon": "its update of an entry depends on the whole matrix",
    "SparseAdam": "it is for sparse gradients",
    "LBFGS": "it takes several forward passes a step, and a global history",
}
_OF_FEW_BITS = "its states may be of 8 or 4 bits, which share a scale in blocks that would lie over two ranks"
_WHY_NONE_OF: Mapping[str, str] = {"bitsandbytes": _OF_FEW_BITS, "torchao": _OF_FEW_BITS}  # by package


def check_optimizer(optimizer: Any, model: nn.Module, *, offloads: bool = False) -> Optimizer:
    """Return torch's optimizer under what a library has put around it, if it can be sharded, and offloaded.

    Raises:
        ConfigError, Problems: it is of another kind, or its parameters are not those of the model that train.
    """
    inner = optimizer
    while isinstance(getattr(inner, "optimizer", None), Optimizer):  # as accelerate's has it
        inner = inner.optimizer
    if not isinstance(inner, Optimizer):
        raise _refuse("a torch.optim.Optimizer", f"a {type(optimizer).__name__}")
    problems: list[LengthwiseError] = []
    kind, package = type(inner).__name__, type(inner).__module__.partition(".")[0]
    if kind not in BY_ENTRY.get(package, ()):
        known = ", ".join(f"{package}'s {' '.join(names)}" for package, names in BY_ENTRY.items() if names)
        why = _WHY_NONE_OF.get(package) or _WHY_NOT.get(kind, "it is not known to compute each entry by itself")
        expected = f"an optimizer that computes each entry by itself, so that slices change nothing: {known}"
        problems.append(_refuse(expected, f"{type(inner).__module__}.{kind}: {why}"))
    if offloads and any(group.get("capturable") for group in inner.param_groups):
        problems.append(_refuse("capturable=False beside offload_optimizer: the host updates", "True", "Take it out."))
    names = {id(each): name for name, each in model.named_parameters()}
    others = sum(id(each) not in names for group in inner.param_groups for each in group["params"])
    if others:
        problems.append(_refuse("parameters of the model alone", f"{others} that are not"))
    trained = {id(each) for group in inner.param_groups for each in group["params"]}
    left = [name for name, each in model.named_parameters() if each.requires_grad and id(each) not in trained]
    if left:
        got = f"{len(left)} trainable parameters in none, first {left[0]}"
        problems.append(_refuse("every trainable parameter in a group", got, "Freeze the others, or add them."))
    raise_problems(problems)
    return inner


class ShardedInPlace:
    """An optimizer whose groups hold this rank's slices of the model's parameters, with what it kept of them so far.

    Made before the parameters are cut, and pointed at the slices by `point_at`. offloads: these are on the host,
    where they are updated by gradients that are copied there. parameters: that were cut. numbers:
    which of the optimizer's parameters, as torch counts them, each that trains is, by its name in the whole model.
    shapes: of each of them. rank: of this one among those over which `parameters` lie.
    """

    parameters: Parameters
    rank: int

    def __init__(self, optimizer: Optimizer, model: nn.Module, *, offloads: bool = False) -> None:
        self.optimizer, self._model, self._withheld = optimizer, model, WithheldGradients()
        self.offloads = offloads
        group_of = {id(each): number for number, group in enumerate(optimizer.param_groups) for each in group["params"]}
        members = [each for group in optimizer.param_groups for each in group["params"]]
        counted = {id(each): number for number, each in enumerate(members)}
        trainable = {name: each for name, each in model.named_parameters() if each.requires_grad}
        self._groups = {name: group_of[id(each)] for name, each in trainable.items()}
        self.numbers = {name: counted[id(each)] for name, each in trainable.items()}
        self.shapes = {name: tuple(each.shape) for name, each in trainable.items()}
        self._members = [[counted[id(each)] for each in group["params"]] for group in optimizer.param_groups]
        self._before = {name: (tuple(each.shape), optimizer.state.get(each, {})) for name, each in trainable.items()}
        self._slices: list[tuple[Run, nn.Parameter]] = []

    def point_at(self, parameters: Parameters, rank: int) -> None:
        """Take this rank's slices for the parameters, and slices of the states that there are."""
        self.parameters, self.rank = parameters, rank
        members = [list[nn.Parameter]() for _ in self.optimizer.param_groups]
        self._gradients = summed = parameters.grad_shard
        if self.offloads:
            self._gradients = torch.zeros(summed.shape, dtype=summed.dtype, pin_memory=summed.is_cuda)
        self.optimizer.state.clear()
        for run in parameters.layout.runs(rank):
            piece = nn.Parameter(parameters.master_weights[run.start : run.stop])
            name = parameters.names[run.parameter]
            shape, state = self._before[name]
            if state:
                entries = slice(run.entry, run.entry + run.stop - run.start)
                own = {key: _sliced(value, shape, entries) for key, value in state.items()}
                self.optimizer.state[piece] = {key: self._placed(value, piece) for key, value in own.items()}
            self._slices.append((run, piece))
            members[self._groups[name]].append(piece)
        for group, each in zip(self.optimizer.param_groups, members, strict=True):
            group["params"] = each
        self._before.clear()
        self.optimizer.zero_grad = self.zero_grad
        self.optimizer.register_state_dict_pre_hook(lambda *_: _refuse_slices("state_dict"))
        self.optimizer.register_load_state_dict_pre_hook(lambda *_: _refuse_slices("load_state_dict"))
        self.optimizer.register_step_post_hook(lambda *_: self._after_step())

    def _placed(self, value: Any, piece: nn.Parameter) -> Any:
        """Return what was kept of a parameter where its slice now is updated."""
        return value.to(piece.device) if self.offloads and isinstance(value, Tensor) else value

    def take_changes(self) -> None:
        """Take what the loop wrote into whole parameters since the last step."""
        if isinstance(self.parameters, FlatParameters):
            self.parameters.take_changes()

    def before_step(self) -> None:
        """See that the optimizer updates the values that there are by the gradients that there are.

        Raises:
            ConfigError: the loop cleared the gradients of some parameters alone.
        """
        self._take_cleared()
        self.take_changes()
        if self.offloads:
            self._gradients.copy_(self.parameters.grad_shard)  # which waits for it

    def _after_step(self) -> None:
        self.parameters.publish()
        self._let_slices_be()

    def _let_slices_be(self) -> None:
        for _, piece in self._slices:
            piece.grad = None  # so that a step before the next backward moves nothing, as in a plain loop

    def _take_cleared(self) -> None:
        """Clear all gradients where the loop has set those of all parameters to None by hand."""
        cleared = self._withheld.are_cleared()
        if cleared and all(cleared):
            self.zero_grad()
        elif any(cleared):
            got, remedy = (
                f"{sum(cleared)} of {len(cleared)}",
                "Freeze them, by requires_grad_(False), before the session.",
            )
            raise ConfigError("gradients set to None", expected="those of all parameters", got=got, remedy=remedy)

    def attach(self) -> None:
        """Give each slice its gradient, and each parameter of the model that is there as a whole."""
        self._take_cleared()
        self.give_gradients_back()
        self.parameters.attach_gradients()
        for run, piece in self._slices:
            piece.grad = self._gradients[run.start : run.stop]

    def give_gradients_back(self) -> None:
        """Put the model's own gradients back in their place."""
        self._withheld.give_back()

    def withhold_gradients(self) -> None:
        """Let the model's own gradients raise until the next backward: they are this rank's part of the sums."""
        self._withheld.withhold([parameter for parameter in self._model.parameters() if parameter.requires_grad])

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear all gradients of this rank: those of the slices, and those from which the slices are summed."""
        if set_to_none:
            self._let_slices_be()
        self.parameters.clear_gradients()
        self.parameters.grad_shard.zero_()
        for parameter in self._model.parameters():
            parameter.grad = None

    def states(self) -> Iterator[tuple[Run, dict[str, Any]]]:
        """Yield what the optimizer keeps of each slice."""
        for run, piece in self._slices:
            yield run, self.optimizer.state[piece]

    def plain_groups(self) -> list[dict[str, Any]]:
        """Return the groups as torch's `state_dict` does, with the numbers of the whole parameters."""
        groups = ({k: v for k, v in group.items() if k != "params"} for group in self.optimizer.param_groups)
        return [{**group, "params": each} for group, each in zip(groups, self._members, strict=True)]

    def set_groups(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Set the arguments of the groups."""
        for group, given in zip(self.optimizer.param_groups, groups, strict=True):
            group.update({key: tuple(value) if isinstance(value, list) else value for key, value in given.items()})

    def set_states(self, parameter: int, states: Mapping[str, Tensor]) -> None:
        """Replace what is kept of a parameter by this rank's slices of `states`, (entries,) or () each."""
        group = self.optimizer.param_groups[self._groups[self.parameters.names[parameter]]]
        for run, piece in self._slices:
            if run.parameter == parameter:
                entries = slice(run.entry, run.entry + run.stop - run.start)
                counts_on = piece.device if group.get("fused") or group.get("capturable") else "cpu"
                self.optimizer.state[piece] = {
                    key: value[entries].to(piece.device, copy=True) if value.dim() else value.to(counts_on, copy=True)
                    for key, value in states.items()
                }


def _refuse_slices(name: str) -> None:
    got, remedy = f"optimizer.{name}, which has this rank's slices only", f"Call session.{name}."
    raise ConfigError(f"optimizer.{name}", expected=f"session.{name}", got=got, remedy=remedy)


def _sliced(value: Any, shape: tuple[int, ...], entries: slice) -> Any:
    """Return a slice of what is kept of each entry of a parameter, and a copy of any other tensor."""
    if not isinstance(value, Tensor):
        return value
    return value.reshape(-1)[entries].clone() if tuple(value.shape) == shape else value.clone()


def _refuse(expected: str, got: str, remedy: str = "Take another optimizer.") -> ConfigError:
    return ConfigError("optimizer", expected=expected, got=got, remedy=remedy)


class _Withheld(Tensor):
    """A tensor that any use of raises."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        del types, args, kwargs
        remedy = "Use session.clip_grad_norm_, or the result's grad_norm; optimizer.zero_grad clears gradients."
        expected, got = "no use of it between two backward passes: each rank has only a part", f"{func.__name__} of it"
        raise ConfigError("gradient of a parameter", expected=expected, got=got, remedy=remedy)


class WithheldGradients:
    """The gradients of parameters that were taken out of reach."""

    def __init__(self) -> None:
        self._kept: list[tuple[nn.Parameter, Tensor | None]] = []

    def withhold(self, parameters: Sequence[nn.Parameter]) -> None:
        """Put what raises in the place of gradients."""
        for parameter in parameters:
            self._kept.append((parameter, parameter.grad))
            stands = torch.zeros((), dtype=parameter.dtype, device=parameter.device).expand(parameter.shape)
            parameter.grad = stands.as_subclass(_Withheld)  # expanded: one number, whatever the shape

    def are_cleared(self) -> list[bool]:
        """Return of each parameter whether its gradient was set to None since."""
        return [parameter.grad is None for parameter, _ in self._kept]

    def give_back(self) -> None:
        """Put the gradients back where nobody has cleared or replaced them."""
        for parameter, gradient in self._kept:
            if isinstance(parameter.grad, _Withheld):
                parameter.grad = gradient
        self._kept.clear()
