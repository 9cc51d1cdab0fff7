"""Read a run file, apply overrides, resolve paths, and report every problem in one message."""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lengthwise.config.document import key_lines, parse_values
from lengthwise.config.problems import find_problems, sections_at, shown
from lengthwise.config.schema import TINY_MODEL, RunConfig
from lengthwise.config.sections import scheme_of
from lengthwise.config.training import MEASURE_AT_START, MEASURE_NOTHING
from lengthwise.core.errors import ConfigError, LengthwiseError, Problems, raise_problems
from lengthwise.core.files import read_plain
from lengthwise.core.names import BYTES_TOKENIZER

_MOST_DIGITS = 10  # of an index
_FILE, _FOLDER = "file", "folder"
_MOST_BYTES = 1 << 20  # of a run file
_MOST_NAME_BYTES = 255  # of a part of a path, in today's file systems
_MOST_PATH_BYTES = 4095  # of a path, in Linux
_OF_FILES = ("arrow", "csv", "json", "parquet", "text", "xml")  # kinds of files that `dataset` may name
_PATH_STARTS = ("./", "../", "/", "~")


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read the run file at `path`; raise ConfigError for one problem and Problems for several.

    overrides: texts such as `optimizer.lr=1e-3`, `data.0.path=other.jsonl` or `global_batch={tokens: 4096}`; values are
    YAML. Relative paths start from the run file's folder.
    """
    path = Path(path)
    text = _read_text(path)
    values, problems = parse_values(text, str(path))
    if not isinstance(values, dict):
        remedy = "Write keys and values, such as `model: tiny`."
        raise_problems([*problems, ConfigError(str(path), expected="a mapping", got=shown(values), remedy=remedy)])
    assert isinstance(values, dict), values
    problems += apply_overrides(values, overrides)
    try:
        return _build(values, path.absolute().parent, problems)
    except LengthwiseError as error:
        raise_problems(_placed(error, text, str(path), overrides))
        raise


def build_config(values: Mapping[str, object], folder: Path) -> RunConfig:
    """Return the settings of plain values, checked as a run file in `folder`."""
    return _build(copy.deepcopy(dict(values)), Path(folder).absolute(), [])


def _build(values: dict[str, object], folder: Path, problems: list[ConfigError]) -> RunConfig:
    problems = problems + find_problems(values) + _resolve_paths(values, folder)
    raise_problems(problems)
    return RunConfig.model_validate(values)


def _placed(error: LengthwiseError, text: str, name: str, overrides: Sequence[str]) -> list[LengthwiseError]:
    """Add to each problem the line of its key, and sort by line; problems of overrides come last."""
    lines = key_lines(text)
    given = [tuple(part.strip() for part in each.partition("=")[0].split(".")) for each in overrides]
    found: list[tuple[float, LengthwiseError]] = []
    for problem in error.problems if isinstance(error, Problems) else (error,):
        path = tuple(problem.where.split("."))
        known = next((path[:end] for end in range(len(path), 0, -1) if path[:end] in lines), None)
        if known is None or any(path[: len(each)] == each or each[: len(path)] == path for each in given):
            at = re.fullmatch(re.escape(name) + r":(\d+)", problem.where)  # a YAML error
            found.append((int(at[1]) if at else float("inf"), problem))
            continue
        problem.place = f"{name}:{lines[known]}"
        found.append((lines[known], problem))
    return [problem for _, problem in sorted(found, key=lambda each: each[0])]


def _read_text(path: Path) -> str:
    remedy = "Give the path of a run file; the README has an example."
    try:
        return read_plain(path, most_bytes=_MOST_BYTES).decode("utf-8")
    except UnicodeDecodeError as error:
        got = f"byte {error.object[error.start]:#04x} at offset {error.start}"
        raise ConfigError(str(path), expected="UTF-8 text", got=got, remedy="Save it as UTF-8.") from None
    except OSError as error:
        known = {FileNotFoundError: "no such file", IsADirectoryError: "a folder"}
        got = known.get(type(error), error.strerror or str(error))
        raise ConfigError(str(path), expected="a run file that can be read", got=got, remedy=remedy) from None


def _resolve_paths(values: dict[str, object], folder: Path) -> list[ConfigError]:
    """Make paths absolute in place; return errors for missing ones. Values of wrong types are skipped."""
    problems = []
    for key, builtin in (("model", TINY_MODEL), ("tokenizer", BYTES_TOKENIZER)):
        name = values.get(key)
        if isinstance(name, str) and name and name != builtin:
            values[key] = _resolve_name(key, name, folder, problems)
    for section in (("data",), ("eval", "data")):
        for where, source in sections_at(values, section):
            if isinstance(source.get("path"), str | Path) and scheme_of(source["path"]) is None:
                source["path"] = _resolve(f"{where}.path", str(source["path"]), folder, problems, _FILE, _FOLDER)
            if source.get("dataset") in _OF_FILES:
                source["data_files"] = _absolute_files(source.get("data_files"), folder)
    for where, lora in sections_at(values, ("lora",)):
        if isinstance(lora.get("adapter"), str | Path):
            lora["adapter"] = _resolve(f"{where}.adapter", str(lora["adapter"]), folder, problems)
    for where, offload in sections_at(values, ("offload",)):
        if isinstance(offload.get("path"), str | Path):
            offload["path"] = _resolve(f"{where}.path", str(offload["path"]), folder, problems)
    measurements = values.get("measurements")
    if isinstance(measurements, str) and measurements not in ("", MEASURE_AT_START, MEASURE_NOTHING):
        words = f"{MEASURE_AT_START}, {MEASURE_NOTHING} or "
        values["measurements"] = _resolve("measurements", measurements, folder, problems, _FILE, words=words)
    output = values.get("output")
    if output == "":
        remedy = "Write for example `output: runs/first`."
        problems.append(ConfigError("output", expected="a folder", got="''", remedy=remedy))
    elif isinstance(output, str | Path):
        values["output"] = _absolute(str(output), folder)
        wrong = _no_path(values["output"])
        if wrong is not None:
            remedy = "Choose another output."
            problems.append(ConfigError("output", expected="a folder's path", got=wrong, remedy=remedy))
    return problems


def _resolve_name(key: str, name: str, folder: Path, problems: list[ConfigError]) -> str:
    """Make a local folder absolute and leave a hub name; a name that looks like a path must be a folder."""
    wrong = _no_path(name)
    if wrong is not None:
        remedy = f"Correct `{key}`."
        problems.append(ConfigError(key, expected="a folder's path or a hub name", got=wrong, remedy=remedy))
        return name
    local = _absolute(name, folder)
    if os.path.isdir(local):
        return local
    if name.startswith(_PATH_STARTS) or name.count("/") > 1 or os.path.isfile(local):
        got = "a file" if os.path.isfile(local) else "nothing there"
        remedy = f"Correct `{key}`; relative paths start from the run file's folder."
        problems.append(ConfigError(key, expected="an existing folder", got=f"{local}: {got}", remedy=remedy))
    return name


def _resolve(where: str, name: str, folder: Path, problems: list[ConfigError], *kinds: str, words: str = "") -> str:
    """Make a path of one of these kinds absolute (default: a folder). words: other allowed values, for the error."""
    kinds = kinds or (_FOLDER,)
    local = _absolute(name, folder) if name else ""
    there = _FILE if os.path.isfile(local) else _FOLDER if os.path.isdir(local) else None
    if there not in kinds:
        found = f"a {there}" if there else "not a regular file" if os.path.exists(local) else "nothing there"
        expected, got = f"{words}an existing {' or '.join(kinds)}", f"{local}: {found}" if name else "''"
        remedy = "Correct the path; relative paths start from the run file's folder."
        problems.append(ConfigError(where, expected=expected, got=got, remedy=remedy))
    return local


def _no_path(path: str) -> str | None:
    """Return the reason why no file can have such a path, or None."""
    try:
        raw = os.fsencode(path)
    except UnicodeEncodeError:
        return f"{path!r}, which no file system can store"
    if b"\0" in raw:
        return f"{path!r}, with a NUL"
    longest = max(map(len, raw.split(b"/")))
    if longest > _MOST_NAME_BYTES or len(raw) > _MOST_PATH_BYTES:
        return f"{len(raw)} bytes, the longest name {longest} (at most {_MOST_PATH_BYTES} and {_MOST_NAME_BYTES})"
    return None


def _absolute(name: str, folder: Path) -> str:
    """Join, expand `~` and drop `..`; keep links."""
    return os.path.abspath(os.path.join(folder, os.path.expanduser(name)))


def _absolute_files(files: object, folder: Path) -> object:
    """Make names and patterns of files of this machine absolute; leave URLs."""
    if isinstance(files, list | tuple):
        return [_absolute_files(each, folder) for each in files]
    return _absolute(files, folder) if isinstance(files, str) and scheme_of(files) is None else files


def apply_overrides(values: dict[str, object], overrides: Sequence[str]) -> list[ConfigError]:
    """Write each override into `values`, in order, so that the last one wins; return the errors.

    Keys are joined by dots; a number is the index of an existing list entry. Missing sections and unknown keys are
    created.
    """
    problems: list[ConfigError] = []
    for override in overrides:
        where = f"overrides {override}"
        key, equals, text = override.partition("=")
        path = [part.strip() for part in key.split(".")]
        if not equals or not all(path):
            remedy = "Write for example optimizer.lr=3e-4."
            problems.append(ConfigError(where, expected="key=value", got=repr(override), remedy=remedy))
            continue
        try:
            value, found = parse_values(text, where)
            problems += found
            _write(values, path, value)
        except ConfigError as error:
            problems.append(error)
    return problems


def _write(values: dict[str, object], path: Sequence[str], value: object) -> None:
    target: Any = values  # mapping or list; `_step` returns the key or index into it
    for depth, part in enumerate(path):
        step = _step(target, part, path[: depth + 1])
        if depth == len(path) - 1:
            target[step] = value
            return
        below = target[step] if isinstance(target, list) else target.get(step)
        if below is None:
            below = {}
            target[step] = below
        if not isinstance(below, dict | list):
            prefix = ".".join(path[: depth + 1])
            where, expected = f"overrides {'.'.join(path)}", f"keys in `{prefix}`"
            raise ConfigError(where, expected=expected, got=f"the value {below!r}", remedy=f"Set `{prefix}` itself.")
        target = below


def _step(target: dict | list, part: str, path: Sequence[str]) -> Any:
    if isinstance(target, dict):
        return part
    if part.isascii() and part.isdecimal() and len(part) < _MOST_DIGITS and int(part) < len(target):
        return int(part)
    expected = f"an index from 0 to {len(target) - 1}" if target else "a list with entries"
    remedy = f"Name an entry that the run file has, or set `{'.'.join(path[:-1])}` as a whole."
    raise ConfigError(f"overrides {'.'.join(path)}", expected=expected, got=repr(part), remedy=remedy)
