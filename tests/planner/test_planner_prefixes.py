"""Steps whose sequences share prompts: when a plan computes them once, and what it notes."""

import pytest

from lengthwise.core.prefixes import SharedPrefixes
from lengthwise.cost import plain_cost
from lengthwise.planner import PlanOptions
from lengthwise.planner.service.step_planning import StepPlanning

PLANNING = StepPlanning(
    ranks=4, cost=plain_cost(linear_seconds=1.0), capacities={"none": 1001}, options=PlanOptions(layers=8)
)
FOUR = SharedPrefixes(order=(0, 1, 2, 3), common=(0, 2000, 2000, 2000))


def test_a_prompt_is_computed_once_in_a_group_that_no_rank_holds() -> None:
    """2,000 tokens before four completions of 500: a tree of 4,000 tokens over four ranks in place of 10,000."""
    plan = PLANNING.plan([2500] * 4, FOUR)
    assert sorted(plan.tokens) == [500] * 4 + [2000]
    assert plan.notes["predicted_seconds"] == pytest.approx(1000, rel=0.01)
    assert plan.notes["seconds_apart"] == pytest.approx(2500, rel=0.01)


def test_a_plan_without_shared_prompts_notes_what_they_would_save() -> None:
    """Three times 40 of 4,000 tokens are 3 %."""
    few = SharedPrefixes(order=FOUR.order, common=(0, 40, 40, 40))
    plan = PLANNING.plan([1000] * 4, few)
    assert not plan.parents
    assert plan.notes["seconds_shared"] == pytest.approx(0.97 * plan.notes["predicted_seconds"], rel=0.01)
