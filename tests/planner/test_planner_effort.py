"""What tries beyond the search may cost: counted from the step's bound, in any plan a plan that can be run."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lengthwise.core.errors import ConfigError
from lengthwise.core.shape import Cluster
from lengthwise.cost import all_terms_cost, named_hardware, named_shape
from lengthwise.planner import PlanOptions, plan_step, portfolio, search
from lengthwise.planner.placement.annealing import Annealing
from lengthwise.planner.problem.effort import CHANGE_SECONDS
from lengthwise.program import check_plan

COST = all_terms_cost(named_shape("tiny"), named_hardware("cpu"))
TOKENS = [900, 700, 300, 120, 80, 60, 40, 30, 20, 10]
FEW = Cluster(ranks=4, capacity_tokens=300)


def _options(share: float | None) -> PlanOptions:
    return PlanOptions(layers=4, heads="auto", planning_share=share)


@given(
    tokens=st.lists(st.integers(1, 400), min_size=1, max_size=12),
    ranks=st.sampled_from([1, 2, 3, 5, 8]),
    share=st.sampled_from([0.0, 1e-6, 0.1, 1.0]),
)
def test_plans_of_any_share_can_be_run_and_end_after_their_bound(tokens, ranks, share) -> None:
    cluster = Cluster(ranks=ranks, capacity_tokens=400)
    plan = plan_step(tokens, cluster, COST, _options(share))
    check_plan(plan)
    assert plan.notes["predicted_seconds"] >= plan.notes["bound_seconds"] * (1 - 1e-9)


def test_a_share_that_is_enough_changes_nothing() -> None:
    few = TOKENS[5:]
    assert plan_step(few, FEW, COST, _options(1e6)) == plan_step(few, FEW, COST, _options(None))


@pytest.mark.parametrize("share", [0.0, 0.1, 1.0])
def test_tries_are_counted_from_the_bound(share: float, monkeypatch) -> None:
    placed = 0
    place = Annealing.place

    def counted(self, state):
        nonlocal placed
        placed += len(state)
        return place(self, state)

    monkeypatch.setattr(Annealing, "place", counted)
    plan = plan_step(TOKENS, FEW, COST, _options(share))
    starts = 13 * (len(TOKENS) + 1)  # of six runs, and of the plan before them: not tries
    assert placed <= 2 * share * plan.notes["bound_seconds"] / CHANGE_SECONDS + 2 * starts


def test_other_planners_are_not_asked_for_a_step_that_is_shorter_than_they(monkeypatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(portfolio, "_OTHERS", (lambda request: asked.append("baseline"),))
    plan_step(TOKENS, FEW, COST, _options(0.1))
    assert asked == []


@pytest.mark.parametrize(("share", "splits", "tables"), [(0.1, False, 1), (None, True, 2)])
def test_a_step_that_is_short_is_searched_in_one_table_and_without_split_heads(share, splits, tables, monkeypatch):
    """Heads are split afterwards all the same, wherever that is quicker."""
    tried, offered = [], []
    try_degrees, offer_all = search.ScheduleSearch.try_degrees, portfolio._offer_all
    one = search.ScheduleSearch
    monkeypatch.setattr(one, "try_degrees", lambda self, table: (tried.append(0), try_degrees(self, table)))
    monkeypatch.setattr(
        portfolio,
        "_offer_all",
        lambda asked, best: (offered.append(asked.cost.choices.splits_heads), offer_all(asked, best)),
    )
    plan_step(TOKENS, FEW, COST, _options(share))
    assert offered == [splits]
    assert len(tried) == 1 if tables == 1 else len(tried) >= tables


@pytest.mark.parametrize("share", [-1, float("nan")])
def test_a_share_below_zero_is_refused(share: float) -> None:
    with pytest.raises(ConfigError, match="planning_share"):
        plan_step(TOKENS, FEW, COST, _options(share))
