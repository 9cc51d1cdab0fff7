"""Data named on the command line: a run file's, or files and folders."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from lengthwise.core.errors import Collector, ConfigError
from lengthwise.core.remote import is_url, wrong_in_url

if TYPE_CHECKING:
    from lengthwise.config import DataSource

_RUN_FILES = (".yaml", ".yml")


def _tell(line: str) -> None:
    print(line, file=sys.stderr)


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedSources:
    """Sources, what makes tokens of their texts, and what messages call them by."""

    sources: tuple[DataSource, ...]
    tokenizer: str
    key: str


def is_run_file(inputs: Sequence[str]) -> bool:
    """Return whether one run file was named, and no data."""
    return len(inputs) == 1 and inputs[0].endswith(_RUN_FILES) and not is_url(inputs[0])


def wrong_names(names: Sequence[str], key: str) -> list[ConfigError]:
    """Return what is wrong with names of files, folders and URLs that were given as `key`."""
    from lengthwise.data.indexed import indexed_prefix

    problems: list[ConfigError] = []
    for name in names:
        if is_url(name):
            if (wrong := wrong_in_url(name)) is not None:
                remedy = (
                    "Correct it, and install what reads it: pip install 'lengthwise[remote]', and s3fs for s3://, say."
                )
                problems.append(ConfigError(key, expected="a URL that fsspec reads", got=wrong, remedy=remedy))
            continue
        path = Path(name)
        if not path.is_file() and not path.is_dir() and indexed_prefix(path) is None:
            got = f"{path}: {'not a regular file' if path.exists() else 'nothing there'}"
            problems.append(
                ConfigError(key, expected="an existing file or folder", got=got, remedy="Correct the path.")
            )
    return problems


def fetched_sources(names: Sequence[str], key: str, limits: Mapping[str, object]) -> tuple[DataSource, ...]:
    """Return sources of these files, folders and URLs, what is at a URL copied to this machine."""
    from lengthwise.config import DataSource
    from lengthwise.data.fetch import fetch_sources

    places = ({"url": name} if is_url(name) else {"path": Path(name).absolute()} for name in names)
    return fetch_sources([DataSource.model_validate({**place, **limits}) for place in places], key, _tell)


def asked_sources(
    inputs: Sequence[str], tokenizer: str, overrides: Sequence[str] = (), *, of_eval: bool = False, **limits: object
) -> NamedSources:
    """Return what was named; `tokenizer` and `limits`, settings of sources, are of files alone, `of_eval` of run files.

    Raises:
        ConfigError: nothing was named, or what is not there; Problems: several of these, or of the run file.
    """
    from lengthwise.config import load_config
    from lengthwise.data.fetch import fetch_sources

    if is_run_file(inputs):
        config = load_config(inputs[0], overrides)
        if of_eval and config.eval is None:
            remedy = "Add eval to the run file, or leave out --eval."
            raise ConfigError("--eval", expected="a run file with eval", got="none", remedy=remedy)
        if of_eval and config.eval is not None:
            sources = fetch_sources(config.eval.data, "eval.data", _tell)
            return NamedSources(sources=sources, tokenizer=config.tokenizer_name, key="eval.data")
        sources = fetch_sources(config.data, "data", _tell)
        return NamedSources(sources=sources, tokenizer=config.tokenizer_name, key="data")
    problems = Collector()
    if not inputs:
        remedy = "Name a run file, or files of data."
        problems.add(ConfigError("FILE", expected="a run file or files of data", got="none", remedy=remedy))
    for each in wrong_names(inputs, "FILE"):
        problems.add(each)
    problems.raise_all()
    sources = fetched_sources(inputs, "FILE", limits)
    local = str(Path(tokenizer).absolute()) if Path(tokenizer).is_dir() else tokenizer
    return NamedSources(sources=sources, tokenizer=local, key="FILE")
