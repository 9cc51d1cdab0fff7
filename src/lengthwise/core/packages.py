"""Optional packages and their versions, found without an import, which may take seconds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from importlib.metadata import PackageNotFoundError, version

from lengthwise.core.errors import ConfigError, raise_problems

TRACKER_PACKAGES: Mapping[str, tuple[str, ...]] = {  # distributions; a tracker needs one of its own
    "tensorboard": ("tensorboard",),
    "wandb": ("wandb",),
    "trackio": ("trackio",),
    "mlflow": ("mlflow", "mlflow-skinny"),
}


def check_trackers(names: Iterable[str]) -> None:
    """Raise ConfigError, or Problems, for trackers whose package is missing."""
    raise_problems([_missing(name) for name in names if not any(map(is_installed, TRACKER_PACKAGES[name]))])


def _missing(name: str) -> ConfigError:
    package = TRACKER_PACKAGES[name][0]
    expected, got = f"the package {package}, which {name} needs", f"no {package} installed"
    remedy = f"pip install {package}, or take {name} out of `report_to`."
    return ConfigError("report_to", expected=expected, got=got, remedy=remedy)


def check_remote() -> None:
    """Raise ConfigError if Ray, which `remote` data needs, is missing."""
    if not is_installed("ray"):
        remedy = "pip install 'lengthwise[ray]', or take remote out of `data`."
        raise ConfigError(
            "data", expected="the package ray, which `remote` needs", got="no ray installed", remedy=remedy
        )


def lacking(error: ModuleNotFoundError, extra: str) -> ModuleNotFoundError:
    """Return the error of a missing module, with the extra of this package that installs it."""
    return ModuleNotFoundError(f"no module {error.name}: pip install 'lengthwise[{extra}]'", name=error.name)


def is_installed(package: str) -> bool:
    """Return whether a distribution of this name is installed."""
    return installed_version(package) is not None


def installed_version(package: str) -> str | None:
    """Return the installed version of a distribution, or None if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def release_of(version: str) -> tuple[int, ...]:
    """Return up to three numbers of a version, for comparison: (2, 8, 3) for 2.8.3.post1+cu12."""
    return tuple(int(part) if part.isdigit() else 0 for part in version.split("+")[0].split(".")[:3])
