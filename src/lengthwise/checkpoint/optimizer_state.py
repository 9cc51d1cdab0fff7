"""The part of a checkpoint about an optimizer on slices, without its tensors: saved and restored."""

from __future__ import annotations

import json
from collections.abc import Mapping

import torch
from torch import Tensor

from lengthwise.checkpoint.manifest import OptimizerState
from lengthwise.config.problems import shown
from lengthwise.core.errors import ConfigError
from lengthwise.engine.optimizer import SlicedOptimizer, plain_value
from lengthwise.engine.whole_optimizer import MEMBERS


def state_of(optimizer: SlicedOptimizer) -> OptimizerState:
    """Return an optimizer's kind and groups, the same on all ranks; ConfigError for an argument that is no JSON."""
    names, groups = {number: name for name, number in optimizer.numbers.items()}, []
    for number, group in enumerate(optimizer.plain_groups()):
        plain = {key: plain_value(value) for key, value in group.items()}
        plain[MEMBERS] = [names.get(each) for each in group[MEMBERS]]
        for key, value in plain.items():
            try:
                json.dumps(value, allow_nan=False)
            except (TypeError, ValueError):
                where, expected = f"optimizer.param_groups, {number}, {key}", "a number, a word, or several"
                raise ConfigError(where, expected=expected, got=shown(value), remedy="Remove it.") from None
        groups.append(plain)
    return OptimizerState(kind=type(optimizer.optimizer).__name__, groups=tuple(groups))


def take_state(optimizer: SlicedOptimizer, state: OptimizerState, vectors: Mapping[str, Tensor]) -> None:
    """Set an optimizer's groups and states. vectors: states with one value an entry, (entries,) here, by name."""
    optimizer.set_groups([{k: v for k, v in group.items() if k != MEMBERS} for group in state.groups])
    for run, _ in optimizer.states():
        kept = state.states.get(optimizer.parameters.names[run.parameter])
        if kept is None:
            optimizer.set_slice(run, None)
        else:
            found = {
                key: vectors[key][run.start : run.stop] if number is None else torch.tensor(number)
                for key, number in kept.items()
            }
            optimizer.set_slice(run, found)
