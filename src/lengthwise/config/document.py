"""YAML text to plain values, safely, and back.

Scalars follow the core schema of YAML 1.2 (in PyYAML's 1.1 `3e-4` is text and `no` is false). A foreign tag, an alias
(which could expand without end), a key that is not text and a repeated key are problems, reported with their line.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import yaml
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from lengthwise.core.errors import ConfigError

_TAG = "tag:yaml.org,2002:"
_CORE_SCALARS = (
    ("null", re.compile(r"~|null|Null|NULL|"), "~nN\0"),
    ("bool", re.compile(r"true|True|TRUE|false|False|FALSE"), "tTfF"),
    ("int", re.compile(r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+"), "-+0123456789"),
    (
        "float",
        re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)"),
        "-+.0123456789",
    ),
)
_MAX_DEPTH = 50
_OPENING = (
    yaml.FlowSequenceStartToken,
    yaml.FlowMappingStartToken,
    yaml.BlockSequenceStartToken,
    yaml.BlockMappingStartToken,
)
_CLOSING = (yaml.FlowSequenceEndToken, yaml.FlowMappingEndToken, yaml.BlockEndToken)


class _CoreLoader(yaml.SafeLoader):
    """PyYAML's safe loader with the scalars of YAML 1.2; only its nodes are used."""

    yaml_implicit_resolvers: dict = {}  # noqa: RUF012 - the name and shape are PyYAML's


class _CoreDumper(yaml.SafeDumper):
    """Quotes text that YAML 1.1 or 1.2 would read as another type."""


for _name, _pattern, _first in _CORE_SCALARS:
    _whole = re.compile(f"^(?:{_pattern.pattern})$")
    for _class in (_CoreLoader, _CoreDumper):
        _class.add_implicit_resolver(_TAG + _name, _whole, ["" if sign == "\0" else sign for sign in _first])


def parse_values(text: str, name: str) -> tuple[object, list[ConfigError]]:
    """Parse one YAML document into plain values; `name` is the file's, for messages.

    Syntax errors raise ConfigError; problems that leave the rest readable are returned beside the values.
    """
    try:
        depth = 0
        for token in yaml.scan(text, Loader=_CoreLoader):
            depth += isinstance(token, _OPENING) - isinstance(token, _CLOSING)
            if depth > _MAX_DEPTH:  # PyYAML takes minutes for a file of brackets
                raise _refuse(name, token.start_mark.line, f"at most {_MAX_DEPTH} levels", "deeper nesting")
            if isinstance(token, yaml.AliasToken):
                raise _refuse(name, token.start_mark.line, "a document without aliases", f"*{token.value}")
        root = yaml.compose(text, Loader=_CoreLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        got = f"{error.context or ''} {error.problem or ''}".strip()
        raise _refuse(name, mark.line if mark else 0, "YAML", got or "something else") from None
    except yaml.YAMLError as error:
        raise _refuse(name, None, "YAML", str(error)) from None
    except RecursionError:
        raise _refuse(name, None, f"at most {_MAX_DEPTH} levels", "deeper nesting") from None
    problems: list[ConfigError] = []
    return (None if root is None else _to_plain(root, name, problems, depth=0)), problems


def key_lines(text: str) -> dict[tuple[str, ...], int]:
    """Return the line, counted from 1, of every key and list entry of a valid document, by config path."""
    found: dict[tuple[str, ...], int] = {}

    def walk(node: Node | None, path: tuple[str, ...]) -> None:
        if isinstance(node, MappingNode):
            for key, value in node.value:
                found[(*path, str(key.value))] = key.start_mark.line + 1
                walk(value, (*path, str(key.value)))
        elif isinstance(node, SequenceNode):
            for index, entry in enumerate(node.value):
                found[(*path, str(index))] = entry.start_mark.line + 1
                walk(entry, (*path, str(index)))

    walk(yaml.compose(text, Loader=_CoreLoader), ())
    return found


def dump_values(values: Mapping[str, object]) -> str:
    """Return plain values as YAML, keys in their order."""
    return yaml.dump(values, Dumper=_CoreDumper, sort_keys=False, allow_unicode=True, width=120)


def _to_plain(node: Node, name: str, problems: list[ConfigError], *, depth: int) -> object:
    if depth > _MAX_DEPTH:
        raise _refuse(name, node.start_mark.line, f"at most {_MAX_DEPTH} levels", "deeper nesting")
    if isinstance(node, MappingNode) and node.tag == _TAG + "map":
        return _to_mapping(node, name, problems, depth=depth)
    if isinstance(node, SequenceNode) and node.tag == _TAG + "seq":
        return [_to_plain(item, name, problems, depth=depth + 1) for item in node.value]
    if isinstance(node, ScalarNode):
        return _to_scalar(node, name, problems)
    problems.append(_refuse(name, node.start_mark.line, "a value without a tag", node.tag))
    return None


def _to_mapping(node: MappingNode, name: str, problems: list[ConfigError], *, depth: int) -> dict[str, object]:
    values: dict[str, object] = {}
    lines: dict[str, int] = {}
    for key_node, value_node in node.value:
        line = key_node.start_mark.line
        key = _to_plain(key_node, name, problems, depth=depth + 1)
        value = _to_plain(value_node, name, problems, depth=depth + 1)
        if not isinstance(key, str):
            problems.append(_refuse(name, line, "a key that is text", repr(key)))
        elif key in values:
            got = f"`{key}` again, first on line {lines[key] + 1}"
            problems.append(_refuse(name, line, "every key once", got))
        else:
            values[key], lines[key] = value, line
    return values


def _to_scalar(node: ScalarNode, name: str, problems: list[ConfigError]) -> object:
    text, kind = node.value, node.tag.removeprefix(_TAG)
    patterns = {tag: pattern for tag, pattern, _ in _CORE_SCALARS}
    if kind == "str":
        return text
    if kind not in patterns or not patterns[kind].fullmatch(text):  # an explicit tag may sit on any text
        problems.append(_refuse(name, node.start_mark.line, "a value without a tag", f"{node.tag} {text!r}"))
        return None
    if kind == "null":
        return None
    if kind == "bool":
        return text.lower() == "true"
    try:
        if kind == "int":
            return int(text, 8 if text.startswith("0o") else 16 if text.startswith("0x") else 10)
    except ValueError as error:  # Python refuses to convert thousands of digits
        problems.append(_refuse(name, node.start_mark.line, "a number of sensible size", str(error)))
        return None
    return float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))


def _refuse(name: str, line: int | None, expected: str, got: str) -> ConfigError:
    where = name if line is None else f"{name}:{line + 1}"
    return ConfigError(where, expected=expected, got=got, remedy="Correct the line.")
