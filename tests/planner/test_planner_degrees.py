"""Degrees: the table against trying every degree."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from lengthwise.core.shape import Cluster
from lengthwise.cost import Cost
from lengthwise.planner import plan_step
from lengthwise.planner.problem.degrees import DegreeTable, most_degrees

COSTS = st.builds(
    Cost,
    quadratic_seconds=st.sampled_from([0.0, 1.0, 1e-3]),
    linear_seconds=st.sampled_from([1.0, 30.0, 32768.0]),
    fixed_seconds=st.sampled_from([0.0, 50.0, 1e6]),
    ring_seconds=st.sampled_from([0.0, 10.0, 4e3, 1e5]),
    hop_seconds=st.sampled_from([0.0, 20.0, 1e5]),
)


@given(
    cost=COSTS, length=st.integers(1, 10**6), least=st.integers(1, 5), most=st.integers(0, 60), share=st.floats(0.02, 3)
)
def test_least_degrees_agrees_with_trying_all(cost: Cost, length: int, least: int, most: int, share: float) -> None:
    most += least
    seconds = share * cost.piece_seconds([length], 1) + cost.fixed_seconds
    tried = [d for d in range(least, most + 1) if cost.piece_seconds([length], d) + cost.fixed_seconds <= seconds]
    (found,) = DegreeTable(cost, np.array([length]), np.array([least]), np.array([most])).within(seconds).tolist()
    if found <= most:  # within rounding of the limit the smaller degree may be taken
        assert cost.piece_seconds([length], found) + cost.fixed_seconds <= seconds * (1 + 2e-9)
        assert not tried or found <= tried[0]
    else:
        assert not tried


def test_quickest_degree_stops_growing_where_hops_outweigh_the_gain() -> None:
    cost = Cost(linear_seconds=1.0, hop_seconds=1.0)
    (degree,) = DegreeTable(cost, np.array([400]), np.array([1]), np.array([400])).quickest().tolist()
    assert 17 <= degree <= 23  # 400 / d + d is least at 20


def test_growth_goes_below_the_floor_where_ranks_would_only_wait() -> None:
    plan = plan_step([2000], Cluster(ranks=4, capacity_tokens=2048), Cost(quadratic_seconds=1.0))
    assert plan.microbatches[0].pieces[0].degree == 4  # 512 tokens on a rank, where 1,024 end far from the bound


def test_growth_stops_at_the_floor_where_that_is_good_enough() -> None:
    lengths = [200_000] + [1000] * 800
    plan = plan_step(lengths, Cluster(ranks=4, capacity_tokens=200_000), Cost(linear_seconds=1.0))
    assert max(piece.degree for microbatch in plan.microbatches for piece in microbatch.pieces) == 1


def test_grown_degrees_leave_about_the_floor_on_a_rank() -> None:
    cost = Cost(quadratic_seconds=1.0)
    lengths, least = np.array([100_000]), np.array([2])
    most = most_degrees(lengths, least, 64, 4096)
    assert DegreeTable(cost, lengths, least, most).grown(1.0).tolist() == [24]
