"""`--set a.b=value` on raw values."""

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
