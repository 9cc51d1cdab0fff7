"""Compare the ranks of a session before they run: a loop may have done something on one rank alone, by mistake.

One small gather of digests. Then weights that the loop changed through the optimizer's groups are published, and both
copies of a tied weight, which lie on two stages, get the same values.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lengthwise.comm import Transport, share_numbers
from lengthwise.core.errors import ConfigError, RankError
from lengthwise.engine.stage_share import StageShare
from lengthwise.engine.step import RankResult
from lengthwise.models.modules import modules_of
from lengthwise.models.router import asked_coefficient
from lengthwise.session.engine import Engine
from lengthwise.session.loop_optimizer import LoopOptimizer
from lengthwise.session.runner import StepEnd
from lengthwise.session.user_loop import hook_until_closed

_CALL = "call of the session"
_GIVEN = 2  # compared arguments of a call; all compare as many numbers, or gloo would end a rank that calls another
_BITS = 48  # bits of a digest or of flags in one number, exact in fp64
_GROUPS = "arguments of the optimizer's groups, such as learning rates"
_SLICES = "changes to slices in optimizer.param_groups, and calls of zero_grad"
_VALUES = "changes to the model's own parameters"
_GRADIENTS = "parameters that have a gradient"
_MODE = "mode of the model, as train() and eval() set it"
_BALANCE = "balance loss of the routers"
_DROPOUT = "dropout"
_OF_STAGE = (_VALUES, _SLICES, _GRADIENTS, _DROPOUT)  # a stage has some of the parameters and layers
_OWN = 6  # numbers of a rank before its digests


class Agreement:
    """Compares the ranks of a session. updates: the loop's own optimizer; None in a session that only evaluates."""

    def __init__(
        self, model: nn.Module, transport: Transport, updates: LoopOptimizer | None, closing: ExitStack, engine: Engine
    ) -> None:
        self._transport, self._updates, self._model = transport, updates, model
        self._stage = None if engine.parameters is None else engine.parameters.stage
        self._parameters = dict(model.named_parameters())
        self._dropout = [each for each in modules_of(model) if isinstance(each, nn.Dropout)]
        self._versions = self._counted()
        self._leave_out_forwards(closing)

    def _leave_out_forwards(self, closing: ExitStack) -> None:
        """Do not count what peft does to a parameter in a forward of its wrapper, as to the experts of a mixture.

        It swaps the parameter and puts it back, which autograd counts; ranks run different numbers of forwards.
        """
        names = {id(each): name for name, each in self._parameters.items()}
        for wrapper in (each for each in modules_of(self._model) if type(each).__name__ == "ParamWrapper"):
            parameter: Any = wrapper.get_param()  # type: ignore[operator]
            name, before = names[id(parameter)], list[int]()

            def begin(parameter: Tensor = parameter, before: list[int] = before) -> None:
                before.append(parameter._version)

            def end(parameter: Tensor = parameter, before: list[int] = before, name: str = name) -> None:
                self._versions[name] += parameter._version - before.pop()

            hook_until_closed(wrapper.register_forward_pre_hook, begin, self._model, closing)
            register = partial(wrapper.register_forward_hook, always_call=True)
            hook_until_closed(register, end, self._model, closing)

    def _counted(self) -> dict[str, int]:
        """Return how often each parameter was changed in place, by autograd's count."""
        return {name: parameter._version for name, parameter in self._parameters.items()}

    def reach(self, name: str, *, allows: bool = True, **given: Any) -> bool:
        """Compare the ranks and their arguments before they run `name`; then publish the loop's changes. Collective.

        given: numbers and texts among the arguments of `name`.

        Returns:
            Whether `allows` is true on all ranks.

        Raises:
            RankError: a rank's calls differ from those of rank 0.
            ConfigError: weights were changed in two ways at once.
        """
        updates, now, wrong = self._updates, self._counted(), None
        if updates is not None:
            try:
                updates.settle()
            except ConfigError as error:  # raised once no rank waits for this one
                wrong = error
        changed = {each: count - self._versions[each] for each, count in now.items() if count != self._versions[each]}
        did: dict[str, Any] = {_CALL: name, _VALUES: changed, _MODE: self._model.training}
        did[_BALANCE] = asked_coefficient(self._model)
        did[_DROPOUT] = [(each.p, each.training) for each in self._dropout]
        did |= {key: each if isinstance(each, str | None) else float(each) for key, each in given.items()}
        did |= {f"argument {number}": None for number in range(len(given), _GIVEN)}
        if updates is not None:
            did |= {_SLICES: (updates.edits, updates.num_weight_edits), _GROUPS: updates.arguments()}
            did[_GRADIENTS] = sorted(updates.with_gradient)
        self._transport.phase = f"{name}, comparing the ranks"
        tied = None if self._stage is None else self._stage.tied
        is_tied = tied is not None and any(self._parameters[each] is tied for each in changed)
        norm = 0.0 if self._stage is None else self._stage.tied_norm()
        tied_name = ""
        if updates is not None and tied is not None and tied.requires_grad:
            tied_name = updates.withheld.name_of(tied)
        without = updates is not None and tied_name not in {"", *updates.with_gradient}
        is_both = updates is not None and updates.has_edited_weights and (bool(changed) or updates.has_edited_both())
        own = [float(wrong is not None), float(is_tied), norm, float(without), float(is_both), float(allows)]
        assert len(own) == _OWN, own
        rows = share_numbers(self._transport, [*own, *map(_digest, did.values())])
        if wrong is not None:
            raise wrong
        self._refuse_others(rows, did)
        if updates is not None and tied_name and rows[:, 3].any() and not without:
            updates.clear(tied_name)  # by its other name, on the other stage
        if rows[:, 4].any():
            expected, got = "changes through optimizer.param_groups, or to the model's parameters", "both at once"
            raise ConfigError("weights", expected=expected, got=got, remedy="Change them in one of the two ways.")
        if updates is not None and updates.has_edited_weights:
            updates.publish()
        else:
            if self._stage is not None:
                self._share_tied(self._stage, rows[:, 1], rows[:, 2])
            if updates is not None and (changed or rows[:, 1].any()):
                updates.take_changes()  # before the loop changes slices
        if updates is not None:
            updates.see_weights()  # a tied weight's copy is another change
        self._versions = self._counted()
        return bool(rows[:, 5].all())

    def _refuse_others(self, rows: Tensor, did: Mapping[str, Any]) -> None:
        """Raise on all ranks if a digest differs from that of the first rank with the same parameters."""
        where = f"rank {self._transport.rank}, {self._transport.phase}"
        if rows[:, 0].any():
            got = f"an error on rank {int(rows[:, 0].argmax())}"
            raise RankError(where, expected="no error on any rank", got=got, remedy="Read that rank's own message.")
        stages = 1 if self._stage is None else self._stage.mesh.stages
        for column, (what, own) in enumerate(did.items(), start=_OWN):
            apart = stages if what in _OF_STAGE else 1
            others = [rank for rank in range(len(rows)) if rows[rank, column] != rows[rank % apart, column]]
            if others:
                ranks = f"rank{'s' * (len(others) > 1)} {', '.join(map(str, others[:10]))}"
                got = f"others on {ranks}; on this rank {own}"[:400]
                remedy = "Let every rank run the same loop, with the same settings."
                raise RankError(where, expected=f"the same {what} on all ranks", got=got, remedy=remedy)

    def _share_tied(self, stage: StageShare, changed: Tensor, norms: Tensor) -> None:
        """Copy a tied weight from the stage where the loop changed it to the other, if they differ."""
        stages = stage.mesh.stages
        first, last = norms[::stages], norms[stages - 1 :: stages]
        if torch.allclose(first, last, rtol=0.0, atol=0.0, equal_nan=True):
            return
        from_first, from_last = bool(changed[::stages].any()), bool(changed[stages - 1 :: stages].any())
        if from_first == from_last:
            expected, got = "one change of a tied weight", "copies that differ on the first and the last stage"
            remedy = "Change the embedding's weight alone, and not its .data, whose changes are not counted."
            raise ConfigError("weights", expected=expected, got=got, remedy=remedy)
        stage.share_tied(from_first=from_first)


def _digest(did: object) -> float:
    text = json.dumps(did, sort_keys=True, default=_shown).encode()
    return float(int.from_bytes(hashlib.sha256(text).digest()[: _BITS // 8], "big"))


def _shown(value: object) -> object:
    """Return a form of a group's argument that is the same on all ranks: a repr may contain an address."""
    return value.tolist() if isinstance(value, Tensor) else type(value).__name__


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionNumbers(RankResult):
    """The numbers of a rank. missing: number of parameters that no loss of this rank has reached."""

    missing: float


@dataclass(kw_only=True)
class SessionStepEnd(StepEnd):
    """The end of a step in a user's loop: ranks share which parameters the losses have reached."""

    updates: LoopOptimizer
    transport: Transport
    stages: int

    def numbers(self, step: int, own: RankResult) -> SessionNumbers:
        """Add the number of parameters that no loss of this rank has reached."""
        del step
        return SessionNumbers(**asdict(own), missing=self.updates.num_missing)

    def receive(self, step: int, ranks: Sequence[Any]) -> None:
        """Give a gradient to every parameter that a loss has reached on any rank, as in a plain loop. Collective.

        In nearly all steps one rank has reached all, and the numbers of the step's end suffice.
        """
        missing = [rank.missing for rank in ranks]
        if all(min(missing[stage :: self.stages]) == 0 for stage in range(self.stages)):
            self.updates.reach(self.updates.numbers)
            return
        names = list(self.updates.numbers)
        bits = "".join("01"[name in self.updates.withheld.reached] for name in names)
        numbers = [float(int(bits[first : first + _BITS], 2)) for first in range(0, len(bits), _BITS)]
        self.transport.phase = f"step {step}, sharing which parameters the losses reached"
        for row in share_numbers(self.transport, numbers).tolist():
            of_rank = "".join(
                f"{int(number):0{min(_BITS, len(bits) - first)}b}"
                for number, first in zip(row, range(0, len(bits), _BITS), strict=True)
            )
            self.updates.reach(name for name, bit in zip(names, of_rank, strict=True) if bit == "1")
