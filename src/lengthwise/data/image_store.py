"""Images that lie inside of rows, of tables or as data URLs: written once to this user's cache, by their content.

From then on they are files, like those that rows name by path: rows, digests and prepared data keep the paths.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lengthwise.core.errors import OutputError
from lengthwise.core.files import replace_file

VARIABLE = "LENGTHWISE_CACHE"
_DATA = "data:image/"  # begins a URL that has an image in itself


def cache_folder() -> Path | None:
    """Return the folder of this user's cache, `~/.cache/lengthwise` or LENGTHWISE_CACHE; None if that is `off`."""
    setting = os.environ.get(VARIABLE, "")
    if setting == "off":
        return None
    usual = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "lengthwise"
    return Path(os.path.abspath(os.path.expanduser(setting or usual)))


def image_within(given: Any) -> bytes | None:
    """Return the content of an image that lies inside of a row; None if the row names it otherwise.

    given: value of an image in a row. Raises ValueError for a data URL that is no base64.
    """
    if isinstance(given, Mapping) and isinstance(given.get("bytes"), bytes):
        return given["bytes"]
    if isinstance(given, str) and given.startswith(_DATA):
        head, _, text = given.partition(",")
        if not head.endswith(";base64"):
            raise ValueError("a data URL that is not in base64")
        try:
            return base64.b64decode(text, validate=True)
        except binascii.Error as error:
            raise ValueError(f"a data URL with broken base64 ({error})") from None
    return None


def keep_image(content: bytes) -> str:
    """Write an image to the cache, unless it is there; return its path. Processes may do so at the same time.

    Raises:
        OutputError: the cache is off, or cannot be written: no fault of a row.
    """
    root, expected = cache_folder(), "a folder for images that lie inside of rows"
    if root is None:
        remedy = f"Unset {VARIABLE}, or write the images to files, and their paths into the rows."
        raise OutputError(VARIABLE, expected=expected, got="off", remedy=remedy)
    found = hashlib.sha256(content).hexdigest()
    path = root / "images" / found[:2] / found
    try:
        if not path.is_file() or path.read_bytes() != content:
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(path, content)
    except OSError as error:
        remedy = f"Make room, or name another folder with {VARIABLE}."
        raise OutputError(
            str(path.parent), expected=expected, got=error.strerror or str(error), remedy=remedy
        ) from None
    return os.fspath(path)


def is_kept(path: str) -> bool:
    """Return whether a path is one of `keep_image`."""
    root = cache_folder()
    return root is not None and Path(os.path.normpath(path)).is_relative_to(root / "images")


def leave_encoded(features: Any) -> None:
    """Let images among the features of a `datasets.Dataset` stay files in bytes: rows need no pixels of them."""
    import datasets

    for each in _features(features):
        if isinstance(each, datasets.Image):
            each.decode = False


def _features(found: Any) -> Iterator[Any]:
    yield found
    inside = found.values() if isinstance(found, Mapping) else found if isinstance(found, list | tuple) else ()
    for each in [*inside, getattr(found, "feature", None)]:
        if each is not None:
            yield from _features(each)
