"""Costs from a user's file: the four coefficients, and every way to get them wrong."""

import pytest

from lengthwise.core.errors import ConfigError, Problems
from lengthwise.cost import Cost
from lengthwise.cost.costs import cost_from_file


def test_cost_from_file_takes_what_is_left_out_as_zero(tmp_path):
    path = tmp_path / "cost.json"
    path.write_text('{"linear_seconds": 2, "ring_seconds": 0.5}')
    cost = cost_from_file(path)
    assert cost == Cost(linear_seconds=2.0, ring_seconds=0.5, version=cost.version)
    assert cost.version == "given/1 linear_seconds=2.0 ring_seconds=0.5"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "JSON"),
        ("[1]", "an object with quadratic_seconds"),
        ("{}", "at least one"),
        ('{"linear_seconds": 0, "fixed_seconds": 0.0}', "at least one"),
        ('{"linear_second": 1}', "Did you mean `linear_seconds`"),
        ('{"hop_seconds": 1}', "hop_seconds"),
        ('{"linear_seconds": -1}', "linear_seconds.*got -1"),
        ('{"linear_seconds": NaN}', "linear_seconds.*got NaN"),
        ('{"linear_seconds": Infinity}', "linear_seconds.*got Infinity"),
        ('{"linear_seconds": 1e400}', "linear_seconds"),
        ('{"linear_seconds": 1%s}' % ("0" * 400), "linear_seconds"),
        ('{"linear_seconds": true}', "linear_seconds.*got true"),
        ('{"linear_seconds": "1"}', "linear_seconds"),
        ('{"linear_seconds": null}', "linear_seconds.*got null"),
        ('{"linear_seconds": [[1]]}', "linear_seconds"),
        ('{"linear_seconds": 1, "linear_seconds": 2}', 'the key "linear_seconds" twice'),
    ],
)
def test_cost_from_file_refuses_what_is_no_cost(tmp_path, text, told):
    path = tmp_path / "cost.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=rf"(?s)cost\.json.*{told}"):
        cost_from_file(path)


def test_cost_from_file_tells_all_problems_at_once(tmp_path):
    path = tmp_path / "cost.json"
    path.write_text('{"linear_seconds": -1, "ring_seconds": NaN, "speed": 3}')
    with pytest.raises(Problems) as caught:
        cost_from_file(path)
    assert [problem.where.rpartition(": ")[2] for problem in caught.value.problems] == [
        "speed", "linear_seconds", "ring_seconds"
    ]  # fmt: skip
