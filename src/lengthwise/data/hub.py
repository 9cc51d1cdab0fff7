"""Datasets of a hub by name: their Arrow files, as the `datasets` library caches them.

The library downloads and caches; code that a dataset brings along is not run.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lengthwise.core.errors import DataError
from lengthwise.core.hub_access import endpoint, hub_answers


def hub_files(name: str, *, subset: str | None, split: str, revision: str | None) -> list[Path]:
    """Return the Arrow files of a split in order; download what the cache lacks."""
    import datasets

    where = ":".join(filter(None, (name, subset, split)))
    with _library(where, "Correct dataset, subset, split or revision, or reach the hub once: what it sent is kept."):
        found: Any = datasets.load_dataset(name, subset, split=split, revision=revision)
    files = [Path(os.path.abspath(cache_file["filename"])) for cache_file in found.cache_files]
    if not files:
        raise DataError(where, expected="rows in files", got="none", remedy="Save it with save_to_disk, and name that.")
    return files


def hub_stream(arguments: Mapping[str, Any], split: str, where: str) -> tuple[Callable[[], Any], list[Any]]:
    """Return (function that makes the streaming dataset of a split, its files with their versions).

    arguments: arguments of `datasets.load_dataset_builder`.
    """
    import datasets

    of_hub = "data_files" not in arguments
    remedy = "Correct dataset, subset, split, revision or path, or see that its machine answers."
    with _library(where, remedy, of_hub=of_hub):
        builder: Any = datasets.load_dataset_builder(**arguments)
        builder.as_streaming_dataset(split=split)
        files = (builder.config.data_files or {}).get(split, [])
        versions = getattr(files, "origin_metadata", [])
    identity = [[*map(str, files)], [[*map(str, each)] for each in versions]]
    return lambda: builder.as_streaming_dataset(split=split), identity


@contextmanager
def _library(where: str, remedy: str, *, of_hub: bool = True) -> Iterator[None]:
    """Use `datasets` inside the block, its cache alone if the hub does not answer; translate its errors."""
    import datasets

    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    try:
        settings: Any = datasets.config  # pyright: ignore[reportAttributeAccessIssue]
        with _offline(settings, unless=not of_hub or hub_answers(endpoint())):
            yield
    except Exception as error:  # noqa: BLE001 - its own are of many kinds
        got = re.sub(r"\s+", " ", str(error))[:300] or type(error).__name__
        raise DataError(where, expected="a dataset that `datasets` can load", got=got, remedy=remedy) from None


@contextmanager
def _offline(settings: Any, *, unless: bool) -> Iterator[None]:
    """Let `datasets` use its cache alone inside the block; its only setting is a global of its module."""
    before: bool = settings.HF_HUB_OFFLINE
    settings.HF_HUB_OFFLINE = before or not unless
    try:
        yield
    finally:
        settings.HF_HUB_OFFLINE = before
