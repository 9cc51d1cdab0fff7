"""YAML text to plain values: numbers and words as users mean them, and nothing that could run or unfold."""

import math

import pytest
import yaml

from lengthwise.config.document import dump_values, parse_values
from lengthwise.core.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3e-4", 3e-4), ("1E5", 1e5), (".5", 0.5), ("+7", 7), ("0o17", 15), ("-.inf", -math.inf), ("010", "010"),
        ("~", None), ("TRUE", True), ("yes", "yes"), ("1_000", "1_000"), ("1:30", "1:30"), ("2020-01-01", "2020-01-01"),
        ("!!str 3", "3"), ("{a: [1, 2.0]}", {"a": [1, 2.0]}),
    ],
)  # fmt: skip
def test_document_scalar_is_what_a_user_means(text, value):
    found, problems = parse_values(text, "f")
    assert problems == []
    assert (found, type(found)) == (value, type(value))


@pytest.mark.parametrize("text", ["!!python/object/apply:os.system ['true']", "!local x", "{[a]: 2}", "9" * 5000, "*a"])
def test_document_what_is_no_plain_value_is_refused(text):
    with pytest.raises(ConfigError, match="expected YAML"):
        parse_values(f"a: &a 1\nb: {text}", "f")


def test_document_key_twice_names_both_lines():
    _, problems = parse_values("a: 1\nb: {c: 1,\n  c: 2}\na: 3\n1: 2\n'1': 2", "f")
    assert [(problem.where, problem.got) for problem in problems] == [
        ("f:4", "`a` again, first on line 1"),
        ("f:6", "`1` again, first on line 5"),
        ("f:3", "`c` again, first on line 2"),
    ]


@pytest.mark.parametrize("text", ["3e-4", "0o17", "no", "1_0", "", "null", "1:30", "a: b", "- x", "é"])
def test_document_dumped_text_is_text_to_either_yaml(text):
    written = dump_values({"k": text})
    assert parse_values(written, "f") == ({"k": text}, [])
    assert yaml.safe_load(written) == {"k": text}
