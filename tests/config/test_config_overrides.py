"""`--set a.b=value` on raw values."""

import pytest

from lengthwise.config.run_file import apply_overrides


def applied(*overrides):
    values = {"seed": 1, "data": [{"path": "a"}, {"path": "b"}], "eval": None, "optimizer": {"lr": 1.0}}
    return values, apply_overrides(values, overrides)


def test_override_reaches_keys_entries_and_sections_and_the_last_one_wins():
    values, problems = applied(
        "optimizer.lr=3e-4", "data.1.path=c", "seed = 5", "model=x=y", "eval.every_steps=5", "eval.every_steps=7",
        "a.b.c={d: [1]}",
    )  # fmt: skip
    assert problems == []
    assert values == {
        "seed": 5, "model": "x=y", "data": [{"path": "a"}, {"path": "c"}], "eval": {"every_steps": 7},
        "optimizer": {"lr": 3e-4}, "a": {"b": {"c": {"d": [1]}}},
    }  # fmt: skip
    values, _ = applied("data=[{python_stdlib: true}]", "optimizer=")
    assert (values["data"], values["optimizer"]) == ([{"python_stdlib": True}], None)


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("seed", "key=value"),
        ("=5", "key=value"),
        ("a..b=5", "key=value"),
        ("seed.x=5", "keys in `seed`"),
        ("data.2.path=x", "an index from 0 to 1"),
        ("data.-1.path=x", "an index from 0 to 1"),
        (f"data.{'9' * 5000}.path=x", "an index from 0 to 1"),
        ("data.first.path=x", "an index from 0 to 1"),
        ("seed=[1", "YAML"),
        ("seed={a: 1, a: 2}", "every key once"),
    ],
)
def test_override_malformed_is_a_problem(override, expected):
    _, problems = applied(override)
    assert [expected in problem.expected for problem in problems] == [True]
    assert problems[0].where.startswith("overrides ")
