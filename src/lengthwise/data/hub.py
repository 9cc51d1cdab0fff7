"""Datasets by the name that a hub knows them by: the Arrow files that the `datasets` library keeps of them.

It downloads and caches, and runs no code that a dataset brings along.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lengthwise.core.errors import DataError
from lengthwise.core.hub import endpoint, hub_answers


def hub_files(name: str, *, subset: str | None, split: str, revision: str | None) -> list[Path]:
    """Return the Arrow files that hold the rows of a split, in order; they are downloaded if they are not there.

    Raises:
        DataError: `datasets` has no such dataset, subset or split, or no network.
    """
    import datasets

    where = ":".join(filter(None, (name, subset, split)))
    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    try:
        settings: Any = datasets.config  # pyright: ignore[reportAttributeAccessIssue]
        with _offline(settings, unless=hub_answers(endpoint())):
            found: Any = datasets.load_dataset(name, subset, split=split, revision=revision)
    except Exception as error:  # noqa: BLE001 - its own are of many kinds
        got = re.sub(r"\s+", " ", str(error))[:300] or type(error).__name__
        remedy = "Correct dataset, subset, split or revision, or reach the hub once: what it sent is kept."
        raise DataError(where, expected="a dataset that `datasets` can load", got=got, remedy=remedy) from None
    files = [Path(os.path.abspath(cache_file["filename"])) for cache_file in found.cache_files]
    if not files:
        raise DataError(where, expected="rows in files", got="none", remedy="Save it with save_to_disk, and name that.")
    return files


@contextmanager
def _offline(settings: Any, *, unless: bool) -> Iterator[None]:
    """Let `datasets` look into its cache alone inside the block, which it knows by a setting of its module only."""
    before: bool = settings.HF_HUB_OFFLINE
    settings.HF_HUB_OFFLINE = before or not unless
    try:
        yield
    finally:
        settings.HF_HUB_OFFLINE = before
