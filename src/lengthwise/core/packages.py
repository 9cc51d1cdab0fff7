"""Optional packages: whether they are there, and in which version; none is imported, as some take seconds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from importlib.metadata import PackageNotFoundError, version

from lengthwise.core.errors import ConfigError, raise_problems

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
    return installed_version(package) is not None


def installed_version(package: str) -> str | None:
    """Return the version of the distribution of this name; None: there is none."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def release_of(version: str) -> tuple[int, ...]:
    """Return the numbers of a version, at most three, to compare: of 2.8.3.post1+cu12 they are (2, 8, 3)."""
    return tuple(int(part) if part.isdigit() else 0 for part in version.split("+")[0].split(".")[:3])
