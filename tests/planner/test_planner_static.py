"""The fixed mesh."""

import pytest

from lengthwise.core.errors import ConfigError, PlanError
from lengthwise.core.shape import Cluster
from lengthwise.cost import Cost
from lengthwise.planner import PlanOptions, plan_step
from lengthwise.planner.baselines.static import context_parallel_degrees

COST = Cost(quadratic_seconds=1.0, linear_seconds=1000.0, fixed_seconds=77.0, ring_seconds=500.0)


@pytest.mark.parametrize(
    ("ranks", "context", "expected"),
    [
        (8, 100, (1,)),
        (8, 101, (2,)),
        (8, 201, (3, 4)),
        (6, 201, (3, 4)),
        (7, 101, (2, 7)),
        (12, 401, (5, 6, 8)),
        (6, 401, (5, 6)),
    ],
)
def test_static_groups_are_exact_a_divisor_or_a_power_of_two(
    ranks: int, context: int, expected: tuple[int, ...]
) -> None:
    assert context_parallel_degrees(Cluster(ranks=ranks, capacity_tokens=100), context) == expected


@pytest.mark.parametrize(
    ("tokens", "ranks", "ring_seconds", "cp", "seconds"),
    [
        ([150, 150, 150], 7, 2.0, 2, 75.0 + 150),  # three groups of the exact size, one rank idle
        ([150], 7, 0.0, 7, 150 / 7),  # one sequence and free transfers: the divisor, all ranks
        ([450, 450, 450, 450], 12, 0.0, 6, 150.0),  # two groups either way: of 6 ranks it is quicker than of 5
        ([250, 250], 9, 20.0, 3, 250 / 3 + 20 * 250 * 2 / 3),  # a group of 4 would only send more
        ([250] * 3, 11, 0.0, 11, 750 / 11),
        ([250] * 4, 11, 0.3, 4, 2 * (250 / 4 + 0.3 * 250 * 3 / 4)),  # two groups of 4; of three of 3 one has two
    ],
)
def test_static_takes_the_mesh_that_ends_first(
    tokens: list[int], ranks: int, ring_seconds: float, cp: int, seconds: float
) -> None:
    cost = Cost(linear_seconds=1.0, ring_seconds=ring_seconds)
    plan = plan_step(tokens, Cluster(ranks=ranks, capacity_tokens=100), cost, PlanOptions(planner="static"))
    assert {microbatch.pieces[0].degree for microbatch in plan.microbatches} == {cp}
    assert plan.notes["predicted_seconds"] == pytest.approx(seconds)


def test_static_packs_in_data_order_and_deals_in_turn() -> None:
    plan = plan_step(
        [150, 60, 150, 40, 150],
        Cluster(ranks=4, capacity_tokens=100),
        COST,
        PlanOptions(planner="static", context_tokens=200),
    )
    pieces = [microbatch.pieces[0] for microbatch in plan.microbatches]
    assert [piece.sequences for piece in pieces] == [(0, 3), (1,), (2,), (4,)]
    assert [piece.ranks for piece in pieces] == [(0, 1), (2, 3), (0, 1), (2, 3)]


def test_static_packs_up_to_the_context_where_ranks_hold_much_more() -> None:
    """Eight sequences would fill two of four ranks; packs of the context keep all of them busy."""
    plan = plan_step(
        [25] * 8, Cluster(ranks=4, capacity_tokens=100), COST, PlanOptions(planner="static", context_tokens=50)
    )
    assert [microbatch.pieces[0].ranks for microbatch in plan.microbatches] == [(0,), (1,), (2,), (3,)]
    assert all(len(microbatch.pieces[0].sequences) == 2 for microbatch in plan.microbatches)


def test_static_mesh_is_sized_for_the_context_even_without_long_sequences() -> None:
    cluster = Cluster(ranks=4, capacity_tokens=100)
    plan = plan_step([50, 60], cluster, COST, PlanOptions(planner="static", context_tokens=400))
    assert [microbatch.ranks for microbatch in plan.microbatches] == [(0, 1, 2, 3)]


def test_static_refuses_contexts_that_do_not_work() -> None:
    cluster = Cluster(ranks=4, capacity_tokens=100)
    with pytest.raises(PlanError, match="sequence 1: expected at most context_tokens = 100 tokens; got 150"):
        plan_step([50, 150], cluster, COST, PlanOptions(planner="static", context_tokens=100))
    with pytest.raises(PlanError, match=r"context_tokens: .*at most 400 tokens"):
        plan_step([50, 150], cluster, COST, PlanOptions(planner="static", context_tokens=401))
    with pytest.raises(ConfigError, match="context_tokens"):
        plan_step([50], cluster, COST, PlanOptions(planner="static", context_tokens=0))
