"""A loop's own optimizer on this rank's slices of the master weights.

The loop keeps its optimizer object: schedulers change its groups, `step` updates the slices, and a hook then publishes
them to all ranks. `LoopOptimizer` owns the sum of the gradients over the ranks, from the end of a backward until the
loop clears it. While the optimizer steps, its groups hold slices as plain tensors. At all other times they hold guarded
ones (`session.guards`), one for each parameter in the loop's order, so that the loop's changes are counted and can be
compared between ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from lengthwise.core.errors import ConfigError
from lengthwise.engine.optimizer import SlicedOptimizer
from lengthwise.engine.parameters import Parameters
from lengthwise.engine.units import let_go
from lengthwise.engine.whole_optimizer import WholeOptimizer
from lengthwise.models import whole_model
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
from lengthwise.session.withheld import WithheldGradients


class LoopOptimizer(SlicedOptimizer):
    """A loop's own optimizer on slices, and the loop's changes of groups and gradients between steps.

    edits: number of changes that the loop made to slices of gradients and of weights. clears: calls of zero_grad.
    has_edited_weights: whether changes of weights are not published yet. with_gradient: names of the parameters with a
    gradient: a loss of some rank has reached them since gradients were cleared. compare: compares the ranks, takes the
    loop's changes of gradients and publishes its changes of weights (`session.agreement`).
    """

    compare: Callable[[str], object]

    def __init__(
        self, whole: WholeOptimizer, parameters: Parameters, rank: int, model: nn.Module, *, offloads: bool
    ) -> None:
        super().__init__(whole, parameters, rank, offloads=offloads)
        self.edits, self.has_edited_weights, self.clears = {"gradients": 0, "weights": 0}, False, 0
        self.with_gradient = set[str]()  # names of parameters
        self._folded: tuple[int, float] | None = None  # version and norm of the model's values that the slices have
        self._is_ahead = False  # whether gradients on the host are newer than those on the device
        self._guarded, self._gradient_of = dict[str, Slice](), dict[str, Tensor]()
        for name in self.numbers:
            place = slice(self._runs[name].start, self._runs[name].stop)
            self._guarded[name] = guarded_slice(self, parameters.master_weights[place])
            self._gradient_of[name] = guarded_gradient(self, self._gradients[place])
        by_number = {self.numbers[name]: each for name, each in self._guarded.items()} | dict(whole.frozen)
        self._shown = [[by_number[number] for number in each] for each in self._members]
        there = {id(each) for each in whole_model(model).parameters()}
        for each in whole.frozen.values():
            if id(each) not in there:  # its values are sharded, or on another stage
                let_go(each)
        self.withheld = WithheldGradients(model, whole.given)
        self._own = self.withheld.own
        self._places = {name: each.data_ptr() for name, each in self._own.items() if parameters.keeps_values}
        self._key_states(to_pieces=False)
        self._show()
        self._hook_in()
        self.withhold_gradients()

    def _key(self, name: str) -> Tensor:
        return self._guarded[name]

    def _show(self) -> None:
        """Put guarded slices, and parameters that do not train, into the groups."""
        for group, members in zip(self.optimizer.param_groups, self._shown, strict=True):
            group["params"] = list(members)  # the loop may change the list

    def _hook_in(self) -> None:
        """Replace or hook the methods of the optimizer that the loop calls."""
        self.optimizer.zero_grad = self.zero_grad
        self.optimizer.register_state_dict_pre_hook(lambda *_: _refuse_slices("state_dict"))
        self.optimizer.register_load_state_dict_pre_hook(lambda *_: _refuse_slices("load_state_dict"))
        self._before_step = self.optimizer.register_step_pre_hook(self._begin_step)
        self._after_step = self.optimizer.register_step_post_hook(lambda *_: self.after_step())
        self._order_hooks()

    # What the loop does to slices in the optimizer's groups.

    def before_use(self, kind: str) -> None:
        """Bring the sum of gradients to the slices, or the values that the loop wrote to the model's parameters."""
        if kind == GRADIENTS:
            self._bring_gradients()
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
            self.parameters.take_sum()
        else:
            self.has_edited_weights = True

    @by_owner
    def settle(self) -> None:
        """Take the loop's changes of gradients since the session last ran: set, cleared or edited ones.

        Raises:
            ConfigError: the loop gave the model's own parameters gradients, or changed the members of groups.
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
        groups, made = self.optimizer.param_groups, self._shown
        is_same = len(groups) == len(made) and all(
            len(group["params"]) == len(own) and all(a is b for a, b in zip(group["params"], own, strict=True))
            for group, own in zip(groups, made, strict=True)
        )
        frozen = next((name for name, each in self._guarded.items() if not each.requires_grad), None)
        if not is_same or frozen is not None:
            got = "other groups, or other parameters in them" if frozen is None else f"a frozen parameter, {frozen}"
            expected = "the groups and parameters that the session was made with, all of them trainable"
            remedy = "Close the session, then make a new optimizer and another session."
            raise ConfigError("optimizer.param_groups", expected=expected, got=got, remedy=remedy)

    @by_owner
    def withhold_gradients(self) -> None:
        """Show the loop which parameters have gradients: stand-ins in the model, slices in the optimizer's groups."""
        self.withheld.show(self.with_gradient)
        for name, guarded in self._guarded.items():
            shown = self._gradient_of[name] if name in self.with_gradient else None
            if guarded.grad is not shown:
                guarded.grad = shown

    # A backward of the session.

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Add the gradients of backwards inside the block; call `reach` then with the parameters that have some."""
        self.withheld.begin()
        with super().collecting():
            yield
        self.withhold_gradients()

    @property
    def num_missing(self) -> int:
        """Count the parameters here that no loss of this rank has reached since the backward began."""
        return len(self._own) - len(self.withheld.reached)

    def reach(self, names: Iterable[str]) -> None:
        """Note that these parameters of the whole model have gradients."""
        self.with_gradient.update(names)

    def clear(self, name: str) -> None:
        """Clear a parameter's gradient, as `settle` does if the loop has set it to None."""
        self._guarded[name].grad = None
        self.settle()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear all gradients of this rank: of the slices, and of the parameters they are summed from."""
        self.clears += 1
        if set_to_none:
            self.with_gradient.clear()
        else:
            self.settle()  # the loop may have set some to None
        super().zero_grad()
        self._is_ahead = False
        self.withhold_gradients()

    # A step of the optimizer, and the loop's changes of weights before it.

    def _begin_step(self, _: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """Prepare a step: at once, or after its closure, which sees guarded slices. Collective.

        Returns:
            New arguments of the step, of which args[0] is the optimizer, or None to keep them.
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
        """Give the optimizer its slices, with the loop's changes of weights and gradients. Collective."""
        self.compare("optimizer.step")
        self.take_changes()
        self._key_states(to_pieces=True)
        self._put_into_groups(self._pieces)
        self._give_gradients(self.with_gradient)

    def after_step(self) -> None:
        """Publish the updated weights. Collective."""
        self._key_states(to_pieces=False)
        self._show()
        self.publish()

    @by_owner
    def _key_states(self, *, to_pieces: bool) -> None:
        """Key the optimizer's states by the slices in the groups, where a loop finds and deletes them."""
        state = self.optimizer.state
        for name, piece in self._pieces.items():
            guarded = self._guarded[name]
            old, new = (guarded, piece) if to_pieces else (piece, guarded)
            if old in state:
                kept = state.pop(old)
                state[new] = {key: plain(each) if is_guarded(each) else each for key, each in kept.items()}

    def take_changes(self) -> None:
        """Copy values that the loop wrote into whole parameters since the last step to the slices.

        Raises:
            ConfigError: a parameter's .data is another tensor, whose values the slices would miss.
        """
        moved = [name for name, place in self._places.items() if self._own[name].data_ptr() != place]
        if moved:
            expected, got = "its .data in place, as the session laid it out", f"another tensor, {len(moved)} in all"
            remedy = "Write p.data.copy_(values) instead of p.data = values, or put the first .data back."
            raise ConfigError(f"parameter {moved[0]}", expected=expected, got=got, remedy=remedy)
        super().take_changes()

    def publish(self) -> None:
        """Send the weights of the slices to all ranks. Collective."""
        super().publish()
        self.has_edited_weights, self._folded = False, None

    def has_edited_both(self) -> bool:
        """Return whether the loop wrote to the model's own values after it had changed or read slices."""
        return self._folded is not None and self._folded[1] != self.parameters.norm_of_values()

    def refuse_unpublished(self) -> None:
        """Refuse a use of the model's own values while slices are newer.

        Raises:
            ConfigError: the loop has changed slices since they were published.
        """
        if self.has_edited_weights:
            expected = "weights that all ranks have"
            got = "changes to slices in optimizer.param_groups, which the session sends when it next runs"
            remedy = "Call session.evaluate or another of its methods first, on all ranks."
            raise ConfigError("model", expected=expected, got=got, remedy=remedy)

    def _order_hooks(self) -> None:
        """Let the loop's own hooks of a step see guarded slices, whenever they are registered."""
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
        """Remove stand-ins and hooks from the model's parameters and the optimizer."""
        self.withheld.release()
        self._before_step.remove()
        vars(self.optimizer).pop("register_step_pre_hook")
        self.with_gradient.clear()
        self.withhold_gradients()


def _refuse_slices(name: str) -> NoReturn:
    got, remedy = f"optimizer.{name}, which sees only this rank's slices", f"Call session.{name}."
    raise ConfigError(f"optimizer.{name}", expected=f"session.{name}", got=got, remedy=remedy)
