"""Packed data parallelism: whole sequences, level ranks, and a refusal that says what to change."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lengthwise.core.errors import PlanError
from lengthwise.core.shape import Cluster
from lengthwise.cost import Cost, all_terms_cost, named_hardware, named_shape
from lengthwise.planner import PlanOptions, plan_step
from lengthwise.planner.baselines.single_degree import first_fit_packs
from lengthwise.program import check_plan

PACKED = PlanOptions(planner="packed-dp", layers=32)
COST = Cost(quadratic_seconds=1.0, linear_seconds=1000.0, fixed_seconds=77.0, ring_seconds=500.0)
ALL_TERMS = all_terms_cost(named_shape("llama-7b"), named_hardware("h100"))


@given(
    tokens=st.lists(st.integers(1, 9) | st.integers(1, 100), min_size=1, max_size=30),
    ranks=st.sampled_from([1, 2, 3, 5, 8]),
    cost=st.sampled_from([COST, ALL_TERMS]),
)
def test_packed_dp_cuts_nothing_and_ends_no_later_than_packs_in_data_order(
    tokens: list[int], ranks: int, cost: Cost
) -> None:
    plan = plan_step(tokens, Cluster(ranks=ranks, capacity_tokens=100), cost, PACKED)
    check_plan(plan)
    assert {piece.degree for each in plan.microbatches for piece in each.pieces} == {1}
    loads = [0.0] * ranks
    packs = [[tokens[i] for i in pack] for pack in first_fit_packs(np.array(tokens), 100)]
    for seconds in sorted((cost.fixed_seconds + cost.piece_seconds(pack, 1) for pack in packs), reverse=True):
        loads[loads.index(min(loads))] += seconds
    assert plan.notes["predicted_seconds"] <= max(loads) * (1 + 1e-12)


def test_packed_dp_refuses_a_sequence_longer_than_a_rank_holds_and_says_what_to_change() -> None:
    with pytest.raises(PlanError) as caught:
        plan_step([5, 150, 101, 100], Cluster(ranks=3, capacity_tokens=100), COST, PACKED)
    told = str(caught.value)
    assert "sequence 1: expected at most 100 tokens" in told
    assert "got 150 tokens, and 1 more" in told
    assert "capacity_tokens to 150" in told
    assert "tensor-parallel" in told
    assert "recompute" in told


@pytest.mark.parametrize("length", [20_000, 40_000])
def test_packed_dp_holds_more_than_the_capacity_with_offload(length: int) -> None:
    """Longer than a rank's capacity, and then longer than that of all ranks."""
    options = PlanOptions(planner="packed-dp", layers=32, offload="auto")
    plan = plan_step([length, 700, 8000], Cluster(ranks=3, capacity_tokens=8192), ALL_TERMS, options)
    check_plan(plan)
    assert {each.pieces[0].degree for each in plan.microbatches} == {1}
    assert max(each.offload for each in plan.microbatches) > 0.5
    with pytest.raises(PlanError, match="packed-dp cuts no sequence"):
        plan_step([length, 700, 8000], Cluster(ranks=12, capacity_tokens=8192), ALL_TERMS, PACKED)
