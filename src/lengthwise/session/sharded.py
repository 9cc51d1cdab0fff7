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
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lengthwise.core.errors import ConfigError
from lengthwise.engine.flat_layout import Run
from lengthwise.engine.norm import norm_bytes
from lengthwise.engine.parameters import Parameters
from lengthwise.session.guards import (
    GRADIENTS,
    WEIGHTS,
    Slice,
    by_owner,
    guarded_gradient,
    guarded_slice,
    is_guarded,
    plain,
)
from lengthwise.session.optimizers import plain_value, sliced, states_an_entry
from lengthwise.session.withheld import WithheldGradients, refuse_hooks


class ShardedInPlace:
    """An optimizer whose groups hold this rank's slices of the model's parameters, with what it kept of them so far.

    Made before the parameters are cut, and pointed at the slices by `point_at`. offloads: these are on the host,
    where they are updated by gradients that are copied there. parameters: that were cut. numbers:
    which of the optimizer's parameters, as torch counts them, each that trains is, by its name in the whole model.
    shapes: of each of them. rank: of this one among those over which `parameters` lie. edits: changes that the loop
    made to slices of gradients and of weights. clears: calls of zero_grad. has_edited_weights: some changes are not
    published. with_gradient: names of the parameters that have a gradient, as a loss of some rank has reached them
    since gradients were cleared. compare: compares the ranks, takes in what the loop did to gradients and publishes
    what it did to weights (`session.agreement`).
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
        refuse_hooks(trainable)
        self.shapes = {name: tuple(each.shape) for name, each in trainable.items()}
        self._members = [[counted[id(each)] for each in group["params"]] for group in optimizer.param_groups]
        learning = {id(each) for each in trainable.values()}  # towers may be in groups, and have no gradients
        self._frozen = {number: each for number, each in enumerate(members) if id(each) not in learning}
        self._before = {name: (tuple(each.shape), optimizer.state.get(each, {})) for name, each in trainable.items()}
        self._given = trainable
        self.edits, self.has_edited_weights, self.clears = {"gradients": 0, "weights": 0}, False, 0
        self.with_gradient = set[str]()  # names of parameters
        self._folded: tuple[int, float] | None = None  # of the model's own values, when slices took them in
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
        self._pieces = dict[str, nn.Parameter]()
        for name in self.numbers:
            run = runs.get(name)
            place = nothing if run is None else slice(run.start, run.stop)
            self._guarded[name] = guarded_slice(self, parameters.master_weights[place])
            self._gradient_of[name] = guarded_gradient(self, self._gradients[place])
            self._pieces[name] = piece = nn.Parameter(parameters.master_weights[place])
            shape, state = self._before[name]
            if state:
                entries = nothing if run is None else slice(run.entry, run.entry + run.stop - run.start)
                kept = {key: sliced(value, shape, entries) for key, value in state.items()}
                self.optimizer.state[self._guarded[name]] = {k: self._placed(v, piece) for k, v in kept.items()}
            own[self._groups[name]].append(piece)
        self._runs = list(runs.values())
        by_number = {self.numbers[name]: each for name, each in self._guarded.items()} | self._frozen
        self._lists = {True: own, False: [[by_number[number] for number in each] for each in self._members]}
        self.withheld = WithheldGradients(self._model, self._given)
        self._given, self._own = dict[str, nn.Parameter](), self.withheld.own
        self._places = {name: each.data_ptr() for name, each in self._own.items() if parameters.keeps_values}
        self._before.clear()
        self._frozen.clear()
        self._put_into_groups(self._lists[False])
        self._hook_in()
        self.withhold_gradients()

    def _hook_in(self) -> None:
        """Take part in what the loop calls of its optimizer, and in the model's backwards."""
        self.optimizer.zero_grad = self.zero_grad
        self.optimizer.register_state_dict_pre_hook(lambda *_: _refuse_slices("state_dict"))
        self.optimizer.register_load_state_dict_pre_hook(lambda *_: _refuse_slices("load_state_dict"))
        self._before_step = self.optimizer.register_step_pre_hook(self._begin_step)
        self._after_step = self.optimizer.register_step_post_hook(lambda *_: self.after_step())
        self._order_hooks()

    def _placed(self, value: Any, piece: nn.Parameter) -> Any:
        """Return what was kept of a parameter where its slice now is updated."""
        return value.to(piece.device) if self.offloads and isinstance(value, Tensor) else value

    # What the loop does to slices in the optimizer's groups.

    def before_use(self, kind: str) -> None:
        """Have the sum of the gradients where the loop reads it, and in weights what it wrote to the model's own."""
        if kind == GRADIENTS and self._is_behind:
            self._gradients.copy_(self.parameters.grad_shard)  # which waits for it
            self._is_behind = False
        elif kind == WEIGHTS and not self.has_edited_weights:
            versions = sum(each._version for each in self._own.values())
            if self._folded is None or self._folded[0] != versions:
                self.take_changes()
                self._folded = versions, self.parameters.norm_of_values()

    def changed(self, kind: str) -> None:
        """Count a change of slices."""
        self.edits[kind] += 1
        if kind == GRADIENTS:
            self._is_ahead = self.offloads
        else:
            self.has_edited_weights = True

    @by_owner
    def settle(self) -> None:
        """Take in what the loop has done to gradients since the session last ran: set, cleared or changed them.

        Raises:
            ConfigError: it gave the model's own parameters gradients, or changed what is in the optimizer's groups.
        """
        self._check_groups()
        for name in self.withheld.cleared(self.with_gradient):
            self._guarded[name].grad = None
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

    def _check_groups(self) -> None:
        groups, made = self.optimizer.param_groups, self._lists[False]
        is_same = len(groups) == len(made) and all(
            len(group["params"]) == len(own) and all(a is b for a, b in zip(group["params"], own, strict=True))
            for group, own in zip(groups, made, strict=True)
        )
        frozen = next((name for name, each in self._guarded.items() if not each.requires_grad), None)
        if not is_same or frozen is not None:
            got = "other groups, or other parameters in them" if frozen is None else f"{frozen}, which was frozen"
            expected = "the parameters, in the groups, that the session was made with, and all of them to train"
            remedy = "Close the session, then make a new optimizer and another session."
            raise ConfigError("optimizer.param_groups", expected=expected, got=got, remedy=remedy)

    @by_owner
    def withhold_gradients(self) -> None:
        """Show the loop which parameters have gradients: the model's own are out of reach, slices have theirs."""
        self.withheld.show(self.with_gradient)
        for name, guarded in self._guarded.items():
            shown = self._gradient_of[name] if name in self.with_gradient else None
            if guarded.grad is not shown:
                guarded.grad = shown

    # A backward of the session.

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Add what backwards make inside to what there is; `reach` says of which parameters.

        A backward that fails clears all gradients: what it has left of a sum is no gradient of any loss.
        """
        self.withheld.begin()
        self.parameters.keep_sum()
        self.parameters.attach_gradients()
        try:
            yield
        except BaseException:
            self.parameters.detach_gradients()
            self.zero_grad()
            raise
        self.parameters.detach_gradients()
        self.parameters.free()
        self._is_behind = self.offloads
        self.withhold_gradients()

    @property
    def num_missing(self) -> int:
        """Count the parameters here that no loss of this rank has reached since the backward began."""
        return len(self._own) - len(self.withheld.reached)

    def reach(self, names: Iterable[str]) -> None:
        """Give these parameters of the whole model gradients."""
        self.with_gradient.update(names)

    def clear(self, name: str) -> None:
        """Take its gradient from a parameter, as `settle` does where the loop has set it to None."""
        self._guarded[name].grad = None
        self.settle()

    def pending_bytes(self) -> tuple[int, int]:
        """Count the bytes of states that the optimizer has yet to make, and those that a step's end needs a while."""
        part = self.parameters.grad_shard.nbytes
        if self.offloads and self.parameters.grad_shard.is_cuda:
            return 0, max(norm_bytes(self.parameters.grad_shard), self.parameters.publish_bytes())
        states = 0 if self.optimizer.state else states_an_entry(self.optimizer)
        return states * part, max(2 * part, self.parameters.publish_bytes())

    def scale_gradients(self, factor: float) -> None:
        """Multiply the sum of the gradients."""
        self.parameters.grad_shard.mul_(factor)
        self._is_behind = self.offloads

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear all gradients of this rank: those of the slices, and those from which the slices are summed."""
        self.clears += 1
        if set_to_none:
            self.with_gradient.clear()
        else:
            self.settle()  # the loop may have set some to None
        self.parameters.clear_gradients()
        self._gradients.zero_()
        self._is_behind = self._is_ahead = False
        self.withhold_gradients()

    # A step of the optimizer, and what the loop did to weights before.

    def _begin_step(self, _: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """Prepare a step; of one with a closure, which finds guarded slices, once that has run. Collective.

        Returns:
            The arguments of the step, args[0] being the optimizer; None: as they are.
        """
        closure = options.get("closure") if len(args) < 2 else args[1]
        if closure is None:
            self.before_step()
            return None

        def run() -> Any:
            found = closure()
            with torch.no_grad():  # an optimizer calls closures with gradients
                self.before_step()
            return found

        return (args, {**options, "closure": run}) if len(args) < 2 else ((args[0], run, *args[2:]), options)

    def before_step(self) -> None:
        """Give the optimizer its slices, with the weights and gradients that the loop has left. Collective."""
        self.compare("optimizer.step")
        self.take_changes()
        self._key_states(to_pieces=True)
        self._put_into_groups(self._lists[True])
        self._give_gradients()

    def after_step(self) -> None:
        """Publish what the optimizer updated."""
        self._key_states(to_pieces=False)
        self._put_into_groups(self._lists[False])
        self.publish()

    @by_owner
    def _key_states(self, *, to_pieces: bool) -> None:
        """Keep states by the slices that are in the groups, so that a loop finds, and forgets, those of a parameter."""
        state = self.optimizer.state
        for name, piece in self._pieces.items():
            guarded = self._guarded[name]
            old, new = (guarded, piece) if to_pieces else (piece, guarded)
            if old in state:
                kept = state.pop(old)
                state[new] = {key: plain(each) if is_guarded(each) else each for key, each in kept.items()}

    def _put_into_groups(self, lists: Sequence[Sequence[nn.Parameter]]) -> None:
        """Put slices into the groups: as tensors while the optimizer steps, guarded at other times."""
        for group, members in zip(self.optimizer.param_groups, lists, strict=True):
            group["params"] = list(members)  # which the loop may change

    def _give_gradients(self) -> None:
        self.before_use(GRADIENTS)
        for name, piece in self._pieces.items():
            piece.grad = plain(self._gradient_of[name]) if name in self.with_gradient else None

    def take_changes(self) -> None:
        """Take what the loop wrote into whole parameters since the last step.

        Raises:
            ConfigError: a parameter has other data than it had, whose values the slices would miss.
        """
        moved = [name for name, place in self._places.items() if self._own[name].data_ptr() != place]
        if moved:
            expected, got = "its .data in place, as the session laid it out", f"another tensor, {len(moved)} in all"
            remedy = "Write p.data.copy_(values) instead of p.data = values, or put the first .data back."
            raise ConfigError(f"parameter {moved[0]}", expected=expected, got=got, remedy=remedy)
        self.parameters.take_changes()

    def publish(self) -> None:
        """Give all ranks the weights of the slices. Collective."""
        self.parameters.publish()
        self.has_edited_weights, self._folded = False, None

    def has_edited_both(self) -> bool:
        """Return whether the loop wrote to the model's own values after it had changed or read slices."""
        return self._folded is not None and self._folded[1] != self.parameters.norm_of_values()

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
        """Let the loop's own hooks of a step, whenever it registers them, find guarded slices."""
        optimizer: Any = self.optimizer  # torch has no method for the order of hooks
        register = optimizer.register_step_pre_hook

        def register_before(hook: Any) -> Any:
            handle = register(hook)
            optimizer._optimizer_step_pre_hooks.move_to_end(self._before_step.id)
            return handle

        optimizer.register_step_pre_hook = register_before
        optimizer._optimizer_step_pre_hooks.move_to_end(self._before_step.id)
        optimizer._optimizer_step_post_hooks.move_to_end(self._after_step.id, last=False)

    def release(self) -> None:
        """Leave the model's gradients to a plain loop, and let the optimizer refuse steps."""
        self.withheld.release()
        self._before_step.remove()
        vars(self.optimizer).pop("register_step_pre_hook")
        self.with_gradient.clear()
        self.withhold_gradients()

    def states(self) -> Iterator[tuple[Run, dict[str, Any]]]:
        """Yield what the optimizer keeps of each slice."""
        for run in self._runs:
            yield run, self.optimizer.state[self._guarded[self.parameters.names[run.parameter]]]

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
        name = self.parameters.names[parameter]
        group, piece = self.optimizer.param_groups[self._groups[name]], self._pieces[name]
        for run in self._runs:
            if run.parameter == parameter:
                entries = slice(run.entry, run.entry + run.stop - run.start)
                counts_on = piece.device if group.get("fused") or group.get("capturable") else "cpu"
                self.optimizer.state[self._guarded[name]] = {
                    key: value[entries].to(piece.device, copy=True) if value.dim() else value.to(counts_on, copy=True)
                    for key, value in states.items()
                }


def _refuse_slices(name: str) -> None:
    got, remedy = f"optimizer.{name}, which has this rank's slices only", f"Call session.{name}."
    raise ConfigError(f"optimizer.{name}", expected=f"session.{name}", got=got, remedy=remedy)
