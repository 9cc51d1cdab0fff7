"""What the ranks of a session compare before they run: what a loop did between steps, on one rank alone by mistake.

One small gather of digests. Then weights that the loop changed through the optimizer's groups are published, and both
copies of a tied weight, which lie on two stages, made the same.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lengthwise.comm import Transport, share_numbers
from lengthwise.core.errors import ConfigError, RankError
from lengthwise.engine.stage_share import StageShare
from lengthwise.session.loop_optimizer import LoopOptimizer

_BITS = 48  # of a digest, which fp64 has exactly
_GROUPS = "arguments of the optimizer's groups, such as learning rates"
_SLICES = "changes to slices in optimizer.param_groups"
_VALUES = "changes to the model's own parameters"
_GRADIENTS = "parameters that have a gradient"
_CLEARS = "calls of zero_grad"
_MODE = "mode of the model, as train() and eval() set it"
_OWN = 5  # numbers of a rank before its digests


class Agreement:
    """Compares the ranks of a session. updates: None: nothing trains."""

    def __init__(self, model: nn.Module, transport: Transport, updates: LoopOptimizer | None) -> None:
        self._transport, self._updates, self._model = transport, updates, model
        self._stage = None if updates is None else updates.parameters.stage
        self._parameters = dict(model.named_parameters())
        self._versions = self._counted()

    def _counted(self) -> dict[str, int]:
        """Return how often each parameter was changed in place, as autograd counts it."""
        return {name: parameter._version for name, parameter in self._parameters.items()}

    def reach(self, name: str, **given: Any) -> None:
        """Compare the ranks before they run `name`, and numbers and texts that it was given. Collective.

        What the loop has changed is then published.

        Raises:
            RankError: a rank did other things than the first.
            ConfigError: weights were changed in two ways at once.
        """
        updates, now, wrong = self._updates, self._counted(), None
        if updates is not None:
            try:
                updates.settle()
            except ConfigError as error:  # raised once no rank waits for this one
                wrong = error
        changed = {each: count - self._versions[each] for each, count in now.items() if count != self._versions[each]}
        did: dict[str, Any] = {_VALUES: changed, _MODE: self._model.training}
        did |= {key: each if isinstance(each, str | None) else float(each) for key, each in given.items()}
        if updates is not None:
            did |= {_SLICES: updates.edits, _GRADIENTS: sorted(updates.with_gradient), _CLEARS: updates.clears}
            did[_GROUPS] = updates.arguments()
        self._transport.phase = f"{name}, comparing the ranks"
        tied = None if self._stage is None else self._stage.tied
        is_tied = tied is not None and any(self._parameters[each] is tied for each in changed)
        norm = 0.0 if self._stage is None else self._stage.tied_norm()
        tied_name = ""
        if updates is not None and tied is not None and tied.requires_grad:
            tied_name = updates.withheld.name_of(tied)
        without = updates is not None and tied_name not in {"", *updates.with_gradient}
        is_both = updates is not None and updates.has_edited_weights and (bool(changed) or updates.has_edited_both())
        own = [float(wrong is not None), float(is_tied), norm, float(without), float(is_both)]
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
        elif self._stage is not None:
            self._share_tied(self._stage, rows[:, 1], rows[:, 2])
        self._versions = self._counted()

    def _refuse_others(self, rows: Tensor, did: Mapping[str, Any]) -> None:
        """Raise on all ranks where one has another digest than the first rank that has the same parameters."""
        where = f"rank {self._transport.rank}, {self._transport.phase}"
        if rows[:, 0].any():
            got = f"what the session cannot use, on rank {int(rows[:, 0].argmax())}"
            raise RankError(where, expected="ranks that go on", got=got, remedy="That rank's own message says more.")
        stages = 1 if self._stage is None else self._stage.mesh.stages
        for column, (what, own) in enumerate(did.items(), start=_OWN):
            apart = stages if what in (_VALUES, _SLICES, _GRADIENTS) else 1  # a stage has some of the parameters
            others = [rank for rank in range(len(rows)) if rows[rank, column] != rows[rank % apart, column]]
            if others:
                ranks = f"rank{'s' * (len(others) > 1)} {', '.join(map(str, others[:10]))}"
                got = f"others on {ranks}; on this one {own}"[:400]
                remedy = "Let every rank run the same loop, with the same settings."
                raise RankError(where, expected=f"the same {what} on all ranks", got=got, remedy=remedy)

    def _share_tied(self, stage: StageShare, changed: Tensor, norms: Tensor) -> None:
        """Make both copies of a tied weight the one that the loop has changed, where they differ."""
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
    """Return a number that is another where what was done is another."""
    text = json.dumps(did, sort_keys=True, default=_shown).encode()
    return float(int.from_bytes(hashlib.sha256(text).digest()[: _BITS // 8], "big"))


def _shown(value: object) -> object:
    """Return what stands for an argument of a group that is no number: the same on all ranks, without its address."""
    return value.tolist() if isinstance(value, Tensor) else type(value).__name__
