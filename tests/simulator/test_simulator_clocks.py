"""A step on the clocks of all ranks: against the score, pipelines, the step's end, uplinks shared by a node's ranks."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from testing.pipelines import as_pipeline
from testing.plans import clip_for, make_plan

from lengthwise.core.errors import PlanError
from lengthwise.core.plan import Microbatch, Piece, Plan
from lengthwise.core.shape import Cluster
from lengthwise.cost import all_terms_cost, analytic_cost, named_hardware, named_shape
from lengthwise.data.recipes import draw_lengths
from lengthwise.planner import PLANNERS, PlanOptions, plan_step, score
from lengthwise.program import ring_order
from lengthwise.simulator import microbatch_clocks, simulate_plan
from lengthwise.simulator.contention import Uplinks, node_bytes
from lengthwise.simulator.piece_layers import piece_layer
from properties import costliest, costly

SHAPE, HARDWARE = named_shape("llama-7b"), named_hardware("h100")
COST = all_terms_cost(SHAPE, HARDWARE)


def _local(*lengths: int, ranks: int = 2, **changes) -> Plan:
    microbatches = tuple(Microbatch(pieces=(Piece(ranks=(i % ranks,), sequences=(i,)),)) for i in range(len(lengths)))
    return Plan(ranks=ranks, layers=32, capacity=10**6, tokens=lengths, microbatches=microbatches, **changes)


SLOW_COPIES = all_terms_cost(SHAPE, replace(HARDWARE.with_kernel("flash2"), link_bytes_per_second=2e10))
LONG, SHORT = [200_000, 200_000, 90_000, 40_000, 9000, 3000] * 4, draw_lengths("github", 2_000_000, 1, 200_000)


@pytest.mark.parametrize(
    ("tokens", "capacity", "cost", "options"),
    [
        *((SHORT, 8192, COST, {"planner": planner}) for planner in ("power-of-two", "lengthwise")),
        (LONG, 4096, SLOW_COPIES, {"offload": "auto", "heads": "auto"}),
    ],
)
def test_simulated_step_is_near_the_score(tokens, capacity, cost, options) -> None:
    cluster = Cluster(ranks=32, capacity_tokens=capacity)
    plan = plan_step(tokens, cluster, cost, PlanOptions(layers=32, **options))
    timeline = simulate_plan(plan, cost)
    assert timeline.work_end_seconds.max() == pytest.approx(score(plan, cost).makespan_seconds, rel=0.05)
    assert timeline.step_seconds == timeline.work_end_seconds.max() + cost.step_end_seconds(32)
    ratios = timeline.compute_ratio + timeline.exposed_ratio + timeline.idle_ratio
    assert ratios + cost.step_end_seconds(32) / timeline.step_seconds == pytest.approx(1.0)
    has_choices = "offload" in options
    assert has_choices or timeline.most_held_tokens <= capacity + len(tokens)
    assert has_choices == any(each.offload > 0 for each in plan.microbatches)
    assert has_choices == any(piece.heads > 1 for each in plan.microbatches for piece in each.pieces)


@costliest
@given(
    tokens=st.lists(st.integers(1, 40_000), min_size=1, max_size=12),
    ranks=st.sampled_from([5, 8, 11]),
    planner=st.sampled_from(["static", "lengthwise", "bytescale"]),
)
def test_no_rank_is_in_two_microbatches_at_once(tokens: list[int], ranks: int, planner: str) -> None:
    plan = plan_step(tokens, Cluster(ranks=ranks, capacity_tokens=8192), COST, PlanOptions(planner=planner, layers=32))
    timeline = simulate_plan(plan, COST)
    for rank in range(ranks):
        mine = np.flatnonzero(timeline.rank == rank)
        assert np.all(timeline.start[mine][1:] >= timeline.end[mine][:-1])
        assert np.all(timeline.start[mine] < timeline.forward[mine])
        assert np.all(timeline.forward[mine] < timeline.end[mine])
        named = [i for i, m in enumerate(plan.microbatches) if rank in m.ranks]
        assert timeline.microbatch[mine].tolist() == named
    again = simulate_plan(plan, COST)
    assert again.end.tolist() == timeline.end.tolist()


def test_local_packs_take_what_the_costs_say_and_waves_start_together() -> None:
    plan = _local(5000, 300, 200)
    timeline, each = simulate_plan(plan, COST), [COST.piece_seconds([n], 1) + COST.fixed_seconds for n in plan.tokens]
    assert timeline.end.tolist() == pytest.approx([each[0], each[1], each[0] + each[2]])
    assert timeline.forward[0] - timeline.start[0] < 0.34 * each[0]
    waves = replace(plan, schedule={"kind": "waves"}, requires=("waves",))
    assert simulate_plan(waves, COST).work_end_seconds.max() == pytest.approx(score(waves, COST).makespan_seconds)


def test_pipelines_are_near_their_score() -> None:
    cost = all_terms_cost(SHAPE, HARDWARE, stages=4)
    tokens = draw_lengths("prolong", 500_000, 1, longest_tokens=50_000)
    plan = plan_step(tokens, Cluster(ranks=16, capacity_tokens=8192), cost, PlanOptions(layers=32))
    plan = as_pipeline(plan, 4, 2)
    timeline = simulate_plan(plan, cost)
    assert timeline.work_end_seconds.max() == pytest.approx(score(plan, cost).makespan_seconds, rel=0.05)
    ratios = timeline.compute_ratio + timeline.exposed_ratio + timeline.idle_ratio
    assert ratios + cost.step_end_seconds(16) / timeline.step_seconds == pytest.approx(1.0)
    assert len(timeline.rank) == 4 * 2 * sum(len(m.ranks) for m in plan.microbatches)


def test_messages_between_stages_delay_a_pipeline_of_equal_packs() -> None:
    cost = all_terms_cost(SHAPE, HARDWARE, stages=4)
    plan = _local(*[8192] * 16)
    free = replace(cost, stage_bytes=0.0, far=replace(cost.far, hop_seconds=0.0))
    (t,) = {COST.piece_seconds([8192], 1) / 4 + COST.fixed_seconds / 4}
    assert simulate_plan(plan, free).work_end_seconds.max() == pytest.approx(t * (8 + 3))
    assert simulate_plan(plan, free).idle_ratio == pytest.approx(3 / 11, rel=0.2)  # of the step, its end included
    sent = float(cost.stage_send_seconds(np.array([8192.0]))[0])
    late = simulate_plan(plan, cost).work_end_seconds.max() - t * 11
    assert 6 * sent <= late * (1 + 1e-9) < 60 * sent  # three hops forward and three back, at least


def test_stages_of_waves_go_through_them_together() -> None:
    cost = all_terms_cost(SHAPE, HARDWARE, stages=2)
    waves = replace(_local(5000, 300, 200), schedule={"kind": "waves"}, requires=("waves",))
    timeline = simulate_plan(waves, cost)
    for index in range(3):
        for stage in (0, 1):
            mine = (timeline.microbatch == index) & (timeline.stage == stage)
            assert len(set(timeline.start[mine])) == len(set(timeline.backward[mine])) == 1
    assert timeline.work_end_seconds.max() == pytest.approx(score(waves, cost).makespan_seconds, rel=0.05)


SIMPLE = analytic_cost(SHAPE, HARDWARE)


@pytest.mark.parametrize(
    ("run", "cost", "changes", "said"),
    [
        (simulate_plan, SIMPLE, {"offload": 0.5}, "offload: expected costs that price copies"),
        (simulate_plan, COST, {"notes": {"speeds": [[1, 1.0], [1, 0.5]]}}, "unequal ranks"),
        (simulate_plan, COST, {"shares": (1.0, 2.0), "heads": 2}, "split heads"),
        (simulate_plan, all_terms_cost(SHAPE, HARDWARE, stages=4), {"stages": 2}, "stages"),
        (score, all_terms_cost(SHAPE, HARDWARE, stages=4), {"stages": 2}, "expected 4, as in the costs; got 2"),
    ],
)
def test_what_cannot_be_simulated_is_refused(run, cost, changes, said) -> None:
    plan = replace(_local(5000, 300, 200), notes=changes.get("notes", {}))
    pair = Piece(ranks=(0, 1), sequences=(0,), shares=changes.get("shares"), heads=changes.get("heads", 1))
    first = Microbatch(pieces=(pair,), offload=changes.get("offload", 0.0))
    plan = replace(plan, microbatches=(first, *plan.microbatches[1:]))
    with pytest.raises(PlanError, match=said):
        run(as_pipeline(plan, changes["stages"]) if "stages" in changes else plan, cost)


def test_a_step_takes_what_was_planned_where_rings_wait_in_every_layer() -> None:
    tokens = draw_lengths("prolong", 4 * 2**20, 0, longest_tokens=100_000)
    plan = plan_step(tokens, Cluster(ranks=64, capacity_tokens=7680), COST, PlanOptions(layers=SHAPE.layers))
    planned = score(plan, COST).makespan_seconds
    assert simulate_plan(plan, COST).work_end_seconds.max() <= planned * 1.01  # 1.03 with packs beside rings
    rings = [microbatch for microbatch in plan.microbatches if len(microbatch.ranks) > 1]
    assert rings
    assert all(len(microbatch.pieces) == 1 for microbatch in rings)


NODES_OF_4 = replace(HARDWARE, ranks_per_node=4, node_uplink_bytes_per_second=4 * HARDWARE.link_bytes_per_second)


def _crossing(*firsts, tokens=400_000):
    """Rings of four ranks from each of `firsts`, at one time."""
    pieces = [Piece(ranks=ring_order(first, 4), sequences=(i,)) for i, first in enumerate(firsts)]
    return make_plan(16, [tokens] * len(firsts), pieces, layers=32)


SLOW = replace(NODES_OF_4, link_bytes_per_second=1e8, node_uplink_bytes_per_second=1e8)


def test_two_rings_that_leave_a_node_at_once_share_its_uplink() -> None:
    # One NIC a node: rings 2..5 and 6..9 both cross a border of node 1, which lets one through at a time.
    cost = replace(all_terms_cost(SHAPE, SLOW), block_efficiency=(), ring_efficiency=())
    one, both = (simulate_plan(_crossing(*firsts), cost) for firsts in ((2,), (2, 6)))
    assert both.end.max() == pytest.approx(2 * one.end.max(), rel=0.03)
    (ring, other), tokens = (microbatch.pieces[0] for microbatch in _crossing(2, 6).microbatches), (400_000,) * 2
    together = microbatch_clocks(Microbatch(pieces=(ring, other)), tokens, cost)
    assert together.total.max() == pytest.approx(2 * one.end.max(), rel=0.03), "also in one microbatch"
    apart = simulate_plan(_crossing(2, 10), cost)  # node 2 is crossed by the second only, node 1 by the first only
    assert apart.end.max() == one.end.max()
    wide = replace(cost, uplink_bytes_per_second=2e8)
    assert simulate_plan(_crossing(2, 6), wide).end.max() == pytest.approx(one.end.max(), rel=1e-9)


def test_bytes_of_a_node_are_those_of_the_rings_and_sweeps_that_cross_it() -> None:
    cost = all_terms_cost(SHAPE, NODES_OF_4)
    piece = Piece(ranks=ring_order(2, 4), sequences=(0,))
    passed = cost.ring_bytes * 1000 * 3 / 4
    crossing = node_bytes(Microbatch(pieces=(piece,)), (1000,), cost)
    assert crossing == pytest.approx({0: passed, 1: passed})
    again = node_bytes(Microbatch(pieces=(piece,), recompute="layer"), (1000,), cost)
    assert again[0] == pytest.approx(passed * (1 + cost.forward.ring))
    mixed, two = all_terms_cost(named_shape("qwen3.5-9b"), NODES_OF_4), replace(piece, sequences=(0, 0))
    swept = mixed.ring_bytes * 2000 * 3 / 4 + 2 * mixed.sweep_bytes
    assert node_bytes(Microbatch(pieces=(two,)), (1000,), mixed) == pytest.approx({0: swept, 1: swept})
    once = replace(two, ranks=(2, 3, 4, 5))  # the one map that crosses goes back, from rank 4 to rank 3
    ring = node_bytes(Microbatch(pieces=(once,)), (1000,), replace(mixed, sweep_bytes=0.0))
    swept = node_bytes(Microbatch(pieces=(once,)), (1000,), mixed)
    assert swept == pytest.approx({0: ring[0], 1: ring[1] + 2 * mixed.sweep_bytes})
    inside = Piece(ranks=(4, 6, 7, 5), sequences=(0,))
    assert node_bytes(Microbatch(pieces=(inside, Piece(ranks=(9,), sequences=(0,)))), (1000,), cost) == {}


def test_slowdown_is_the_mean_over_a_microbatchs_time() -> None:
    cost = replace(all_terms_cost(SHAPE, NODES_OF_4), uplink_bytes_per_second=1.0)
    plan = _crossing(2, 6)
    seconds = node_bytes(plan.microbatches[0], plan.tokens, cost)[1] / 0.6  # alone each asks for 0.6 of the uplink
    uplinks = Uplinks(plan, [seconds, seconds], cost)
    assert not uplinks.slow_down(np.array([0.0, 20.0]), np.array([10.0, 30.0]))
    assert uplinks.slow_down(np.array([0.0, 5.0]), np.array([10.0, 15.0]))
    assert uplinks.slowdowns.tolist() == pytest.approx([1.1, 1.1])  # half of the time both
    assert uplinks.slowed(0).far.bytes_per_second == pytest.approx(cost.far.bytes_per_second / 1.1)


def test_groups_that_cross_nodes_exchange_over_their_share_of_the_uplink() -> None:
    cost = all_terms_cost(SHAPE, NODES_OF_4)
    narrow = replace(cost, uplink_bytes_per_second=cost.far.bytes_per_second)
    piece = Piece(ranks=(2, 3, 4, 5), sequences=(0,), heads=4)
    wide, shared = (piece_layer(piece, [40_000], each).exchange for each in (cost, narrow))
    assert shared == pytest.approx(4 * wide)
    inside = replace(piece, ranks=(4, 5, 6, 7))
    assert piece_layer(inside, [40_000], narrow).exchange == pytest.approx(piece_layer(inside, [40_000], cost).exchange)


@costly
@given(
    tokens=st.lists(st.one_of(st.integers(1, 60), st.integers(1, 60_000)), min_size=1, max_size=10),
    ranks=st.sampled_from([1, 2, 3, 5, 12, 17]),
    planner=st.sampled_from(PLANNERS),
    uplink=st.sampled_from([0.03, 0.3, 1.0]),
    nics=st.sampled_from([1.0, 0.05]),
)
def test_contention_never_makes_a_step_faster(tokens, ranks, planner, uplink, nics) -> None:
    tokens = clip_for(planner, [min(length, ranks * 8000) for length in tokens], 8000)
    slow = replace(NODES_OF_4, link_bytes_per_second=nics * NODES_OF_4.link_bytes_per_second)
    alone = replace(all_terms_cost(SHAPE, slow), uplink_bytes_per_second=float("inf"))
    shared = replace(alone, uplink_bytes_per_second=uplink * slow.link_bytes_per_second)
    plan = plan_step(tokens, Cluster(ranks=ranks, capacity_tokens=8192), alone, PlanOptions(planner=planner, layers=32))
    free, held = (simulate_plan(plan, cost) for cost in (alone, shared))
    assert np.all(held.end >= free.end * (1 - 1e-12))
    assert held.step_seconds >= free.step_seconds * (1 - 1e-12)
    assert held.compute.tolist() == free.compute.tolist()
    enough = replace(alone, uplink_bytes_per_second=4 * slow.link_bytes_per_second)
    assert simulate_plan(plan, enough).end.tolist() == free.end.tolist()
