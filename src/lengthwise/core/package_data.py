"""Descriptions as JSON objects: files that ship with the package, and files of a user's own given by their path."""

from __future__ import annotations

import json
from importlib import resources
from typing import Any

from lengthwise.core.errors import ConfigError
from lengthwise.core.strict_json import read_json


def read_package_json(package: str, file: str) -> dict[str, Any]:
    """Read a JSON object that ships inside `package`."""
    return json.loads(resources.files(package).joinpath(file).read_text(encoding="utf-8"))


def is_path(name: str) -> bool:
    """Return whether a user who wrote `name` means a file of their own."""
    return name.endswith(".json") or "/" in name


def read_json_object(path: str) -> dict[str, Any]:
    """Read a user's own JSON object; raise ConfigError for no file, no JSON, a key twice, or another kind of JSON."""
    try:
        content = read_json(path)
    except ValueError as error:
        raise ConfigError(path, expected="a JSON file", got=str(error), remedy="Correct path or file.") from None
    if not isinstance(content, dict):
        got = type(content).__name__
        raise ConfigError(path, expected="a JSON object", got=got, remedy='Write it as {"key": value, ...}.')
    return content
