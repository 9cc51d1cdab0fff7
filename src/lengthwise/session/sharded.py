"""A loop's own optimizer, pointed at this rank's slices of the master weights: its groups, arguments and states stay.

An optimizer that computes each entry by itself gives the same on a slice as on the whole. The others are refused by
name. What its user keeps is the object: schedulers change its groups, `step` updates the slices, and a hook then
publishes them to all ranks.

The sum of the gradients over the ranks has one owner, `ShardedInPlace`, from the end of a backward until the loop
clears it. While the optimizer steps, its groups hold slices as tensors; at all other times guarded ones
(`session.guards`), one for each parameter in the loop's order, so that what the loop changes there is counted and alike
on all ranks. Offloaded, slices and states are in the host's memory, and the sum is copied there when it is used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lengthwise.core.errors import ConfigError, LengthwiseError, raise_problems
from lengthwise.engine.flat_layout import Run
from lengthwise.engine.parameters import Parameters
from lengthwise.engine.replicated import FlatParameters
from lengthwise.session.guards import GRADIENTS, Slice, WithheldGradient, guarded_gradient, guarded_slice, plain

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
    shapes: of each of them. rank: of this one among those over which `parameters` lie. edits: changes that the loop
    made to slices of gradients and of weights. has_edited_weights: some of them are not published. reached: names of
    the parameters that a loss of this rank has reached in the last backward. with_gradient: those that have one, as a
    loss of some rank has reached them since gradients were cleared. compare: compares the ranks, takes in what the loop
    did to gradients and publishes what it did to weights (`session.agreement`).
    """

    parameters: Parameters
    rank: int
    compare: Callable[[str], None]

    def __init__(self, optimizer: Optimizer, model: nn.Module, *, offloads: bool = False) -> None:
        self.optimizer, self._model, self.offloads = optimizer, model, offloads
        group_of = {id(each): number for number, group in enumerate(optimizer.param_groups) for each in group["params"]}
        members = [each for group in optimizer.param_groups for each in group["params"]]
        counted = {id(each): number for number, each in enumerate(members)}
        trainable = {name: each for name, each in model.named_parameters() if each.requires_grad}
        self._groups = {name: group_of[id(each)] for name, each in trainable.items()}
        self.numbers = {name: counted[id(each)] for name, each in trainable.items()}
        self.shapes = {name: tuple(each.shape) for name, each in trainable.items()}
        self._members = [[counted[id(each)] for each in group["params"]] for group in optimizer.param_groups]
        self._frozen = {number: each for number, each in enumerate(members) if not each.requires_grad}
        self._before = {name: (tuple(each.shape), optimizer.state.get(each, {})) for name, each in trainable.items()}
        self._slices: list[tuple[Run, nn.Parameter]] = []
        self.edits, self.has_edited_weights = {"gradients": 0, "weights": 0}, False
        self.with_gradient, self.reached = set[str](), set[str]()  # names of parameters
        self._is_running = self._is_stepping = False
        self._is_behind = self._is_ahead = False  # the gradients on the host, of those on the device

    def point_at(self, parameters: Parameters, rank: int) -> None:
        """Take this rank's slices for the parameters, and slices of the states that there are."""
        self.parameters, self.rank = parameters, rank
        own = [list[nn.Parameter]() for _ in self.optimizer.param_groups]
        self._gradients = summed = parameters.grad_shard
        if self.offloads:
            self._gradients = torch.zeros(summed.shape, dtype=summed.dtype, pin_memory=summed.is_cuda)
        self.optimizer.state.clear()
        runs = {parameters.names[run.parameter]: run for run in parameters.layout.runs(rank)}
        self._guarded, self._gradient_of, nothing = dict[str, Slice](), dict[str, Tensor](), slice(0, 0)
        for name in self.numbers:
            place = slice(runs[name].start, runs[name].stop) if name in runs else nothing
            self._guarded[name] = guarded_slice(self, parameters.master_weights[place])
            self._gradient_of[name] = guarded_gradient(self, self._gradients[place])
        for name, run in runs.items():
            piece = nn.Parameter(parameters.master_weights[run.start : run.stop])
            shape, state = self._before[name]
            if state:
                entries = slice(run.entry, run.entry + run.stop - run.start)
                kept = {key: _sliced(value, shape, entries) for key, value in state.items()}
                self.optimizer.state[piece] = {key: self._placed(value, piece) for key, value in kept.items()}
            self._slices.append((run, piece))
            own[self._groups[name]].append(piece)
        by_number = {self.numbers[name]: each for name, each in self._guarded.items()} | self._frozen
        self._lists = {True: own, False: [[by_number[number] for number in each] for each in self._members]}
        self._withheld = {
            name: (each, WithheldGradient(each))
            for name, each in self._model.named_parameters()
            if name in self.numbers
        }
        self._before.clear()
        self._frozen.clear()
        self._let_step(False)
        self.optimizer.zero_grad = self.zero_grad
        self.optimizer.register_state_dict_pre_hook(lambda *_: _refuse_slices("state_dict"))
        self.optimizer.register_load_state_dict_pre_hook(lambda *_: _refuse_slices("load_state_dict"))
        self._hooks = [each.register_post_accumulate_grad_hook(partial(self._note, name)) for name, each in self._own()]
        self._before_step = self.optimizer.register_step_pre_hook(lambda *_: self.before_step())
        self._after_step = self.optimizer.register_step_post_hook(lambda *_: self.after_step())
        self.withhold_gradients()

    def _own(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the model's parameters that train here, by name."""
        for name, (parameter, _) in self._withheld.items():
            yield name, parameter

    def _placed(self, value: Any, piece: nn.Parameter) -> Any:
        """Return what was kept of a parameter where its slice now is updated."""
        return value.to(piece.device) if self.offloads and isinstance(value, Tensor) else value

    def _note(self, name: str, _parameter: Tensor) -> None:
        """Note that a loss has made a gradient of a parameter."""
        self.reached.add(name)

    # What the loop does to slices in the optimizer's groups.

    def before_use(self, kind: str) -> None:
        """Have the sum of the gradients where the loop reads it."""
        if kind == GRADIENTS and self._is_behind:
            self._gradients.copy_(self.parameters.grad_shard)  # which waits for it
            self._is_behind = False

    def changed(self, kind: str) -> None:
        """Count a change of slices."""
        self.edits[kind] += 1
        if kind == GRADIENTS:
            self._is_ahead = self.offloads
        else:
            self.has_edited_weights = True

    def settle(self) -> None:
        """Take in what the loop has done to gradients since the session last ran: set, cleared or changed them.

        Raises:
            ConfigError: it gave the model's own parameters gradients.
        """
        for name, (parameter, withheld) in self._withheld.items():
            found = parameter.grad
            if found is None and name in self.with_gradient:
                self._guarded[name].grad = None
            elif found is not None and found is not withheld:
                expected = "gradients of the session alone, which sums them over the ranks"
                got = f"a gradient of {name} that a plain backward made, or that was set by hand"
                remedy = "Put that loss into session.backward, or change slices in optimizer.param_groups."
                raise ConfigError("gradient of a parameter", expected=expected, got=got, remedy=remedy)
        for name, guarded in self._guarded.items():
            found, own = guarded.grad, self._gradient_of[name]
            if found is (own if name in self.with_gradient else None):
                continue
            if found is not own:
                self.before_use(GRADIENTS)
                room = plain(own)
                if found is None:
                    room.zero_()
                else:
                    room.copy_(plain(found))
                self.changed(GRADIENTS)
            (self.with_gradient.discard if found is None else self.with_gradient.add)(name)
        if self._is_ahead:
            self.parameters.grad_shard.copy_(self._gradients)
            self._is_ahead = False
        self.withhold_gradients()

    def withhold_gradients(self) -> None:
        """Show the loop which parameters have gradients: the model's own are out of reach, slices have theirs."""
        for name, (parameter, withheld) in self._withheld.items():
            parameter.grad = withheld if name in self.with_gradient else None
        for name, guarded in self._guarded.items():
            guarded.grad = self._gradient_of[name] if name in self.with_gradient else None

    # A backward of the session.

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Add what backwards make inside to what there is; `reach` says of which parameters."""
        self.parameters.keep_sum()
        self.reached.clear()
        self.parameters.attach_gradients()
        try:
            yield
        finally:
            self.parameters.detach_gradients()
            self._is_behind = self.offloads
            self._order_hooks()
            self.withhold_gradients()
            if self._is_stepping:
                self._give_gradients()

    @property
    def num_missing(self) -> int:
        """Count the parameters here that no loss of this rank has reached since the backward began."""
        return len(self._withheld) - len(self.reached)

    def reach(self, names: Iterable[str]) -> None:
        """Give these parameters of the whole model gradients."""
        self.with_gradient.update(names)

    def scale_gradients(self, factor: float) -> None:
        """Multiply the sum of the gradients."""
        self.parameters.grad_shard.mul_(factor)
        self._is_behind = self.offloads
        if self._is_stepping:
            self._give_gradients()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear all gradients of this rank: those of the slices, and those from which the slices are summed."""
        if set_to_none:
            self.with_gradient.clear()
        else:
            self.settle()  # the loop may have set some to None
        self.parameters.clear_gradients()
        self._gradients.zero_()
        self._is_behind = self._is_ahead = False
        self.withhold_gradients()
        if self._is_stepping:
            self._give_gradients()

    # A step of the optimizer, and what the loop did to weights before.

    def before_step(self) -> None:
        """Give the optimizer its slices, with the weights and gradients that the loop has left. Collective."""
        self.compare("optimizer.step")
        self.take_changes()
        self._let_step(True)
        self._give_gradients()

    def after_step(self) -> None:
        """Publish what the optimizer updated."""
        self._let_step(False)
        self.publish()

    def _let_step(self, steps: bool) -> None:
        """Put slices into the groups: as tensors while the optimizer steps, guarded at other times."""
        self._is_stepping = steps
        for group, members in zip(self.optimizer.param_groups, self._lists[steps], strict=True):
            group["params"] = members

    def _give_gradients(self) -> None:
        self.before_use(GRADIENTS)
        for run, piece in self._slices:
            has_one = self.parameters.names[run.parameter] in self.with_gradient
            piece.grad = self._gradients[run.start : run.stop] if has_one else None

    def take_changes(self) -> None:
        """Take what the loop wrote into whole parameters since the last step."""
        if isinstance(self.parameters, FlatParameters):
            self.parameters.take_changes()

    def publish(self) -> None:
        """Give all ranks the weights of the slices. Collective."""
        self.parameters.publish()
        self.has_edited_weights = False

    def refuse_unpublished(self) -> None:
        """Refuse a use of the model's own values while slices are newer.

        Raises:
            ConfigError: they are.
        """
        if self.has_edited_weights:
            expected = "weights that all ranks have"
            got = "changes to slices in optimizer.param_groups, which the session sends when it next runs"
            remedy = "Call session.evaluate or another of its methods first, on all ranks."
            raise ConfigError("model", expected=expected, got=got, remedy=remedy)

    def _order_hooks(self) -> None:
        """Let the loop's own hooks of a step, whenever they were registered, find guarded slices."""
        optimizer: Any = self.optimizer  # torch has no method for the order of hooks
        optimizer._optimizer_step_pre_hooks.move_to_end(self._before_step.id)
        optimizer._optimizer_step_post_hooks.move_to_end(self._after_step.id, last=False)

    def release(self) -> None:
        """Leave the model's gradients to a plain loop, and let the optimizer refuse steps."""
        for each in (*self._hooks, self._before_step):
            each.remove()
        self.with_gradient.clear()
        self.withhold_gradients()

    def states(self) -> Iterator[tuple[Run, dict[str, Any]]]:
        """Yield what the optimizer keeps of each slice."""
        for run, piece in self._slices:
            yield run, self.optimizer.state[piece]

    def plain_groups(self) -> list[dict[str, Any]]:
        """Return the groups as torch's `state_dict` does, with the numbers of the whole parameters."""
        groups = ({k: v for k, v in group.items() if k != "params"} for group in self.optimizer.param_groups)
        return [{**group, "params": each} for group, each in zip(groups, self._members, strict=True)]

    def arguments(self) -> list[dict[str, Any]]:
        """Return the arguments of the groups, such as learning rates, as numbers."""
        groups = self.optimizer.param_groups
        return [{key: plain_value(value) for key, value in group.items() if key != "params"} for group in groups]

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


def plain_value(value: Any) -> Any:
    """Return an argument of a group as a number; a learning rate may be a tensor."""
    return value.item() if isinstance(value, Tensor) else value


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
