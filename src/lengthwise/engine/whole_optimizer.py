"""torch's optimizer over whole parameters, named by a run file or made by a loop, before parameters are sharded."""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lengthwise.config import OptimizerConfig


class Lion(torch.optim.Optimizer):
    """Lion (arXiv 2302.06675, algorithm 2): the sign of an average of gradients, with decoupled weight decay.

    torch has no Lion. Its one state is `exp_avg`.
    """

    def __init__(
        self, params: Iterable[Tensor], lr: float, *, betas: tuple[float, float], weight_decay: float = 0.0
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self) -> None:  # pyright: ignore[reportIncompatibleMethodOverride] - without a closure
        """Update every parameter."""
        for group in self.param_groups:
            lr, (beta1, beta2) = group["lr"], group["betas"]
            for weights in group["params"]:
                if weights.grad is None:
                    continue
                state = self.state[weights]
                if not state:
                    state["exp_avg"] = torch.zeros_like(weights)
                average = state["exp_avg"]
                sign = average.lerp(weights.grad, 1 - beta1).sign_()
                weights.mul_(1 - lr * group["weight_decay"]).add_(sign, alpha=-lr)
                average.lerp_(weights.grad, 1 - beta2)


_KINDS: Mapping[str, Callable[..., Any]] = {
    "adamw": torch.optim.AdamW,
    "adam": torch.optim.Adam,
    "sgd": torch.optim.SGD,
    "lion": Lion,
}
FUSED = ("adamw", "adam", "sgd")  # optimizers with a fused kernel in torch, on CPUs and GPUs
_STATES = 2  # states per entry of most optimizers; amsgrad and centered keep one more
MEMBERS = "params"  # torch's key for a group's parameters


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeOptimizer:
    """An optimizer over whole parameters, before they are sharded.

    given: trainable parameters, by name in the whole model. group_of: numbers of their groups. numbers: their numbers
    in the optimizer, by torch's count. members: numbers of all parameters, by group. frozen: parameters in its groups
    that do not train, by number. states: states so far, by name, until slices take them.
    """

    optimizer: Optimizer
    given: Mapping[str, nn.Parameter]
    group_of: Mapping[str, int]
    numbers: Mapping[str, int]
    members: Sequence[Sequence[int]]
    frozen: Mapping[int, nn.Parameter]
    states: dict[str, Mapping[str, Any]]


def read_optimizer(optimizer: Optimizer, model: nn.Module) -> WholeOptimizer:
    """Read groups and states of an optimizer of a model's parameters."""
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
    """Make the optimizer of a run file, with weight decay for parameters of two or more dimensions only.

    fused: True for torch's fused kernels; by default for the optimizers in `FUSED`.
    """
    options: dict[str, Any] = {"fused": config.name in FUSED if fused is None else fused}
    if config.name == "lion":
        options = {}
    elif not options["fused"]:
        options["foreach"] = False  # it needs temporaries as large as all slices
    # Made with a real tensor, because the parameters may be on the meta device.
    made = _KINDS[config.name]([torch.zeros(1)], lr=config.lr or 0.0, **config.arguments, **options)
    made.param_groups.clear()
    trained = [each for each in model.parameters() if each.requires_grad]
    for decays in (True, False):
        members = [each for each in trained if (each.dim() >= 2) == decays]
        made.add_param_group({MEMBERS: members, "weight_decay": config.weight_decay if decays else 0.0})
    return read_optimizer(made, model)


def states_an_entry(optimizer: Optimizer) -> int:
    """Return the number of an optimizer's states per entry."""
    groups = optimizer.param_groups
    if isinstance(optimizer, torch.optim.SGD):
        return int(any(group.get("momentum") for group in groups))
    return _STATES + any(group.get("amsgrad") or group.get("centered") for group in groups)


def kept_of(optimizer: Optimizer, group: Mapping[str, Any]) -> dict[str, bool] | None:
    """Return whether each state that a group's arguments give has one number per entry; None if a step fails."""
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
    except Exception:  # noqa: BLE001 - a loop's own optimizer, which may need more
        return None
    found = probe.state[parameter].items()
    return {key: isinstance(each, Tensor) and each.dim() > 0 for key, each in found if each is not None}
