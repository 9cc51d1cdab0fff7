"""Megatron-Core's rule: next powers of two, balanced sub-batches, barriers."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lengthwise.core.shape import Cluster
from lengthwise.cost import Cost
from lengthwise.planner import PlanOptions, plan_step
from lengthwise.planner.baselines.power_of_two import next_sub_batch, power_of_two_degrees


def _planned(tokens, ranks, capacity):
    cluster = Cluster(ranks=ranks, capacity_tokens=capacity)
    plan = plan_step(tokens, cluster, Cost(linear_seconds=1.0), PlanOptions(planner="power-of-two"))
    return plan, [[(sorted(piece.ranks), piece.sequences) for piece in m.pieces] for m in plan.microbatches]


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
    assert _planned([20000, 512, 700, 60000, 900], 8, 8192)[1] == [
        [(list(range(8)), (3,))],
        [([0, 1, 2, 3], (0,)), ([4, 5], (4,)), ([6], (2,)), ([7], (1,))],
    ]


def test_power_of_two_sub_batches_wait_for_each_other() -> None:
    """Ranks 0 and 1 are free at 7 s; sequence 3 could end there at 12, but the barrier holds it until 10."""
    plan, pieces = _planned([14, 10, 10, 10, 2], 4, 10)
    assert pieces == [[([0, 1], (0,))], [([2], (1,))], [([3], (2,))], [([0, 1], (3,)), ([2, 3], (4,))]]
    assert plan.notes["predicted_seconds"] == 10 + 5
    assert _planned([6, 5, 4, 3, 2, 1], 1, 10)[1] == [[([0], (0, 2))], [([0], (1, 3, 4))], [([0], (5,))]], "packs"


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
