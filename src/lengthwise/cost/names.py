"""Data files that ship with the package, and the error for a name that none of them holds."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable
from importlib import resources
from typing import Any

from lengthwise.core.errors import ConfigError


def read_package_json(package: str, file: str) -> dict[str, Any]:
    """Read a JSON object that ships inside `package`."""
    return json.loads(resources.files(package).joinpath(file).read_text(encoding="utf-8"))


def unknown_name(where: str, got: object, known: Iterable[str]) -> ConfigError:
    """Make the error for a name that does not exist: it lists the known ones and points at the nearest."""
    names = list(known)
    near = difflib.get_close_matches(str(got), names, n=1)
    remedy = f"Did you mean {near[0]!r}?" if near else "Choose one of these."
    return ConfigError(where, expected=f"one of {', '.join(names)}", got=repr(got), remedy=remedy)
