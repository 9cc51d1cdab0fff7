"""Reports every problem of a run file, or of a session's settings, at once: wrong types and broken rules."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, TypeAlias, get_args

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from lengthwise.config.optimizer_config import REFUSED_NAMES
from lengthwise.config.schema import RunConfig
from lengthwise.config.setting_types import Settings
from lengthwise.config.training import TrainingSettings
from lengthwise.core.errors import ConfigError, KeyProblem
from lengthwise.core.names import nearest_name

KeyPath: TypeAlias = tuple[str, ...]

_MOST_TOLD = 100
_UNKNOWN, _MISSING = "unknown key", "nothing"  # as the got of an error
_NAMED = re.compile(r"`([\w.]+)")  # a key in a remedy
_CLOSE_KEY = 0.6  # of many keys: `packing` and `streaming` have 0.5
# Keys of other trainers whose names here are not alike.
_OTHER_KEYS: Mapping[str, str] = {
    "bf16": "`precision: bf16`",
    "gradient_accumulation_steps": "leave it out, the planner makes the microbatches",
    "gradient_checkpointing": "`recompute: layer`",
    "learning_rate": "`optimizer.lr`",
    "lr_scheduler_type": "`optimizer.schedule`",
    "max_length": "`data.0.max_tokens`",
    "max_steps": "`steps`",
    "model_name_or_path": "`model`",
    "num_train_epochs": "`epochs`",
    "per_device_train_batch_size": "`global_batch: {sequences: n}`, of all ranks",
}

_EXPECTED: Mapping[str, Callable[[dict], str]] = {
    "bool_type": lambda _: "true or false",
    "finite_number": lambda _: "a finite number",
    "float_type": lambda _: "a number",
    "greater_than": lambda ctx: f"more than {ctx['gt']:g}",
    "greater_than_equal": lambda ctx: f"at least {ctx['ge']:g}",
    "int_type": lambda _: "a whole number",
    "less_than_equal": lambda ctx: f"at most {ctx['le']:g}",
    "less_than": lambda ctx: f"less than {ctx['lt']:g}",
    "literal_error": lambda ctx: ctx["expected"].replace("'", ""),
    "missing": lambda _: "a value, as it has no default",
    "none_required": lambda _: "null",
    "model_type": lambda _: "a mapping of keys",
    "path_type": lambda _: "a path",
    "string_too_short": lambda _: "text that is not empty",
    "string_type": lambda _: "text",
    "too_long": lambda ctx: f"at most {ctx['max_length']} entries",
    "too_short": lambda ctx: f"at least {ctx['min_length']} entry",
    "tuple_type": lambda _: "a list",
}
_UNCLEAR = ("missing", "model_type", "tuple_type")  # errors that need the key's description
_KINDS = {bool: "true/false", int: "a whole number", float: "a number", str: "text", list: "a list", dict: "a mapping"}


def find_problems(values: Mapping[str, object], root: type[TrainingSettings] = RunConfig) -> list[ConfigError]:
    """Return every problem of raw `values` as a `root`."""
    return _Reading(root).problems_of(values)


@cache
def sections_of(root: type[Settings]) -> Mapping[KeyPath, type[Settings]]:
    """Return the class of each section of a record, by its config path without list indices."""
    found: dict[KeyPath, type[Settings]] = {(): root}
    for name, each in root.model_fields.items():
        for section in _sections_in(each.annotation):
            found |= {(name, *path): inner for path, inner in sections_of(section).items()}
    return found


def _sections_in(annotation: Any) -> Iterator[type[Settings]]:
    if isinstance(annotation, type) and issubclass(annotation, Settings):
        yield annotation
    for each in get_args(annotation):
        yield from _sections_in(each)


@dataclass(slots=True)
class _Reading:
    """Finds problems of raw values. root: record to check. listed: sections whose keys a message has listed already."""

    root: type[TrainingSettings]
    listed: set[type[Settings]] = field(default_factory=set)

    def problems_of(self, values: Mapping[str, object]) -> list[ConfigError]:
        problems, usable = list[ConfigError](), values
        try:
            self.root.model_validate(values)
        except ValidationError as error:
            details = [each for each in error.errors(include_url=False) if not _reported_elsewhere(each)]
            once = self._once_a_field(details)
            problems += _without_misspelled([self._to_problem(detail) for detail in once[:_MOST_TOLD]])
            if len(once) > _MOST_TOLD:
                got, expected = f"{len(once) - _MOST_TOLD:,} more problems", f"the keys of a {self.root.door}"
                problems.append(ConfigError(self.root.door, expected=expected, got=got, remedy="Correct these first."))
            usable = self._usable(values, once)
        rest = {str(rule) for rule in self._broken_rules(usable)}  # rules that only a refused value breaks are noise
        return problems + [rule for rule in self._broken_rules(values) if str(rule) in rest]

    def _usable(self, values: Mapping[str, object], details: Sequence[ErrorDetails]) -> dict[str, object]:
        """Return a copy of raw values without the refused ones, and with misspelled keys corrected."""
        kept: dict[str, object] = copy.deepcopy(dict(values))
        for detail in details:
            unknown = detail["type"] == "extra_forbidden"
            place = detail["loc"] if unknown else self._of_field(detail["loc"])
            inside: Any = kept
            try:
                for part in place[:-1]:
                    inside = inside[part]
                value = inside.pop(place[-1]) if isinstance(inside, dict) else None
            except (KeyError, IndexError, TypeError):
                continue
            section = self._section(place[:-1]) if unknown else None
            near = None if section is None else nearest_name(place[-1], section.model_fields, close=_CLOSE_KEY)
            if near is not None and near not in inside:
                inside[near] = value
        return kept

    def _once_a_field(self, details: Sequence[ErrorDetails]) -> list[ErrorDetails]:
        """Join pydantic's messages about one field that allows several types."""
        found: dict[tuple[int | str, ...], list[ErrorDetails]] = {}
        for detail in details:
            loc = detail["loc"] if detail["type"] == "extra_forbidden" else self._of_field(detail["loc"])
            found.setdefault(loc, []).append(detail)
        return [
            each[0]
            if len(each) == 1
            else {**each[0], "loc": loc, "type": "choice", "msg": " or ".join(dict.fromkeys(map(expected_value, each)))}
            for loc, each in found.items()
        ]

    def _of_field(self, loc: tuple[int | str, ...]) -> tuple[int | str, ...]:
        for end in range(len(loc), 0, -1):
            section = self._section(loc[: end - 1])
            if isinstance(loc[end - 1], int) or (section is not None and loc[end - 1] in section.model_fields):
                return loc[:end]
        return loc

    def _to_problem(self, detail: ErrorDetails) -> ConfigError:
        loc, kind, value = detail["loc"], detail["type"], detail["input"]
        where = ".".join(map(str, loc)) or self.root.door
        if kind == "extra_forbidden":
            remedy = self._unknown_remedy(str(loc[-1]), self._section(loc[:-1]) or self.root)
            return KeyProblem(where, expected="a known key", got=_UNKNOWN, remedy=remedy)
        got = _MISSING if kind == "missing" else shown(value)
        return KeyProblem(where, expected=expected_value(detail), got=got, remedy=self._remedy(detail))

    def _unknown_remedy(self, key: str, section: type[Settings]) -> str:
        """Return what to write: a section's key, a similar name, or the name of another trainer's key here."""
        places = dict[str, list[str]]()
        for path, each in sections_of(self.root).items():
            if section in (self.root, each):
                for name in each.model_fields:
                    place = name if each is section else ".".join((*path, name)).replace("data.", "data.0.")
                    places.setdefault(name, []).append(f"`{place}`")
        others = {name: hint for name, hint in _OTHER_KEYS.items() if self._has_keys_of(hint)}
        near = nearest_name(key, {*places, *others}, close=_CLOSE_KEY)
        if near is not None:
            return others.get(near) or " or ".join(dict.fromkeys(places[near]))
        if section is self.root or section in self.listed:
            return f"no key is called so; {self.root.page} has all keys"
        self.listed.add(section)
        return f"one of {', '.join(sorted(section.model_fields))}"

    def _has_keys_of(self, hint: str) -> bool:
        return all(name.partition(".")[0] in self.root.model_fields for name in _NAMED.findall(hint))

    def _remedy(self, detail: ErrorDetails) -> str:
        """Return what to write in place of a value, or "" if the expected value says it."""
        names = [str(part) for part in detail["loc"] if isinstance(part, str)]
        section, kind, value = self._section(names[:-1]), detail["type"], detail["input"]
        found = section.model_fields.get(names[-1]) if section and names else None
        if found is not None and kind == "literal_error" and isinstance(value, str):
            if value in REFUSED_NAMES.get(names[-1], {}):
                return REFUSED_NAMES[names[-1]][value].removeprefix("Here it is ")
            kinds = getattr(found.annotation, "__args__", ())
            near = nearest_name(value, [str(name) for each in kinds for name in getattr(each, "__args__", (each,))])
            return f"`{near}`, of {expected_value(detail)}" if near else ""
        if found is not None and kind in _UNCLEAR:
            return f"{expected_value(detail)}: {re.split('[;(]', str(found.description))[0].strip()}"
        return ""

    def _section(self, loc: Sequence[int | str]) -> type[Settings] | None:
        return sections_of(self.root).get(tuple(part for part in loc if isinstance(part, str)))

    def _broken_rules(self, values: Mapping[str, object]) -> Iterator[ConfigError]:
        """Yield the broken rules of every section; pydantic checks none after a wrong type."""
        for path, section in sections_of(self.root).items():
            for where, part in sections_at(values, path):
                for rule in section.broken_rules(part):
                    rule.where = ".".join(filter(None, (where, rule.where))) or self.root.door
                    yield rule


def _without_misspelled(problems: Sequence[ConfigError]) -> list[ConfigError]:
    """Return problems without missing keys for which a misspelled or foreign key stands."""
    meant = set[str]()
    for each in problems:
        name = _NAMED.match(each.remedy) if each.got == _UNKNOWN else None
        if name is not None:
            meant |= {name[1], f"{each.where.rpartition('.')[0]}.{name[1]}"}
    return [each for each in problems if each.got != _MISSING or each.where not in meant]


def shown(value: object) -> str:
    """Return a value as the user wrote it, shortened, with its type."""
    if value is None:
        return "null"
    text = str(value).lower() if isinstance(value, bool) else repr(value)
    text = text if len(text) <= 60 else text[:57] + "..."
    return f"{text} ({_KINDS.get(type(value), type(value).__name__)})"


def _reported_elsewhere(detail: ErrorDetails) -> bool:
    """Return whether another check reports it: rules are checked apart, and lists with bad entries seem too short."""
    short = detail["type"] == "too_short" and len(detail["input"]) >= detail.get("ctx", {})["min_length"]
    return short or detail["type"] == "rule"


def expected_value(detail: ErrorDetails) -> str:
    """Return what pydantic accepts, in words that follow "expected"."""
    kind = detail["type"]
    if kind in _EXPECTED:
        return _EXPECTED[kind](detail.get("ctx", {}))
    return detail["msg"].removeprefix("Input should be ")


def sections_at(values: object, path: Sequence[str], where: str = "") -> Iterator[tuple[str, dict[str, object]]]:
    """Yield (path with indices, mapping) for the mappings at a config path, in every entry of lists."""
    if isinstance(values, list):
        for index, entry in enumerate(values):
            yield from sections_at(entry, path, f"{where}.{index}")
    elif isinstance(values, dict) and path:
        yield from sections_at(values.get(path[0]), path[1:], f"{where}.{path[0]}".lstrip("."))
    elif isinstance(values, dict):
        yield where, values
