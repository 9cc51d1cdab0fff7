"""What places of the line add to a ring: just what the score says of a ring that is there."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lengthwise.core.shape import Cluster
from lengthwise.cost import Cost, all_terms_cost, named_hardware, named_shape
from lengthwise.cost.links import crosses_node
from lengthwise.data.recipes import draw_lengths
from lengthwise.planner import plan_step
from lengthwise.planner.problem.topology import Topology
from lengthwise.program import ring_order

SHAPE, HARDWARE = named_shape("llama-7b"), named_hardware("h100")
FULL_HEADS = all_terms_cost(replace(SHAPE, kv_heads=32), HARDWARE)


@given(
    length=st.integers(1, 60_000),
    degree=st.integers(1, 11),
    node=st.integers(1, 12),
    ranks=st.integers(11, 23),
    prepared=st.booleans(),
)
def test_ground_adds_what_a_ring_costs_across_the_border_of_a_node(
    length: int, degree: int, node: int, ranks: int, prepared: bool
) -> None:
    cost = replace(FULL_HEADS, ranks_per_node=node)
    topology = Topology(cost, ranks)
    if prepared:
        topology.prepare(np.array([3, length]), np.array([2, degree]))
    extra = topology.extra_seconds(length, degree)
    promised = cost.piece_seconds([length], degree)
    for first in range(ranks - degree + 1):
        took = cost.piece_seconds([length], degree, ranks=ring_order(first, degree))
        assert took == pytest.approx(promised + (0 if extra is None else extra.at(first)), rel=1e-12)


def test_ground_is_level_where_no_place_differs() -> None:
    assert Topology(Cost(linear_seconds=1.0), 64).is_level
    assert Topology(FULL_HEADS, 8).is_level  # one node
    assert Topology(replace(FULL_HEADS, far=FULL_HEADS.near, uplink_bytes_per_second=float("inf")), 64).is_level
    assert not Topology(FULL_HEADS, 9).is_level
    assert Topology(Cost(linear_seconds=1.0), 64).extra_seconds(1000, 4) is None
    assert Topology(FULL_HEADS, 64).extra_seconds(1000, 9) is None  # wider than a node: across, wherever it is


def test_plan_step_keeps_narrow_rings_inside_nodes() -> None:
    """64 ranks in nodes of 8: once 56 of 252 narrow rings crossed a border, and the plan ended 4.3 % late."""
    cluster = Cluster(ranks=64, capacity_tokens=8192)
    for seed in (0, 1):
        tokens = draw_lengths("github", 2**23, seed, longest_tokens=int(0.98 * cluster.longest_tokens))
        plan = plan_step(tokens, cluster, FULL_HEADS)
        rings = [p for m in plan.microbatches for p in m.pieces if 1 < p.degree <= FULL_HEADS.ranks_per_node]
        assert sum(crosses_node(ring.ranks, FULL_HEADS.ranks_per_node) for ring in rings) <= 0.1 * len(rings)
        assert plan.notes["predicted_seconds"] <= 1.01 * plan.notes["bound_seconds"]
