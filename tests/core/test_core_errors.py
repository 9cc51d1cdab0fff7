"""Problems told together, each once."""

import pytest

from lengthwise.core.errors import Collector, ConfigError, Problems, raise_problems


def problem(where: str) -> ConfigError:
    return ConfigError(where, expected="a", got="b", remedy="C.")


def test_collector_keeps_every_problem_once() -> None:
    collector = Collector()
    assert collector.attempt(lambda: 5) == 5
    for wheres in (["x"], ["x", "y"], ["z"], ["y"]):
        assert collector.attempt(lambda wheres=wheres: raise_problems([problem(where) for where in wheres])) is None
    with pytest.raises(Problems) as caught:
        collector.raise_all()
    assert [each.where for each in caught.value.problems] == ["x", "y", "z"]


def test_collector_lets_errors_that_are_not_ours_through() -> None:
    with pytest.raises(ZeroDivisionError):
        Collector().attempt(lambda: 1 / 0)


def test_control_characters_of_names_do_not_reach_the_terminal():
    name = "a\x1b[31m\x07\u202e\udc80é東.json"
    line = str(ConfigError(name, expected="a file", got=name, remedy=f"Correct {name}."))
    assert line.isprintable()
    assert line.count("a\\x1b[31m\\x07\\u202e\\udc80é東.json") == 3
