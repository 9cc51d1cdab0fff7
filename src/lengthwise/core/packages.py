"""Optional packages, of planners and trackers: whether they are there; none is imported, as some take seconds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from importlib.metadata import PackageNotFoundError, distribution
from typing import NamedTuple

from lengthwise.core.errors import ConfigError, raise_problems


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


TRACKER_PACKAGES: Mapping[str, tuple[str, ...]] = {  # by tracker: distributions, one of which it needs
    "tensorboard": ("tensorboard",),
    "wandb": ("wandb",),
    "trackio": ("trackio",),
    "mlflow": ("mlflow", "mlflow-skinny"),
}


def check_trackers(names: Iterable[str]) -> None:
    """Refuse, without importing any, trackers whose package is missing, by a ConfigError or Problems."""
    raise_problems([_missing(name) for name in names if not any(map(is_installed, TRACKER_PACKAGES[name]))])


def _missing(name: str) -> ConfigError:
    package = TRACKER_PACKAGES[name][0]
    expected, got = f"the package {package}, which reports to {name} need", f"no {package} installed"
    remedy = f"pip install {package}, or take {name} out of `report_to`."
    return ConfigError("report_to", expected=expected, got=got, remedy=remedy)


def check_remote() -> None:
    """Refuse `remote` data where Ray is not installed; it is not imported."""
    if not is_installed("ray"):
        remedy = "pip install 'lengthwise[ray]', or take remote out of `data`."
        raise ConfigError(
            "data", expected="the package ray, which `remote` needs", got="no ray installed", remedy=remedy
        )


def is_installed(package: str) -> bool:
    """Return whether there is a distribution of this name."""
    try:
        distribution(package)
    except PackageNotFoundError:
        return False
    return True
