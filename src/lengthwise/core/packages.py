"""Whether an optional package is installed; nothing is imported, as some take seconds."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, distribution


def is_installed(package: str) -> bool:
    """Return whether there is a distribution of this name."""
    try:
        distribution(package)
    except PackageNotFoundError:
        return False
    return True
