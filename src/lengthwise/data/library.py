"""Calls of `datasets`: in its cache alone if the hub does not answer, without running code of a dataset."""

from __future__ import annotations

import errno
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal, TypeAlias

from lengthwise.core.errors import DataError
from lengthwise.core.hub_access import endpoint, hub_answers

_REMEDIES = {
    "file": "Write or copy it again.",
    "url": "Correct it, or see that its machine answers.",
    "hub": "Correct dataset, subset, split, revision or data_files, or reach the hub once: what it sent is kept.",
}
Place: TypeAlias = Literal["file", "url", "hub"]
"""Place of data: on this machine, at an address, or on a hub."""


def versions_of(asked: Mapping[str, Any], split: str) -> list[Any]:
    """Return the files of a split with their versions. asked: arguments of `datasets.load_dataset_builder`."""
    import datasets

    builder: Any = datasets.load_dataset_builder(**asked)
    files = (builder.config.data_files or {}).get(split, [])
    return [[*map(str, files)], [[*map(str, each)] for each in getattr(files, "origin_metadata", [])]]


@contextmanager
def library(shown: str, place: Place) -> Iterator[None]:
    """Translate errors of `datasets` inside the block to a DataError that names `shown`."""
    import datasets

    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    try:
        settings: Any = datasets.config  # pyright: ignore[reportAttributeAccessIssue]
        # A file needs no hub, which would be asked to count loads of files
        with _offline(settings, unless=place == "url" or (place == "hub" and hub_answers(endpoint()))):
            yield
    except Exception as error:  # noqa: BLE001 - its own are of many kinds
        if isinstance(error.__cause__, KeyboardInterrupt):  # it wraps Ctrl-C, too
            raise error.__cause__ from None
        raise of_library(shown, place, error) from None


def of_library(where: str, place: Place, error: BaseException) -> DataError:
    """Return the error for an error of `datasets`."""
    error = error.__cause__ or error  # the cause of its "error while generating" says what happened
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        expected = f"room for a copy of {where} by `datasets`"
        remedy = "Make room there, or name another folder with HF_DATASETS_CACHE."
        return DataError(str(_cache()), expected=expected, got=error.strerror or str(error), remedy=remedy)
    got = re.sub(r"\s+", " ", f"{type(error).__name__}: {error}")[:300]
    expected = "a whole file" if place == "file" else "a dataset that `datasets` can load"
    return DataError(where, expected=expected, got=got, remedy=_REMEDIES[place])


def _cache() -> str:
    import datasets

    settings: Any = datasets.config  # pyright: ignore[reportAttributeAccessIssue]
    return settings.HF_DATASETS_CACHE


@contextmanager
def _offline(settings: Any, *, unless: bool) -> Iterator[None]:
    """Let `datasets` use its cache alone inside the block; its only setting is a global of its module."""
    before: bool = settings.HF_HUB_OFFLINE
    settings.HF_HUB_OFFLINE = before or not unless
    try:
        yield
    finally:
        settings.HF_HUB_OFFLINE = before
