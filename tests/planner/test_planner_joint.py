"""Offload and heads chosen with the degree, heads split afterwards, and uplinks that the ranks of a node share."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from testing.plans import clip_for, make_plan

from lengthwise.core.errors import PlanError
from lengthwise.core.plan import RECOMPUTE_KINDS, Piece, Plan
from lengthwise.core.shape import Cluster
from lengthwise.cost import Cost, all_terms_cost, named_hardware, named_shape
from lengthwise.planner import CUTTING_PLANNERS, PLANNERS, PlanOptions, plan_step, score
from lengthwise.planner.portfolio import split_heads
from lengthwise.program import check_plan, ring_order
from properties import costly

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
@costly
@given(
    recompute=st.sampled_from(RECOMPUTE_KINDS),
    step=steps(),
    cost=st.sampled_from(COSTS),
    planner=st.sampled_from(PLANNERS),
)
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


def test_the_bound_holds_for_heads_split_in_groups_of_a_number() -> None:
    plan = _plan([100_000], Cluster(ranks=16, capacity_tokens=8192), FULL_HEADS, heads=4)
    assert plan.requires == ("heads",)
    assert plan.notes["bound_seconds"] <= _seconds(plan) * SOONER


@pytest.mark.parametrize(("first", "expected"), [(0, 8), (4, 4), (6, 2), (5, 1)])
def test_heads_are_split_where_groups_stay_in_a_node(first: int, expected: int) -> None:
    """Nodes are of eight ranks: groups of eight stay in them from 0 on, of four from 4 on, of two from 6 on."""
    piece = Piece(ranks=ring_order(first, 16), sequences=(0,))
    plan = make_plan(32, (80_000,), [piece], layers=32)
    fast_inside = replace(
        FULL_HEADS,
        near=replace(FULL_HEADS.near, bytes_per_second=1e13),
        far=replace(FULL_HEADS.far, bytes_per_second=2e10),
        exchange_bytes=40 * FULL_HEADS.exchange_bytes,
    )
    assert split_heads(plan, fast_inside).microbatches[0].pieces[0].heads == expected


@pytest.mark.parametrize("asked", [2, "8", 5])
def test_heads_of_a_number_split_every_ring_where_the_number_divides(asked) -> None:
    tokens, number = [90_000, 40_000, 30_000, 20_000, 500], int(str(asked))
    options = PlanOptions(planner="lengthwise", layers=32, heads=asked)
    plan = plan_step(tokens, Cluster(ranks=24, capacity_tokens=8192), FULL_HEADS, options)
    check_plan(plan)
    rings = [piece for m in plan.microbatches for piece in m.pieces if piece.degree > 1]
    for piece in rings:
        fits = piece.degree % number == 0 and FULL_HEADS.heads % number == 0
        assert piece.heads == (number if fits else 1)
        assert piece.ranks == ring_order(min(piece.ranks), piece.degree, piece.heads)
    assert any(piece.heads > 1 for piece in rings) == (number != 5)


def test_a_ring_over_a_border_more_than_it_need_be_is_priced_so() -> None:
    hardware = replace(HARDWARE, ranks_per_node=4, node_uplink_bytes_per_second=HARDWARE.link_bytes_per_second)
    cost, degree = all_terms_cost(replace(SHAPE, kv_heads=32), hardware), 7
    lengths, told = [40_000], ring_order(3, degree)  # three nodes: the middle one passes two messages on
    crossing = cost.piece_seconds(lengths, degree, ranks=told)
    assert crossing == pytest.approx(replace(cost, crosses_node=True).piece_seconds(lengths, degree), rel=1e-12)
    assert crossing > 1.5 * cost.piece_seconds(lengths, degree)
    assert cost.piece_seconds(lengths, degree, ranks=ring_order(4, degree)) == cost.piece_seconds(lengths, degree)
