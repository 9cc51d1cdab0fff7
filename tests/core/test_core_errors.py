"""Errors in the names of a command, several at once, and the nearest of the names that there are."""

import pickle
import signal

import pytest

from lengthwise.core import errors
from lengthwise.core.errors import ConfigError, PlanError, Problems, short_traceback
from lengthwise.core.names import did_you_mean

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
    remedy = 'Write {sequences: 64} or {"tokens": 1}.'
    assert error("x", remedy).render(NAMES).endswith(remedy), "no names"


def test_all_of_several_problems_are_named() -> None:
    both = Problems([error("ranks"), ConfigError("speeds", expected="", got="", remedy="")])
    assert [line.split()[1] for line in both.render(NAMES).splitlines()] == ["--ranks:", "--speeds:"]


def test_code_of_a_remedy_keeps_its_lines_and_names_with_line_ends_do_not() -> None:
    made = ConfigError("a\nb", expected="c", got="d\ne", remedy="Run:\n    x = 1\n    f(x, \x1b)")
    assert str(made) == "error[config] a b: expected c; got d e. Run:\n    x = 1\n    f(x, \\x1b)"


def test_control_characters_of_names_do_not_reach_the_terminal():
    name = "a\x1b[31m\x07\u202e\udc80é東.json"
    line = str(ConfigError(name, expected="a file", got=name, remedy=f"Correct {name}."))
    assert line.isprintable()
    assert line.count("a\\x1b[31m\\x07\\u202e\\udc80é東.json") == 3


@pytest.mark.parametrize(
    ("typed", "asked"),
    [
        ("h1000", "Did you mean `h100`?"),
        ("h10", "Did you mean `h100`?"),
        ("a100", None),  # another device, not a slip of the finger
        ("trian", None),
    ],
)
def test_did_you_mean_asks_only_for_what_may_have_been_meant(typed: str, asked: str | None) -> None:
    assert did_you_mean(typed, ["h100", "bytescale-gpu", "cpu"]) == asked


@pytest.mark.parametrize(("cause", "frames"), [(None, ["test_", "call"]), (ValueError(3), ["test_", "call", "fail"])])
def test_an_error_of_ours_shows_no_frame_below_the_public_call_unless_another_caused_it(cause, frames) -> None:
    @short_traceback
    def fail() -> None:
        raise error("lr") from cause

    with pytest.raises(PlanError) as raised:
        fail()
    names = [each.name for each in raised.traceback]
    assert len(names) == len(frames)
    assert all(name.startswith(start) for name, start in zip(names, frames, strict=True))
    assert raised.value.__cause__ is cause


@pytest.mark.parametrize(("launcher", "local_rank", "waits"), [("job", "1", 1), ("job", "0", 0), ("", "1", 0)])
def test_under_torchrun_other_ranks_leave_an_error_to_the_first_once(monkeypatch, launcher, local_rank, waits) -> None:
    slept: list[float] = []
    monkeypatch.setattr(errors.time, "sleep", slept.append)
    monkeypatch.setenv("LOCAL_RANK", local_rank)
    if launcher:
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", launcher)

    @short_traceback
    @short_traceback
    def fail() -> None:
        raise error("lr")

    before = signal.signal(signal.SIGTERM, lambda *_: None)
    with pytest.raises(PlanError):
        fail()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    assert slept == []  # the signal would not end it
    with pytest.raises(PlanError):
        fail()
    signal.signal(signal.SIGTERM, before)
    assert len(slept) == waits
