"""YAML text to plain values, by PyYAML's safe loader, and back."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import yaml
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from lengthwise.core.errors import ConfigError

_TAG = "tag:yaml.org,2002:"
# Plain text that is a value; for PyYAML `3e-4` would be text, `off` false and `1:30` a number.
_SCALARS = {
    "null": (r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    "bool": (r"true|True|TRUE|false|False|FALSE", [*"tTfF"]),
    "int": (r"[-+]?(0|[1-9][0-9]*)|0o[0-7]+|0x[0-9a-fA-F]+", [*"-+0123456789"]),
    "float": (
        r"[-+]?(\.[0-9]+|[0-9]+\.[0-9]*|[0-9]+(?=[eE]))([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        None,
    ),
}


class _Loader(yaml.SafeLoader):
    """Reads these scalars, keys as text, and no alias, which could expand without end.

    twice: (line, key, line of its first use) of every repeated key.
    """

    yaml_implicit_resolvers: dict = {}  # noqa: RUF012 - the name and shape are PyYAML's

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.twice: list[tuple[int, str, int]] = []

    def compose_node(self, parent: Node | None, index: Any) -> Node | None:
        if self.check_event(yaml.AliasEvent):
            raise yaml.MarkedYAMLError(problem="an alias, which is not read", problem_mark=self.peek_event().start_mark)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: MappingNode, deep: bool = False) -> dict:
        lines: dict[str, int] = {}
        for key, _ in node.value:
            key.tag, line = _TAG + "str", key.start_mark.line + 1
            if isinstance(key, ScalarNode) and key.value in lines:
                self.twice.append((line, key.value, lines[key.value]))
            elif isinstance(key, ScalarNode):
                lines[key.value] = line
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    """Quotes text that `_Loader` or PyYAML would read as another type."""


for _name, (_pattern, _first) in _SCALARS.items():
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(_TAG + _name, re.compile(f"^(?:{_pattern})$"), _first or [*"-+.0123456789"])


def parse_values(text: str, name: str) -> tuple[object, list[ConfigError]]:
    """Parse one YAML document into plain values, and errors for repeated keys; refuse other texts. name: the file's."""
    try:
        loader = _Loader(text)
        values = loader.get_single_data()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        got = f"{error.context or ''} {error.problem or ''}".strip()
        raise _refuse(name, mark.line + 1 if mark else None, "YAML", got) from None
    except RecursionError:
        raise _refuse(name, None, "a few levels", "deeper nesting") from None
    except (yaml.YAMLError, ValueError, AttributeError) as error:  # the last two: a tag or a number on other text
        raise _refuse(name, None, "YAML", str(error)) from None
    return values, [
        _refuse(name, line, "every key once", f"`{key}` again, first on line {first}")
        for line, key, first in loader.twice
    ]


def key_lines(text: str) -> dict[tuple[str, ...], int]:
    """Return the line, from 1, of every key and list entry of a valid document, by config path."""
    return dict(_lines_below(yaml.compose(text, Loader=_Loader), ()))


def _lines_below(node: Node | None, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], int]]:
    found = [(key.value, key, value) for key, value in node.value] if isinstance(node, MappingNode) else []
    if isinstance(node, SequenceNode):
        found = [(str(number), entry, entry) for number, entry in enumerate(node.value)]
    for name, place, value in found:
        yield (*path, name), place.start_mark.line + 1
        yield from _lines_below(value, (*path, name))


def dump_values(values: Mapping[str, object]) -> str:
    """Return plain values as YAML, keys in their order."""
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


def _refuse(name: str, line: int | None, expected: str, got: str) -> ConfigError:
    where = name if line is None else f"{name}:{line}"
    return ConfigError(where, expected=expected, got=got, remedy="Correct the line.")
