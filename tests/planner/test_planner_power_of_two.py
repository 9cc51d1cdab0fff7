"""Megatron-Core's rule: next powers of two, balanced sub-batches, barriers."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lengthwise.core.plan import Plan
from lengthwise.core.shape import Cluster
from lengthwise.cost import Cost
from lengthwise.planner import PlanOptions, plan_step
from lengthwise.planner.baselines.power_of_two import DELTA, next_sub_batch, power_of_two_degrees

COST = Cost(linear_seconds=1.0)


def _pieces(plan: Plan) -> list[list[tuple[list[int], tuple[int, ...]]]]:
    return [[(sorted(piece.ranks), piece.sequences) for piece in m.pieces] for m in plan.microbatches]


def _sub_batch(lengths: list[int], capacity: int, ranks: int) -> list[tuple[int, list[int]]]:
    array = np.array(lengths)
    degrees = power_of_two_degrees(-(-array // capacity), ranks)
    groups = next_sub_batch(range(len(lengths)), array, degrees, np.square(array.astype(float)) / degrees, ranks)
    return [(group.degree, group.sequences) for group in groups]


@pytest.mark.parametrize(
    ("length", "ranks", "degree"), [(1, 8, 1), (10, 8, 1), (11, 8, 2), (21, 8, 4), (41, 8, 8), (41, 6, 6), (70, 7, 7)]
)
def test_power_of_two_degrees_round_up_to_a_power_or_to_all_ranks(length: int, ranks: int, degree: int) -> None:
    assert power_of_two_degrees(np.array([-(-length // 10)]), ranks).tolist() == [degree]


def test_power_of_two_is_what_megatron_core_0_16_plans() -> None:
    """The two sub-batches that its `BalancedCPScheduler` returned for these lengths, 8 ranks and a capacity of 8192."""
    plan = plan_step(
        [20000, 512, 700, 60000, 900], Cluster(ranks=8, capacity_tokens=8192), COST, PlanOptions(planner="power-of-two")
    )
    assert _pieces(plan) == [
        [(list(range(8)), (3,))],
        [([0, 1, 2, 3], (0,)), ([4, 5], (4,)), ([6], (2,)), ([7], (1,))],
    ]


def test_power_of_two_sub_batches_wait_for_each_other() -> None:
    """Ranks 0 and 1 are free at 7 s; sequence 3 could end there at 12, but the barrier holds it until 10."""
    plan = plan_step(
        [14, 10, 10, 10, 2], Cluster(ranks=4, capacity_tokens=10), COST, PlanOptions(planner="power-of-two")
    )
    assert _pieces(plan) == [[([0, 1], (0,))], [([2], (1,))], [([3], (2,))], [([0, 1], (3,)), ([2, 3], (4,))]]
    assert plan.notes["predicted_seconds"] == 10 + 5


def test_power_of_two_sub_batch_ends_when_ranks_are_level_after_a_smaller_degree() -> None:
    assert _sub_batch([20, 14, 14, 9, 9], 10, 6) == [(2, [0]), (2, [1]), (2, [2])]
    assert _sub_batch([14, 10, 10, 10, 10], 10, 4) == [(2, [0]), (1, [1]), (1, [2])]


def test_power_of_two_gives_back_what_unlevels_the_ranks() -> None:
    """Work 100, 81 and 50; the third on top of the second group would put the ranks further apart."""
    assert _sub_batch([10, 9, 7], 10, 2) == [(1, [0]), (1, [1])]
    assert _sub_batch([10, 9, 4], 10, 2) == [(1, [0]), (1, [1, 2])]


def test_power_of_two_doubles_the_narrowest_gang_while_ranks_have_nothing() -> None:
    assert _sub_batch([15, 5], 10, 8) == [(4, [0]), (4, [1])]
    assert _sub_batch([5], 10, 6) == [(6, [0])]
    assert _sub_batch([15, 5, 5], 10, 7) == [(2, [0]), (2, [1]), (2, [2])]  # one rank is too few to double any


def test_power_of_two_packs_what_a_gang_holds() -> None:
    plan = plan_step(
        [6, 5, 4, 3, 2, 1], Cluster(ranks=1, capacity_tokens=10), COST, PlanOptions(planner="power-of-two")
    )
    assert _pieces(plan) == [[([0], (0, 2))], [([0], (1, 3, 4))], [([0], (5,))]]


@given(lengths=st.lists(st.integers(1, 99), min_size=1, max_size=40), ranks=st.sampled_from([1, 2, 3, 5, 6, 7, 12, 97]))
def test_power_of_two_sub_batches_give_every_rank_at_most_one_gang(lengths: list[int], ranks: int) -> None:
    lengths = sorted((min(length, 10 * ranks) for length in lengths), reverse=True)
    groups = _sub_batch(lengths, 10, ranks)
    degrees = power_of_two_degrees(-(-np.array(lengths) // 10), ranks)
    taken = [i for _, sequences in groups for i in sequences]
    assert len(taken) == len(set(taken)) > 0
    assert sum(degree for degree, _ in groups) <= ranks
    for degree, sequences in groups:
        assert sequences
        assert len({int(degrees[i]) for i in sequences}) == 1
        assert degree >= degrees[sequences[0]]
        assert degree == ranks or degree & (degree - 1) == 0


@given(lengths=st.lists(st.integers(1, 20), min_size=9, max_size=40))
def test_power_of_two_levels_full_sub_batches_unless_sequences_run_out(lengths: list[int]) -> None:
    """Ranks are within 5 %, or every group has one sequence, or giving one back would not bring ranks closer."""
    lengths = sorted(lengths, reverse=True)
    groups = _sub_batch(lengths, 10, 4)
    work = [sum(lengths[i] ** 2 / degree for i in sequences) for degree, sequences in groups]
    slack = max(work) - min(work)
    busiest = groups[work.index(max(work))][1]
    if slack > DELTA * max(work) and len(busiest) > 1 and sum(degree for degree, _ in groups) == 4:
        last = lengths[busiest[-1]] ** 2 / groups[work.index(max(work))][0]
        trimmed = [value - last if value == max(work) else value for value in work]
        assert max(trimmed) - min(trimmed) >= slack or work.count(max(work)) > 1
