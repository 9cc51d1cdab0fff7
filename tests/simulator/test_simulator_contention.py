"""Uplinks shared by the ranks of a node: two rings that cross at once, and what no contention may change."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from testing.plans import clip_for, make_plan

from lengthwise.core.plan import Microbatch, Piece
from lengthwise.core.shape import Cluster
from lengthwise.cost import all_terms_cost, named_hardware, named_shape
from lengthwise.planner import PLANNERS, PlanOptions, plan_step
from lengthwise.program import ring_order
from lengthwise.simulator import microbatch_clocks, simulate_plan
from lengthwise.simulator.contention import Uplinks, node_bytes
from lengthwise.simulator.piece_layers import piece_layer
from properties import costly

SHAPE, HARDWARE = named_shape("llama-7b"), named_hardware("h100")
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


def test_hidden_transfers_stay_hidden_beside_others() -> None:
    cost = all_terms_cost(SHAPE, replace(NODES_OF_4, node_uplink_bytes_per_second=NODES_OF_4.link_bytes_per_second))
    assert cost.shares_uplinks
    assert simulate_plan(_crossing(2, 6), cost).end.max() == simulate_plan(_crossing(2), cost).end.max()


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
