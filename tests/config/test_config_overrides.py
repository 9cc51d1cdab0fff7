"""`--set a.b=value` on raw values."""

import pytest

from lengthwise.config.load import apply_overrides


def applied(*overrides):
    values = {"seed": 1, "data": [{"path": "a"}, {"path": "b"}], "eval": None, "optimizer": {"lr": 1.0}}
    return values, apply_overrides(values, overrides)


def test_override_reaches_keys_and_list_entries():
    values, problems = applied("optimizer.lr=3e-4", "data.1.path=c", "seed = 5", "model=x=y")
    assert problems == []
    assert values["optimizer"] == {"lr": 3e-4}
    assert values["data"][1] == {"path": "c"}
    assert values["model"] == "x=y"
    assert values["seed"] == 5


def test_override_makes_missing_sections_and_the_last_one_wins():
    values, problems = applied("eval.every_steps=5", "eval.every_steps=7", "a.b.c={d: [1]}")
    assert problems == []
    assert values["eval"] == {"every_steps": 7}
    assert values["a"] == {"b": {"c": {"d": [1]}}}


def test_override_replaces_a_section_as_a_whole():
    values, _ = applied("data=[{python_stdlib: true}]", "optimizer=")
    assert values["data"] == [{"python_stdlib": True}]
    assert values["optimizer"] is None


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("seed", "key=value"),
        ("=5", "key=value"),
        ("a..b=5", "key=value"),
        ("seed.x=5", "to have keys"),
        ("data.2.path=x", "an index from 0 to 1"),
        ("data.-1.path=x", "an index from 0 to 1"),
        ("data.first.path=x", "an index from 0 to 1"),
        ("seed=[1", "YAML"),
        ("seed={a: 1, a: 2}", "every key once"),
    ],
)
def test_override_malformed_is_a_problem(override, expected):
    _, problems = applied(override)
    assert [expected in problem.expected for problem in problems] == [True]
    assert problems[0].where.startswith("overrides ")


def test_override_of_an_index_of_thousands_of_digits_is_one_problem():
    (problem,) = apply_overrides({"data": [{}]}, [f"data.{'9' * 5000}.path=x"])
    assert "an index from 0 to 0" in str(problem)
