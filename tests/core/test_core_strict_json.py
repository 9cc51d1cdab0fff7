"""JSON that people write: every key once, and problems in words."""

import pytest

from lengthwise.core.errors import PlanError
from lengthwise.core.files import parse_json, read_json
from lengthwise.core.plan import Plan


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('{"a": 1, "b": {"c": 1, "c": 1}}', 'the key "c" twice'),
        ("", "an empty file"),
        (" \n", "an empty file"),
        ("\ufeff{}", "byte order mark"),
        ('{"a": 1,\n "b"}', "line 2, column 5"),
        ("[" * 100_000, "nesting"),
        ("1" * 5000, "digits"),
    ],
)
def test_parse_json_says_what_is_wrong(text: str, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        parse_json(text)


def test_parse_json_reads_what_json_reads() -> None:
    assert parse_json('{"a": [1, 2.5, null, {"a": "b"}], "c": true}\r\n') == {
        "a": [1, 2.5, None, {"a": "b"}],
        "c": True,
    }


def test_read_json_says_why_a_file_cannot_be_read(tmp_path) -> None:
    with pytest.raises(ValueError, match="No such file"):
        read_json(tmp_path / "none.json")
    with pytest.raises(ValueError, match="directory"):
        read_json(tmp_path)
    (tmp_path / "odd.json").write_bytes(b"[1, \xff]")
    with pytest.raises(ValueError, match="byte 0xff at offset 4"):
        read_json(tmp_path / "odd.json")


def test_plan_files_with_a_key_twice_are_refused() -> None:
    text = Plan(ranks=1, layers=1, capacity=5, tokens=(1,), microbatches=()).to_json()
    Plan.from_json(text)
    with pytest.raises(PlanError, match=r"capacity.*twice"):
        Plan.from_json(text.replace('"ranks": 1', '"capacity": 9, "ranks": 1'))
