"""Errors in the names of a command."""

import pickle

import pytest

from lengthwise.core.errors import ConfigError, PlanError, Problems

NAMES = {"ranks": "--ranks", "capacity_tokens": "--capacity", "speeds": "--speeds", "skip_empty": "give --empty skip"}


def error(where: str, remedy: str = "") -> PlanError:
    return PlanError(where, expected="2 ranks", got="3 {ranks}", remedy=remedy)


@pytest.mark.parametrize(
    ("where", "told"),
    [
        ("ranks", "--ranks"),
        ("speeds: rank 3", "--speeds: rank 3"),
        ("ranks.json: capacity_tokens", "ranks.json: capacity_tokens"),
        ("ranks_per_node", "ranks_per_node"),
        ("my speeds", "my speeds"),
        ("--ranks", "--ranks"),
    ],
)
def test_the_place_of_an_error_is_named_by_its_option(where: str, told: str) -> None:
    assert error(where).render(NAMES).startswith(f"error[plan] {told}: expected 2 ranks; got 3 {{ranks}}.")
    assert str(error(where)).startswith(f"error[plan] {where}: expected")


def test_remedies_name_options_as_the_command_does_and_prose_keeps_its_words() -> None:
    made = error("x", "Use 2 ranks, raise {capacity_tokens} to 5, or {skip_empty|set data.0.empty: skip}.")
    assert made.render(NAMES).endswith("Use 2 ranks, raise --capacity to 5, or give --empty skip.")
    assert str(made).endswith("Use 2 ranks, raise capacity_tokens to 5, or set data.0.empty: skip.")
    assert pickle.loads(pickle.dumps(made)).render(NAMES) == made.render(NAMES)
    assert made.key == "x"


def test_what_is_no_name_in_braces_stays() -> None:
    remedy = 'Write {sequences: 64} or {"tokens": 1}.'
    assert error("x", remedy).render(NAMES).endswith(remedy)


def test_all_of_several_problems_are_named() -> None:
    both = Problems([error("ranks"), ConfigError("speeds", expected="", got="", remedy="")])
    assert [line.split()[1] for line in both.render(NAMES).splitlines()] == ["--ranks:", "--speeds:"]
