"""torch's optimizer of whole parameters, as a run file names it or a loop has made it, before parameters are cut."""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lengthwise.config import OptimizerConfig
from lengthwise.engine.lion import Lion

_KINDS: Mapping[str, Callable[..., Any]] = {
    "adamw": torch.optim.AdamW,
    "adam": torch.optim.Adam,
    "sgd": torch.optim.SGD,
    "lion": Lion,
}
FUSED = ("adamw", "adam", "sgd")  # of which torch has one kernel for a whole update, on the CPU as on GPUs
_STATES = 2  # an entry, of most optimizers; amsgrad and centered keep one more
MEMBERS = "params"  # of a group


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeOptimizer:
    """An optimizer of whole parameters, as it was before these were cut.

    given: the parameters that train, by name in the whole model. group_of: the number of each one's group. numbers:
    which of the optimizer's parameters, as torch counts them, each is. members: the numbers of each group. frozen: by
    number, parameters in its groups that do not train. states: what it has kept of each so far, until slices take it.
    """

    optimizer: Optimizer
    given: Mapping[str, nn.Parameter]
    group_of: Mapping[str, int]
    numbers: Mapping[str, int]
    members: Sequence[Sequence[int]]
    frozen: Mapping[int, nn.Parameter]
    states: dict[str, Mapping[str, Any]]


def read_optimizer(optimizer: Optimizer, model: nn.Module) -> WholeOptimizer:
    """Return what there is of an optimizer of a model's parameters."""
    groups = [group[MEMBERS] for group in optimizer.param_groups]
    group_of = {id(each): number for number, group in enumerate(groups) for each in group}
    every = [each for group in groups for each in group]
    counted = {id(each): number for number, each in enumerate(every)}
    given = {name: each for name, each in model.named_parameters() if each.requires_grad}
    learning = {id(each) for each in given.values()}  # towers may be in groups, and have no gradients
    return WholeOptimizer(
        optimizer=optimizer,
        given=given,
        group_of={name: group_of[id(each)] for name, each in given.items()},
        numbers={name: counted[id(each)] for name, each in given.items()},
        members=[[counted[id(each)] for each in group] for group in groups],
        frozen={number: each for number, each in enumerate(every) if id(each) not in learning},
        states={name: optimizer.state.get(each, {}) for name, each in given.items()},
    )


def optimizer_of(config: OptimizerConfig, model: nn.Module, *, fused: bool | None = None) -> WholeOptimizer:
    """Return the optimizer of a run file: weight decay is for parameters of two or more dimensions.

    fused: None: where `FUSED` has it.
    """
    options: dict[str, Any] = {"fused": config.name in FUSED if fused is None else fused}
    if config.name == "lion":
        options = {}
    elif not options["fused"]:
        options["foreach"] = False  # which would need as much as all slices
    # Of a tensor that has a device, as the parameters may have none yet.
    made = _KINDS[config.name]([torch.zeros(1)], lr=config.lr or 0.0, **config.arguments, **options)
    made.param_groups.clear()
    trained = [each for each in model.parameters() if each.requires_grad]
    for decays in (True, False):
        members = [each for each in trained if (each.dim() >= 2) == decays]
        made.add_param_group({MEMBERS: members, "weight_decay": config.weight_decay if decays else 0.0})
    return read_optimizer(made, model)


def states_an_entry(optimizer: Optimizer) -> int:
    """Count what an optimizer keeps of each entry: two by most, and what arguments ask for beside."""
    groups = optimizer.param_groups
    if isinstance(optimizer, torch.optim.SGD):
        return int(any(group.get("momentum") for group in groups))
    return _STATES + any(group.get("amsgrad") or group.get("centered") for group in groups)


def kept_of(optimizer: Optimizer, group: Mapping[str, Any]) -> dict[str, bool] | None:
    """Return what an optimizer keeps of a parameter by these arguments, and whether for each entry; None: unknown."""
    probe, parameter = copy.copy(optimizer), nn.Parameter(torch.zeros(2))
    parameter.grad = torch.ones(2)
    plain = {key: value for key, value in group.items() if key not in ("fused", "capturable", "foreach")}
    probe.param_groups = [{**plain, "fused": False, "capturable": False, "foreach": False, MEMBERS: [parameter]}]
    probe.state = defaultdict(dict)
    for name in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
        setattr(probe, name, OrderedDict())
    try:
        with torch.enable_grad():
            type(optimizer).step(probe)
    except Exception:  # noqa: BLE001 - an optimizer of the loop's, which may need more
        return None
    found = probe.state[parameter].items()
    return {key: isinstance(each, Tensor) and each.dim() > 0 for key, each in found if each is not None}
