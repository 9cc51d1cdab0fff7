"""Data named on the command line: a run file's, or files and folders."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from lengthwise.core.errors import Collector, ConfigError

if TYPE_CHECKING:
    from lengthwise.config import DataSource

_RUN_FILES = (".yaml", ".yml")


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedSources:
    """Sources, what makes tokens of their texts, and what messages call them by."""

    sources: tuple[DataSource, ...]
    tokenizer: str
    key: str


def is_run_file(inputs: Sequence[Path]) -> bool:
    """Return whether one run file was named, and no data."""
    return len(inputs) == 1 and inputs[0].suffix in _RUN_FILES


def wrong_paths(paths: Sequence[Path], key: str) -> list[ConfigError]:
    """Return what is wrong with paths of files and folders of data that were given as `key`."""
    from lengthwise.data.indexed import indexed_prefix

    problems: list[ConfigError] = []
    for path in paths:
        if not path.is_file() and not path.is_dir() and indexed_prefix(path) is None:
            got = f"{path}: {'not a regular file' if path.exists() else 'nothing there'}"
            remedy = "Correct the path."
            problems.append(ConfigError(key, expected="an existing file or folder", got=got, remedy=remedy))
    return problems


def asked_sources(
    inputs: Sequence[Path], tokenizer: str, overrides: Sequence[str] = (), *, of_eval: bool = False, **limits: object
) -> NamedSources:
    """Return what was named; `tokenizer` and `limits`, settings of sources, are of files alone, `of_eval` of run files.

    Raises:
        ConfigError: nothing was named, or what is not there; Problems: several of these, or of the run file.
    """
    from lengthwise.config import DataSource, load_config

    if is_run_file(inputs):
        config = load_config(inputs[0], overrides)
        if of_eval and config.eval is None:
            remedy = "Add eval to the run file, or leave out --eval."
            raise ConfigError("--eval", expected="a run file with eval", got="none", remedy=remedy)
        if of_eval and config.eval is not None:
            return NamedSources(sources=config.eval.data, tokenizer=config.tokenizer_name, key="eval.data")
        return NamedSources(sources=config.data, tokenizer=config.tokenizer_name, key="data")
    problems = Collector()
    if not inputs:
        remedy = "Name a run file, or files of data."
        problems.add(ConfigError("FILE", expected="a run file or files of data", got="none", remedy=remedy))
    for each in wrong_paths(inputs, "FILE"):
        problems.add(each)
    problems.raise_all()
    sources = tuple(DataSource.model_validate({"path": path.absolute(), **limits}) for path in inputs)
    local = str(Path(tokenizer).absolute()) if Path(tokenizer).is_dir() else tokenizer
    return NamedSources(sources=sources, tokenizer=local, key="FILE")
