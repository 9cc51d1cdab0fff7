"""Offload and heads chosen with the degree: valid plans of every planner, never later than without, no one ahead."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from testing.plans import clip_for, planners_of

from lengthwise.core.errors import ConfigError, LengthwiseError, PlanError
from lengthwise.core.plan import Plan
from lengthwise.core.shape import Cluster
from lengthwise.cost import Cost, all_terms_cost, named_hardware, named_shape
from lengthwise.planner import CUTTING_PLANNERS, PLANNERS, PlanOptions, plan_step, score
from lengthwise.program import check_plan
from properties import costliest

SHAPE, HARDWARE = named_shape("llama-7b"), named_hardware("h100")
COST = all_terms_cost(SHAPE, HARDWARE)
FULL_HEADS = all_terms_cost(replace(SHAPE, kv_heads=32), HARDWARE)
SMALL_HOST = all_terms_cost(SHAPE, replace(HARDWARE, host_bytes=3e11))
COSTS = (COST, FULL_HEADS, SMALL_HOST)
CHOICES = [(offload, heads) for offload in ("off", "auto") for heads in ("off", "auto")]
SOONER = 1 + 1e-9


@st.composite
def steps(draw: st.DrawFn) -> tuple[list[int], Cluster]:
    """Draw ugly lengths: one, two, about the capacity and twice it, primes of ranks, what fills all ranks."""
    capacity = draw(st.sampled_from([29, 1000, 8192]))
    cluster = Cluster(ranks=draw(st.sampled_from([1, 2, 3, 5, 8, 12, 24])), capacity_tokens=capacity)
    ugly = st.sampled_from(
        [1, 2, 7, capacity, capacity + 1, 2 * capacity - 1, 2 * capacity + 1, cluster.longest_tokens]
    )
    lengths = draw(st.lists(ugly | st.integers(1, 300) | st.integers(1, 60_000), min_size=1, max_size=9))
    return [min(length, cluster.longest_tokens) for length in lengths], cluster


def _plan(tokens: list[int], cluster: Cluster, cost: Cost, **options) -> Plan:
    return plan_step(tokens, cluster, cost, PlanOptions(layers=SHAPE.layers, **options))


def _seconds(plan: Plan) -> float:
    return float(plan.notes["predicted_seconds"])


@pytest.mark.parametrize("mode", ["free", "waves"])
@pytest.mark.parametrize("recompute", ["none", "layer", "all_but_attention"])
@costliest
@given(step=steps(), cost=st.sampled_from(COSTS), planner=st.sampled_from(PLANNERS))
def test_more_choice_gives_valid_plans_that_never_end_later(mode, recompute, step, cost, planner) -> None:
    tokens, cluster = clip_for(planner, step[0], step[1].capacity_tokens), step[1]
    took = {}
    for offload, heads in CHOICES:
        options = {"planner": "lengthwise" if mode == "waves" else planner, "mode": mode, "recompute": recompute}
        plan = _plan(tokens, cluster, cost, offload=offload, heads=heads, **options)
        check_plan(plan)
        assert _seconds(plan) == score(plan, cost).makespan_seconds
        assert plan.notes["bound_seconds"] <= _seconds(plan) * SOONER
        assert {microbatch.recompute for microbatch in plan.microbatches} == {recompute}
        assert offload == "auto" or all(m.offload == 0 for m in plan.microbatches)
        assert heads == "auto" or all(p.heads == 1 for m in plan.microbatches for p in m.pieces)
        took[offload, heads] = _seconds(plan)
    for offload, heads in CHOICES:
        assert took["auto", heads] <= took[offload, heads] * SOONER
        assert took[offload, "auto"] <= took[offload, heads] * SOONER


@costliest
@given(step=steps(), cost=st.sampled_from(COSTS), choice=st.sampled_from(CHOICES))
def test_no_planner_ends_before_lengthwise_on_small_steps(step, cost, choice) -> None:
    tokens, cluster = step
    options = dict(zip(("offload", "heads"), choice, strict=True))
    ours = _seconds(_plan(tokens, cluster, cost, **options))
    for planner in planners_of(tokens, cluster):
        assert ours <= _seconds(_plan(tokens, cluster, cost, planner=planner, **options)) * SOONER, planner


@pytest.mark.parametrize(
    "tokens", [[60_000, 100, 2000, 2000, 1, 9000], [30_000, 7, 8000], [1001, 1000, 578, 1001, 1660]]
)
def test_small_steps_that_other_planners_once_ended_sooner(tokens: list[int]) -> None:
    cluster = Cluster(ranks=12, capacity_tokens=1000 if max(tokens) < 8192 else 8192)
    ours = _seconds(_plan(tokens, cluster, COST))
    assert ours <= min(_seconds(_plan(tokens, cluster, COST, planner=planner)) for planner in CUTTING_PLANNERS) * SOONER


def test_offload_saves_rings_where_long_sequences_hide_its_copies() -> None:
    """Eight of 240K tokens on eight ranks behind slow links: with offload each stays on one, and nothing travels."""
    cost = replace(COST, ranks_per_node=1, far=replace(COST.far, bytes_per_second=2e9), host_bytes=1e13)
    cluster = Cluster(ranks=8, capacity_tokens=32_768)
    off, auto = (_plan([240_000] * 8, cluster, cost, offload=offload) for offload in ("off", "auto"))
    assert all(p.degree >= 7 and m.offload == 0 for m in off.microbatches for p in m.pieces)
    assert all(p.degree == 1 and 0.8 < m.offload < 1 for m in auto.microbatches for p in m.pieces)
    check_plan(auto)
    assert auto.notes["bound_seconds"] <= _seconds(auto) * SOONER
    assert _seconds(auto) < 0.4 * _seconds(off)


def test_offload_is_not_used_where_copies_would_show() -> None:
    cluster = Cluster(ranks=8, capacity_tokens=8192)
    plan = _plan([9000] * 16, cluster, replace(COST, copy_bytes_per_second=1e9), offload="auto")
    assert all(m.offload == 0 for m in plan.microbatches)


def test_a_sequence_that_only_offload_holds_is_planned_and_refused_without() -> None:
    cluster = Cluster(ranks=2, capacity_tokens=8192)
    with pytest.raises(PlanError, match="sequence 0 of 90000 tokens"):
        _plan([90_000], cluster, COST)
    for planner in CUTTING_PLANNERS:
        plan = _plan([90_000], cluster, COST, planner=planner, offload="auto")
        check_plan(plan)
        assert plan.microbatches[0].offload > 0.8
    with pytest.raises(PlanError, match="sequence 0 of 90000 tokens"):
        _plan([90_000], cluster, replace(COST, host_bytes=1e9), offload="auto")


def test_split_heads_are_chosen_with_the_degree() -> None:
    """Alone on 14 ranks of two nodes: 13 ranks hold it, and cannot split heads; 14 can."""
    cluster = Cluster(ranks=14, capacity_tokens=8192)
    off, auto = (_plan([13 * 8192], cluster, FULL_HEADS, heads=heads) for heads in ("off", "auto"))
    assert auto.requires == ("heads",)
    assert auto.microbatches[0].pieces[0].heads > 1
    assert _seconds(auto) < 0.95 * _seconds(off)


@pytest.mark.parametrize("tokens", [[100_000], [60_000] * 3])
def test_the_bound_holds_for_heads_split_in_groups_of_a_number(tokens: list[int]) -> None:
    """Plans with groups of 4 once ended in half the bound, which counted no split."""
    plan = _plan(tokens, Cluster(ranks=16, capacity_tokens=8192), FULL_HEADS, heads=4)
    assert plan.requires == ("heads",)
    assert plan.notes["bound_seconds"] <= _seconds(plan) * SOONER


@pytest.mark.parametrize("option", ["offload", "heads"])
def test_choices_are_refused_where_costs_do_not_price_them(option: str) -> None:
    cluster = Cluster(ranks=2, capacity_tokens=8192)
    with pytest.raises(ConfigError, match=f"{option}: expected off, with these costs"):
        plan_step([9000], cluster, Cost(linear_seconds=1.0), PlanOptions(layers=32, **{option: "auto"}))
    with pytest.raises(LengthwiseError, match="on"):
        plan_step([9000], cluster, COST, PlanOptions(layers=32, **{option: "on"}))


def test_offload_asks_for_the_layers_that_it_is_counted_by() -> None:
    with pytest.raises(ConfigError, match=r"layers: expected those of the model, at least 32.* Set layers\."):
        plan_step([9000], Cluster(ranks=2, capacity_tokens=8192), COST, PlanOptions(offload="auto"))
