"""How `datasets` is asked: in its cache alone if the hub does not answer, without running code of a dataset."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from lengthwise.core.errors import DataError
from lengthwise.core.hub_access import endpoint, hub_answers

_OF_HUB = "Correct dataset, subset, split, revision or data_files, or reach the hub once: what it sent is kept."


def versions_of(asked: Mapping[str, Any], split: str) -> list[Any]:
    """Return the files of a split with their versions. asked: arguments of `datasets.load_dataset_builder`."""
    import datasets

    builder: Any = datasets.load_dataset_builder(**asked)
    files = (builder.config.data_files or {}).get(split, [])
    return [[*map(str, files)], [[*map(str, each)] for each in getattr(files, "origin_metadata", [])]]


@contextmanager
def library(where: str, *, of_hub: bool = True) -> Iterator[None]:
    """Let `datasets` find and load data inside the block; DataError with its words if it cannot."""
    import datasets

    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    try:
        settings: Any = datasets.config  # pyright: ignore[reportAttributeAccessIssue]
        with _offline(settings, unless=not of_hub or hub_answers(endpoint())):
            yield
    except Exception as error:  # noqa: BLE001 - its own are of many kinds
        raise of_library(where, error, of_hub=of_hub) from None


def of_library(where: str, error: BaseException, *, of_hub: bool) -> DataError:
    """Return the error for what `datasets` raised."""
    error = error.__cause__ or error  # its "error while generating" has what happened as its cause
    got = re.sub(r"\s+", " ", f"{type(error).__name__}: {error}")[:300]
    if of_hub:
        return DataError(where, expected="a dataset that `datasets` can load", got=got, remedy=_OF_HUB)
    return DataError(where, expected="a whole file", got=got, remedy="Write or copy it again.")


@contextmanager
def _offline(settings: Any, *, unless: bool) -> Iterator[None]:
    """Let `datasets` use its cache alone inside the block, by the only setting it has, a global of its module."""
    before: bool = settings.HF_HUB_OFFLINE
    settings.HF_HUB_OFFLINE = before or not unless
    try:
        yield
    finally:
        settings.HF_HUB_OFFLINE = before
