"""Experiment trackers that a run may report to: the packages that they are, and whether these are installed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from lengthwise.core.errors import ConfigError, raise_problems
from lengthwise.core.packages import is_installed

TRACKER_PACKAGES: Mapping[str, tuple[str, ...]] = {  # by tracker: distributions, one of which it needs
    "tensorboard": ("tensorboard",),
    "wandb": ("wandb",),
    "trackio": ("trackio",),
    "mlflow": ("mlflow", "mlflow-skinny"),
}


def check_trackers(names: Iterable[str]) -> None:
    """Refuse trackers whose package is not installed; nothing is imported, as some take seconds.

    Raises:
        ConfigError: one is missing; Problems: several are.
    """
    raise_problems([_missing(name) for name in names if not any(map(is_installed, TRACKER_PACKAGES[name]))])


def _missing(name: str) -> ConfigError:
    package = TRACKER_PACKAGES[name][0]
    expected, got = f"the package {package}, which reports to {name} need", f"no {package} installed"
    remedy = f"pip install {package}, or take {name} out of `report_to`."
    return ConfigError("report_to", expected=expected, got=got, remedy=remedy)
