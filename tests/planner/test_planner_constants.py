"""Tuned constants of the planner: each says why it is there, and stands on the page of what changing it does."""

import pytest

import constants
from constants import Batch, Constant
from lengthwise.core.shape import Cluster
from lengthwise.planner.placement import annealing
from pages import FOLDER, table_rows
from planners import TERMS

KNOWN = constants.constants()


def test_constants_say_why_they_are_there() -> None:
    assert KNOWN
    assert [constant.title for constant in KNOWN if not constant.reason] == []


def test_constants_are_those_of_the_page() -> None:
    rows = table_rows(FOLDER / "constants.md", heading="<!-- constants: begin")
    assert {row["constant"].strip("`") for row in rows} == {constant.title for constant in KNOWN}


@pytest.mark.parametrize(
    ("value", "tried"),
    [
        (6, [3, 12]),
        (1, [1, 2]),
        (0.5, [0.25, 1.0]),
        (1.01, [pytest.approx(1.005), pytest.approx(1.02)]),
        (1 - 1e-9, [pytest.approx(1 - 5e-10, abs=1e-12), pytest.approx(1 - 2e-9, abs=1e-12)]),
        ((1.0, 2.0, 3.0), [(1.0, 3.0)]),
    ],
)
def test_changed_halves_and_doubles(value, tried) -> None:
    assert [new for _, new in constants.changed(value)] == tried


def test_with_value_changes_what_is_planned_and_puts_it_back() -> None:
    name = "MOST_WORK"  # imported by the portfolio, so held twice
    most_work = annealing.MOST_WORK
    held = Constant(module="lengthwise.planner.placement.annealing", name=name, reason="")
    batch = Batch(tokens=[4553, 1664, 513], cluster=Cluster(ranks=8, capacity_tokens=8192), cost=TERMS)
    (as_is, _), (annealed_less, _) = batch.plan(), constants.with_value(held, 0, [batch])[0]
    assert as_is < annealed_less
    assert most_work == annealing.MOST_WORK
    assert batch.plan()[0] == as_is
