"""Gather and reduce the units of a model while it runs: all ranks run the same waves, in `wave_order`.

A wave is one forward of the model, and its backward if there is one. Hooks of torch follow the units:

- before the model a new wave begins; before a layer, or a module outside of layers, forward enters its unit;
- when backward has the gradient of a layer's output, it enters that layer: before any part of the layer runs, and
  before it is recomputed (`models.checkpointing`), which gathers nothing;
- at the end of a backward the remaining calls of the wave are posted, for units that it did not reach.

The chunked loss runs the head any number of times, so the head's unit stays from its forward to the end of its
backward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lengthwise.comm import Transport
from lengthwise.core.errors import ModelRefused
from lengthwise.engine.units import ModelUnit, UnitPart
from lengthwise.engine.wave_order import END, GATHER, CallKey, UnitCall, backward_calls, forward_calls
from lengthwise.models.adapter import in_planned_forward


class Waves:
    """The units of a model on one rank, with their parts; hooks of the model call it.

    made: function that is called with every part whose sum of a wave has been added.
    """

    def __init__(
        self,
        model: nn.Module,
        units: Sequence[ModelUnit],
        parts: Sequence[Sequence[UnitPart]],
        transport: Transport,
        *,
        made: Callable[[UnitPart], None] = lambda _: None,
    ) -> None:
        self._model, self._units, self._parts, self._transport, self._made = model, units, parts, transport, made
        kinds = [unit.kind for unit in units]
        self._forward, self._backward = forward_calls(kinds), backward_calls(kinds)
        self.is_off = False  # the model has whole parameters for now, and a rank runs it alone
        self._wave, self._is_backward = 0, False
        self._entered = -1  # in forward the current unit; in backward the number of units entered
        self._held: set[int] = set()  # units gathered or being gathered, and not freed
        self._there: set[int] = set()  # those of them whose values have arrived
        self._summed: UnitPart | None = None  # the part that is being summed
        model.register_forward_pre_hook(lambda *_: self._begin())
        model.register_forward_hook(lambda *_: self._end_forward())
        for number, unit in enumerate(units):
            for module in unit.enters:
                module.register_forward_pre_hook(partial(self._enter, number))
            if unit.kind.again:
                unit.enters[0].register_forward_hook(partial(self._await_gradient, number))
            for part in parts[number] if not unit.kind.again else ():  # layers begin a backward by their outputs
                for parameter in part.parameters if part.trains else ():
                    parameter.register_post_accumulate_grad_hook(self._begin_backward)
        self._connect()

    def _connect(self) -> None:
        """Gather and sum a unit of each size before any transfer: the first call may connect ranks. Collective."""
        sizes = {part.size: part for of_unit in self._parts for part in of_unit}
        for part in sizes.values():
            part.gather(self._transport, None)
            part.free()
            if part.trains:
                part.reduce(self._transport, None)
                part.add_sum()

    def let_go(self) -> None:
        """Free all units."""
        self._free_from(0)

    def _begin(self) -> None:
        """Begin a wave; free the units of an earlier one without a backward."""
        if self.is_off:
            return
        self._refuse_alone()
        self.let_go()
        self._wave, self._entered, self._is_backward = self._wave + 1, -1, False

    def _enter(self, number: int, module: nn.Module, _inputs: object) -> None:
        """Gather a unit's values before a module of it runs."""
        if self.is_off or number in self._there:
            return
        if self._is_backward:
            self._enter_backward(number)
        elif number > self._entered:
            self._refuse_alone()
            self._enter_forward(number)
        if number not in self._there:
            where, expected = f"model {type(self._model).__name__}", "modules that run once, in the model's order"
            got = f"{self._units[number].kind.name} again, or late, by a {type(module).__name__}"
            raise ModelRefused(where, expected=expected, got=got, remedy="Set shard: zero1.")

    def _refuse_alone(self) -> None:
        """Refuse a forward outside of planned steps, before this rank waits in a gather for the others."""
        if not in_planned_forward():
            where = f"forward of {type(self._model).__name__}"
            expected = "a forward inside a planned step, which all ranks run: parameters lie over the ranks"
            remedy = "Use the session's evaluate or token_values, or run the model inside its whole() on all ranks."
            raise ModelRefused(where, expected=expected, got="a forward outside of a step", remedy=remedy)

    def _enter_forward(self, number: int) -> None:
        for entered in range(self._entered + 1, number + 1):
            if entered and not self._units[entered - 1].kind.stays:
                self._free(entered - 1)
                torch.clear_autocast_cache()  # it would keep casts of all units to the step's end
            self._post(self._forward[entered], entered)
            self._wait(entered)
            self._entered = entered

    def _end_forward(self) -> None:
        """Enter the remaining units, and free those that do not stay."""
        if self.is_off:
            return
        self._enter_forward(len(self._units) - 1)
        for number, unit in enumerate(self._units):
            if not unit.kind.stays:
                self._free(number)

    def _await_gradient(self, number: int, _module: nn.Module, _inputs: object, output: Any) -> None:
        """Let backward enter a layer when it has the gradient of the layer's output."""
        if self._is_backward:
            return
        hidden = output[0] if isinstance(output, (tuple, list)) else output
        if isinstance(hidden, Tensor) and hidden.requires_grad:
            hidden.register_hook(partial(self._reach, self._wave, number))

    def _reach(self, wave: int, number: int, _gradient: Tensor) -> None:
        assert wave == self._wave, f"backward of wave {wave} after the forward of wave {self._wave}"
        self._enter_backward(number)
        assert number in self._there, f"backward of {self._units[number].kind.name} after that of a unit before it"

    def _begin_backward(self, _parameter: Tensor | None = None) -> None:
        """Finish the wave when this backward ends."""
        if not self._is_backward:
            self._is_backward, self._entered = True, 0
            engine: Any = torch.autograd.Variable._execution_engine
            engine.queue_callback(self._end_backward)

    def _enter_backward(self, number: int) -> None:
        self._begin_backward()
        while self._entered < len(self._backward) and number not in self._there:
            self._enter_next()

    def _end_backward(self) -> None:
        while self._entered < len(self._backward):
            self._enter_next()
        self._add_sum()

    def _enter_next(self) -> None:
        """Let backward enter the next unit, and free those after it."""
        entered, calls = self._backward[self._entered]
        self._free_from(entered + 1)
        self._post(calls, self._entered)
        if entered != END:
            self._wait(entered)
        self._entered += 1

    def _post(self, calls: Sequence[UnitCall], entry: int) -> None:
        parts = [(kind, number, part) for kind, number in calls for part in self._parts[number]]
        for place, (kind, number, part) in enumerate(parts):
            key = CallKey(self._wave, self._is_backward, entry, place, kind, self._units[number].kind.name)
            if kind == GATHER:
                self._held.add(number)
                part.gather(self._transport, key)
            elif part.trains:
                self._add_sum()  # only one unit at a time has gradients in the wide dtype
                part.reduce(self._transport, key)
                self._summed = part

    def _add_sum(self) -> None:
        if self._summed is not None:
            self._summed.add_sum()
            self._made(self._summed)
            self._summed = None

    def _wait(self, number: int) -> None:
        for part in self._parts[number]:
            part.wait()
        self._there.add(number)

    def _free_from(self, first: int) -> None:
        for number in sorted(each for each in self._held if each >= first):
            self._free(number)

    def _free(self, number: int) -> None:
        if number in self._held:
            for part in self._parts[number]:
                part.free()
            self._held.discard(number)
            self._there.discard(number)
