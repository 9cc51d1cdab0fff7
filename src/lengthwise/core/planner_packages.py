"""Planners of ours that need a package which Lengthwise does not: whether it is there, and how to install it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from lengthwise.core.errors import ConfigError
from lengthwise.core.packages import is_installed


class PlannerPackage(NamedTuple):
    """The distribution that a planner needs, and the command that installs it."""

    distribution: str
    install: str


PLANNER_PACKAGES: Mapping[str, PlannerPackage] = {  # by planner
    "megatron-core": PlannerPackage("megatron-core", "pip install --no-deps megatron-core==0.16.1 packaging"),
    "flexsp": PlannerPackage("highspy", "pip install 'lengthwise[bench]'"),
}


def has_package(planner: str) -> bool:
    """Return whether a planner of `PLANNER_PACKAGES` can be asked; nothing is imported, Megatron-Core takes seconds."""
    return is_installed(PLANNER_PACKAGES[planner].distribution)


def missing_package_of(where: str, planner: str) -> ConfigError:
    """Return the error for a planner of `PLANNER_PACKAGES` whose package is not installed."""
    package, install = PLANNER_PACKAGES[planner]
    expected, got = f"the package {package}, which planner {planner} needs", f"no {package} installed"
    return ConfigError(where, expected=expected, got=got, remedy=f"{install}, or choose another planner.")
