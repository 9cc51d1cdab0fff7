"""Planners of others that need a package, registered as any package registers its own (`register_planner`).

`flexsp` solves FlexSP's integer program by HiGHS (`pip install highspy`); `megatron-core` asks Megatron-Core's own
scheduler (`pip install --no-deps megatron-core==0.16.1 packaging`). A program that registers them may give their names
to `PlanOptions`, in its own process.
"""

from __future__ import annotations

from collections.abc import Iterable

from exact.milp import load_solver
from lengthwise.planner import register_planner
from rival_planners.flexsp import plan_flexsp
from rival_planners.megatron_core import load_scheduler, plan_megatron_core

_RIVALS = {"flexsp": (plan_flexsp, load_solver), "megatron-core": (plan_megatron_core, load_scheduler)}


def register_rivals(names: Iterable[str]) -> None:
    """Register those of these names that are planned here; ConfigError: a package that one needs is not installed."""
    for name in names:
        if name in _RIVALS:
            function, load_package = _RIVALS[name]
            load_package()
            register_planner(name, function)
