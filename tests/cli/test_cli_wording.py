"""Errors in the words of a command."""

import pytest

from lengthwise.cli.wording import in_options, told_in_options
from lengthwise.core.errors import ConfigError, PlanError, Problems

OPTIONS = {
    "ranks": "--ranks",
    "capacity_tokens": "--capacity",
    "speeds": "--speeds",
    "--data.0.empty: skip": "--empty skip",
}


def error(where: str, remedy: str = "") -> PlanError:
    return PlanError(where, expected="2 ranks", got="3", remedy=remedy)


@pytest.mark.parametrize(
    ("where", "told"),
    [
        ("ranks", "--ranks"),
        ("speeds: rank 3", "--speeds: rank 3"),
        ("ranks.json: capacity_tokens", "ranks.json: --capacity"),
        ("ranks_per_node", "ranks_per_node"),
        ("my speeds", "my speeds"),
        ("--ranks", "--ranks"),
    ],
)
def test_the_place_of_an_error_is_named_by_its_option(where: str, told: str) -> None:
    assert in_options(error(where), OPTIONS).where == told


def test_prose_keeps_its_words_and_names_of_the_library_go() -> None:
    made = in_options(error("x", "Use 2 ranks, raise capacity_tokens to 5, or set --data.0.empty: skip."), OPTIONS)
    assert made.remedy == "Use 2 ranks, raise --capacity to 5, or set --empty skip."
    assert made.expected == "2 ranks"
    assert type(made) is PlanError


def test_all_of_several_problems_are_reworded() -> None:
    both = Problems([error("ranks"), ConfigError("speeds", expected="", got="", remedy="")])
    with pytest.raises(Problems) as caught, told_in_options(OPTIONS):
        raise both
    assert [each.where for each in caught.value.problems] == ["--ranks", "--speeds"]
    with pytest.raises(ZeroDivisionError), told_in_options(OPTIONS):
        raise ZeroDivisionError
