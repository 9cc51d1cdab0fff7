"""Images that lie inside of rows, of tables or as data URLs: written once to this user's cache, by their content.

From then on they are files, like those that rows name by path: rows, digests and prepared data keep the paths.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

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

    Raises ValueError if the cache is off, or cannot be written.
    """
    root = cache_folder()
    if root is None:
        raise ValueError(f"an image inside of a row, which is written to the cache, and {VARIABLE} is off")
    found = hashlib.sha256(content).hexdigest()
    path = root / "images" / found[:2] / found
    try:
        if not path.is_file() or path.stat().st_size != len(content):
            path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
                file.write(content)
            os.replace(file.name, path)
    except OSError as error:
        raise ValueError(f"no room for its copy at {path.parent}: {error.strerror or error}") from None
    return os.fspath(path)


def is_kept(path: str) -> bool:
    """Return whether a path is one of `keep_image`."""
    root = cache_folder()
    return root is not None and Path(path).is_relative_to(root / "images")


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
