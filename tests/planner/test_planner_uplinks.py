"""Uplinks that the ranks of a node share: plans are priced as they are simulated, and split heads do not end later."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lengthwise.core.plan import Microbatch, Piece, Plan
from lengthwise.core.shape import Cluster
from lengthwise.cost import Choice, Cost, all_terms_cost, named_hardware, named_shape
from lengthwise.planner import PlanOptions, plan_step, score
from lengthwise.program import ring_order
from lengthwise.simulator import simulate_plan
from properties import costliest

SHAPE, HARDWARE = named_shape("llama-7b"), named_hardware("h100")


def _cost(nics: float, ranks_per_node: int = 4, kv_heads: int = 32) -> Cost:
    """Nodes whose ranks share `nics` of a rank's far links; hops without latency, which the simulator hides."""
    uplink = nics * HARDWARE.link_bytes_per_second
    node = replace(HARDWARE, ranks_per_node=ranks_per_node, node_uplink_bytes_per_second=uplink)
    return all_terms_cost(replace(SHAPE, kv_heads=kv_heads), replace(node, **dict.fromkeys(_LATENCIES, 0.0)))


_LATENCIES = ("hop_latency_seconds", "node_hop_latency_seconds")


def _alone(length: int, degree: int, heads: int) -> Plan:
    piece = Piece(ranks=ring_order(0, degree, heads), sequences=(0,), heads=heads)
    return Plan(ranks=degree, layers=32, capacity=10**7, tokens=(length,), microbatches=(Microbatch(pieces=(piece,)),))


@given(
    length=st.integers(20_000, 2_000_000),
    nodes=st.integers(1, 7),
    heads=st.sampled_from([1, 2, 4]),
    nics=st.sampled_from([0.5, 1.0, 2.0, 4.0]),
)
def test_rings_aligned_to_nodes_score_as_they_simulate(length: int, nodes: int, heads: int, nics: float) -> None:
    cost, plan = _cost(nics), _alone(length, 4 * nodes, heads)
    took = simulate_plan(plan, cost).work_end_seconds.max()
    near = 0.01 if cost.shares_uplinks and nodes > 1 else 0.2  # of short transfers all attention is said to hide all
    assert took == pytest.approx(score(plan, cost).makespan_seconds, rel=near)


@pytest.mark.parametrize("degree", [6, 7, 8])
def test_a_ring_over_a_border_more_than_it_need_be_is_priced_so(degree: int) -> None:
    cost = _cost(1.0)
    lengths, told = [40_000], ring_order(3, degree)  # three nodes: the middle one passes two messages on
    crossing = cost.piece_seconds(lengths, degree, ranks=told)
    assert crossing == pytest.approx(replace(cost, crosses_node=True).piece_seconds(lengths, degree), rel=1e-12)
    assert crossing > 1.5 * cost.piece_seconds(lengths, degree)
    assert cost.piece_seconds(lengths, degree, ranks=ring_order(4, degree)) == cost.piece_seconds(lengths, degree)


def test_enough_uplink_for_all_leaves_costs_as_they_were() -> None:
    enough, endless = (_cost(nics, kv_heads=8) for nics in (4.0, 1e6))
    for degree, heads in ((2, 1), (8, 1), (12, 4), (24, 8)):
        seconds = {cost.piece_seconds([300_000], degree, Choice(heads=heads)) for cost in (enough, endless)}
        assert len(seconds) == 1


LENGTHS = st.lists(st.one_of(st.integers(1, 9_000), st.integers(9_000, 120_000)), min_size=1, max_size=8)


@costliest
@given(tokens=LENGTHS, ranks=st.sampled_from([3, 5, 8, 12]), nics=st.sampled_from([0.5, 1.0, 2.0]))
def test_split_heads_simulate_no_later_than_plain_rings(tokens: list[int], ranks: int, nics: float) -> None:
    cost, cluster = _cost(nics), Cluster(ranks=ranks, capacity_tokens=8192)
    tokens = [min(length, ranks * 8000) for length in tokens]
    plain, split = (
        simulate_plan(
            plan_step(tokens, cluster, cost, PlanOptions(layers=32, heads=heads)), cost
        ).work_end_seconds.max()
        for heads in ("off", "auto")
    )
    assert split <= plain * 1.01  # rings that pass one node at one time slow each other down, which no price knows
