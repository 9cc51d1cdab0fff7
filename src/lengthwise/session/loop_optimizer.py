"""A loop's own optimizer on this rank's slices of the master weights.

The loop keeps its optimizer object: schedulers change its groups, `step` updates the slices, and a hook then publishes
them to all ranks. `LoopOptimizer` owns the sum of the gradients over the ranks, from the end of a backward until the
loop clears it. The optimizer's groups hold slices, one for each parameter in the loop's order. While the optimizer
steps they are plain parameters; at all other times they take operations by entry only (`session.guards`). What the loop
changed shows in autograd's count of changes in place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import nn

from lengthwise.core.errors import ConfigError
from lengthwise.engine.optimizer import SlicedOptimizer
from lengthwise.engine.parameters import Parameters
from lengthwise.engine.units import let_go
from lengthwise.engine.whole_optimizer import MEMBERS, WholeOptimizer
from lengthwise.models import whole_model
from lengthwise.session.guards import SliceOfParameter, guarded
from lengthwise.session.withheld import WithheldGradients


class LoopOptimizer(SlicedOptimizer):
    """A loop's own optimizer on slices, and the loop's changes of groups and gradients between steps.

    edits: number of changes that the loop made to gradients. with_gradient: names of the parameters with a gradient: a
    loss of some rank has reached them since gradients were cleared. compare: function that compares the ranks, takes
    the loop's changes of gradients and publishes its changes of weights (`session.agreement`).
    """

    compare: Callable[[str], object]

    def __init__(
        self, whole: WholeOptimizer, parameters: Parameters, rank: int, model: nn.Module, *, offloads: bool
    ) -> None:
        super().__init__(whole, parameters, rank, offloads=offloads)
        self.edits = 0
        self.with_gradient = set[str]()  # names of parameters
        self._seen_gradients = self._seen_weights = 0  # versions of both with the session's own changes
        self._norm: float | None = None  # of the model's values when the loop first used the weights of a slice
        self._gradient_of = {
            name: guarded(self._gradients[run.start : run.stop], self._bring_gradients)
            for name, run in self._runs.items()
        }
        by_number = {self.numbers[name]: each for name, each in self._pieces.items()} | dict(whole.frozen)
        self._shown = [[by_number[number] for number in each] for each in self._members]
        there = {id(each) for each in whole_model(model).parameters()}
        for each in whole.frozen.values():
            if id(each) not in there:  # its values are sharded, or on another stage
                let_go(each)
        self.withheld = WithheldGradients(model, whole.given)
        self._own = self.withheld.own
        self._places = {name: each.data_ptr() for name, each in self._own.items() if parameters.keeps_values}
        for group, members in zip(self.optimizer.param_groups, self._shown, strict=True):
            group[MEMBERS] = list(members)  # the loop may change the list
        self._hook_in()
        self.withhold_gradients()
        self.see_weights()

    def _hook_in(self) -> None:
        self.optimizer.zero_grad = self.zero_grad
        self.optimizer.register_state_dict_pre_hook(lambda *_: _refuse_slices("state_dict", "save"))
        self.optimizer.register_load_state_dict_pre_hook(lambda *_: _refuse_slices("load_state_dict", "load"))
        self._before_step = self.optimizer.register_step_pre_hook(self._begin_step)
        self._after_step = self.optimizer.register_step_post_hook(lambda *_: self.after_step())
        self._order_hooks()

    # What the loop does to slices in the optimizer's groups.

    @property
    def num_weight_edits(self) -> int:
        """Count the changes of weights of slices that are not published yet."""
        return self.parameters.master_weights._version - self._seen_weights

    @property
    def has_edited_weights(self) -> bool:
        """Whether changes of weights are not published yet."""
        return self.num_weight_edits > 0

    def see_weights(self) -> None:
        """Count changes of weights from here."""
        self._seen_weights, self._norm = self.parameters.master_weights._version, None

    def has_edited_both(self) -> bool:
        """Return whether the loop wrote to the model's own values, such as by `.data`, after it used slices."""
        return self._norm is not None and self._norm != self.parameters.norm_of_values()

    def _bring_weights(self) -> None:
        if self._norm is None:  # what the loop wrote to the model before
            self.take_changes()
            self._norm = self.parameters.norm_of_values()

    def _bring_gradients(self) -> None:
        if self._is_behind:  # then the loop has changed none since
            super()._bring_gradients()
            self._seen_gradients = self._gradients._version

    def settle(self) -> None:
        """Take the loop's changes of gradients since the session last ran: set, cleared or edited ones.

        Raises:
            ConfigError: the loop gave the model's own parameters gradients, or changed the members of groups.
        """
        self._check_groups()
        with torch._C.DisableTorchFunctionSubclass():
            for name in self.withheld.cleared(self.with_gradient):
                self._pieces[name].grad = None
            for name, piece in self._pieces.items():
                found, own = piece.grad, self._gradient_of[name]
                if found is (own if name in self.with_gradient else None):
                    continue
                if found is not own:
                    self._bring_gradients()
                    own.detach().zero_() if found is None else own.detach().copy_(found.detach())
                (self.with_gradient.discard if found is None else self.with_gradient.add)(name)
        if self._gradients._version != self._seen_gradients:
            self.edits += self._gradients._version - self._seen_gradients
            self.parameters.take_sum()
            if self.offloads:
                self.parameters.grad_shard.copy_(self._gradients)
        self.withhold_gradients()

    def _check_groups(self) -> None:
        groups, made = self.optimizer.param_groups, self._shown
        is_same = len(groups) == len(made) and all(
            len(group["params"]) == len(own) and all(a is b for a, b in zip(group["params"], own, strict=True))
            for group, own in zip(groups, made, strict=True)
        )
        frozen = next((name for name, each in self._pieces.items() if not each.requires_grad), None)
        if not is_same or frozen is not None:
            got = "other groups, or other parameters in them" if frozen is None else f"a frozen parameter, {frozen}"
            expected = "the groups and parameters that the session was made with, all of them trainable"
            remedy = "Close the session, then make a new optimizer and another session."
            raise ConfigError("optimizer.param_groups", expected=expected, got=got, remedy=remedy)

    def withhold_gradients(self) -> None:
        """Show the loop which parameters have gradients: stand-ins in the model, slices in the optimizer's groups."""
        self.withheld.show(self.with_gradient)
        with torch._C.DisableTorchFunctionSubclass():
            for name, piece in self._pieces.items():
                piece.__class__ = SliceOfParameter
                vars(piece)["bring"] = self._bring_weights
                shown = self._gradient_of[name] if name in self.with_gradient else None
                if piece.grad is not shown:
                    piece.grad = shown
        self._seen_gradients = self._gradients._version

    # A backward of the session.

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Add the gradients of backwards inside the block; then call `reach` with the parameters that got some."""
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
        self._pieces[name].grad = None
        self.settle()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear all gradients of this rank: of the slices, and of the parameters they are summed from."""
        self.edits += 1
        if set_to_none:
            self.with_gradient.clear()
        else:
            self.settle()  # the loop may have set some to None
        super().zero_grad()
        self.withhold_gradients()

    # A step of the optimizer, and the loop's changes of weights before it.

    def _begin_step(self, _: Any, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        if (args[1] if len(args) > 1 else options.get("closure")) is not None:
            remedy = "Call session.backward before optimizer.step()."
            raise ConfigError("optimizer.step", expected="no closure", got="a closure", remedy=remedy)
        self.before_step()

    def before_step(self) -> None:
        """Give the optimizer plain slices, with the loop's changes of weights and gradients. Collective."""
        self.compare("optimizer.step")
        self.take_changes()
        for piece in self._pieces.values():
            piece.__class__ = nn.Parameter
        self._give_gradients(self.with_gradient)

    def after_step(self) -> None:
        """Publish the updated weights. Collective."""
        self.withhold_gradients()
        self.publish()

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
        edits = self.num_weight_edits
        super().take_changes()
        self._seen_weights = self.parameters.master_weights._version - edits

    def take_values(self) -> None:
        """Copy all values of the model to the slices, as after a load."""
        edits = self.num_weight_edits
        self.parameters.take_values()
        self._seen_weights = self.parameters.master_weights._version - edits

    def publish(self) -> None:
        """Send the weights of the slices to all ranks. Collective."""
        super().publish()
        self.see_weights()

    def refuse_unpublished(self) -> None:
        """Refuse a use of the model's own values while slices have newer ones, which are not published."""
        if self.has_edited_weights:
            expected = "weights that all ranks have"
            got = "changes to slices in optimizer.param_groups, which the session sends when it next runs"
            remedy = "Call session.evaluate or another of its methods first, on all ranks."
            raise ConfigError("model", expected=expected, got=got, remedy=remedy)

    def _order_hooks(self) -> None:
        """Let the loop's own hooks of a step see slices that are guarded, whenever they are registered."""
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


def _refuse_slices(name: str, method: str) -> NoReturn:
    got = f"optimizer.{name}, which sees only this rank's slices"
    remedy = f"Call session.{method}; `lengthwise checkpoint export` makes a plain state of what it saved."
    raise ConfigError(f"optimizer.{name}", expected=f"session.{method}", got=got, remedy=remedy)
