"""YAML text to plain values: the scalars of YAML 1.2, and nothing that could run or unfold."""

import math

import pytest
import yaml

from lengthwise.config.document import dump_values, parse_values
from lengthwise.core.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3e-4", 3e-4),
        ("3.0e-4", 3e-4),
        ("1E5", 1e5),
        (".5", 0.5),
        ("5.", 5.0),
        ("+7", 7),
        ("010", 10),
        ("0o17", 15),
        ("0xFf", 255),
        ("-.inf", -math.inf),
        (".INF", math.inf),
        ("~", None),
        ("", None),
        ("Null", None),
        ("TRUE", True),
        ("false", False),
        ("yes", "yes"),
        ("off", "off"),
        ("1_000", "1_000"),
        ("1:30", "1:30"),
        ("2020-01-01", "2020-01-01"),
        ("e5", "e5"),
        ("'3'", "3"),
        ("!!str 3", "3"),
        ("{a: [1, 2.0]}", {"a": [1, 2.0]}),
        ("{<<: 1}", {"<<": 1}),
    ],
)
def test_document_scalar_follows_yaml_1_2(text, value):
    found, problems = parse_values(text, "f")
    assert problems == []
    assert (found, type(found)) == (value, type(value))


@pytest.mark.parametrize(
    "text",
    [
        "!!python/object/apply:os.system ['true']",
        "!!python/name:os.system",
        "!local x",
        "!!binary aGk=",
        "!!set {a}",
        "!!int abc",
        "{1: 2}",
        "{[a]: 2}",
        "9" * 5000,
    ],
)
def test_document_what_is_no_plain_value_is_a_problem(text):
    _, problems = parse_values(f"a: 1\nb: {text}", "f")
    assert [problem.where for problem in problems] == ["f:2"]


def test_document_key_twice_names_both_lines():
    values, problems = parse_values("a: 1\nb: {c: 1,\n  c: 2}\na: 3\n", "f")
    assert values == {"a": 1, "b": {"c": 1}}
    assert [(problem.where, problem.got) for problem in problems] == [
        ("f:3", "`c` again, first on line 2"),
        ("f:4", "`a` again, first on line 1"),
    ]


def test_document_aliases_cannot_unfold_and_brackets_not_go_too_deep():
    bomb = "a: &a [x, x]\nb: &b [*a, *a]\nc: [*b, *b]\n"
    with pytest.raises(ConfigError, match="without aliases"):
        parse_values(bomb, "f")
    with pytest.raises(ConfigError, match="at most 50 levels"):
        parse_values("x: " + "[" * 10_000_000, "run.yaml")
    found, _ = parse_values(".NaN", "f")
    assert math.isnan(found)


@pytest.mark.parametrize("text", ["3e-4", "0o17", "no", "1_0", "", "null", "1:30", "a: b", "- x", "é"])
def test_document_dumped_text_is_text_to_either_yaml(text):
    written = dump_values({"k": text})
    assert parse_values(written, "f") == ({"k": text}, [])
    assert yaml.safe_load(written) == {"k": text}
