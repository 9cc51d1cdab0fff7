"""Data files that ship with the package."""

from __future__ import annotations

import json
from importlib import resources
from typing import Any


def read_package_json(package: str, file: str) -> dict[str, Any]:
    """Read a JSON object that ships inside `package`."""
    return json.loads(resources.files(package).joinpath(file).read_text(encoding="utf-8"))
