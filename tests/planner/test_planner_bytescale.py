"""ByteScale's Algorithm 2: buckets of equal work, ranks that lag behind first."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lengthwise.core.plan import Plan
from lengthwise.core.shape import Cluster
from lengthwise.cost import Cost, all_terms_cost, analytic_cost, named_hardware, named_shape
from lengthwise.data.recipes import draw_lengths
from lengthwise.planner import PlanOptions, plan_step
from lengthwise.planner.baselines import bytescale
from lengthwise.planner.baselines.bytescale import equal_buckets

COST = Cost(linear_seconds=1.0)


def _pieces(plan: Plan) -> list[tuple[list[int], tuple[int, ...]]]:
    return [(sorted(m.pieces[0].ranks), m.pieces[0].sequences) for m in plan.microbatches]


@given(lengths=st.lists(st.integers(1, 1000), min_size=1, max_size=60), count=st.integers(1, 9))
def test_equal_buckets_hold_each_sequence_once_longest_first(lengths: list[int], count: int) -> None:
    assert equal_buckets(np.array(lengths), np.zeros(len(lengths)), count) == [
        np.argsort(-np.array(lengths), kind="stable").tolist()
    ]
    flops = np.square(np.array(lengths, dtype=np.float64))
    buckets = equal_buckets(np.array(lengths), flops, count)
    order = [i for bucket in buckets for i in bucket]
    assert 1 <= len(buckets) <= count
    assert sorted(order) == list(range(len(lengths)))
    assert [lengths[i] for i in order] == sorted(lengths, reverse=True)
    fair, largest = flops.sum() / count, flops.max()
    assert all(flops[bucket].sum() <= (fair + largest) * (1 + 1e-9) for bucket in buckets)


def test_bytescale_takes_from_the_first_bucket_that_is_not_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Buckets [0], [1], [2, 3]: the ring of 3 fits on no lagging ranks, yet it is next, and opens a time step."""
    monkeypatch.setattr(bytescale, "BUCKETS", (4,))
    plan = plan_step([40, 30, 20, 10], Cluster(ranks=5, capacity_tokens=10), COST, PlanOptions(planner="bytescale"))
    assert _pieces(plan) == [([0, 1, 2, 3], (0,)), ([0, 1, 2], (1,)), ([3, 4], (2,)), ([0], (3,))]
    assert plan.notes["predicted_seconds"] == 30.0


def test_bytescale_takes_what_fits_on_lagging_ranks_within_a_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    """One bucket: the fifth rank lags, so the only sequence of one rank is taken before the longer ones."""
    monkeypatch.setattr(bytescale, "BUCKETS", (1,))
    plan = plan_step([40, 30, 20, 10], Cluster(ranks=5, capacity_tokens=10), COST, PlanOptions(planner="bytescale"))
    assert _pieces(plan) == [([0, 1, 2, 3], (0,)), ([4], (3,)), ([0, 1, 2], (1,)), ([3, 4], (2,))]
    assert plan.notes["predicted_seconds"] == 20.0


def test_bytescale_keeps_the_strategy_that_ends_first(monkeypatch) -> None:
    """Of these two batches each strategy is ahead once: one empties a bucket, the other takes turns."""
    work = [bytescale.RingOrPack(degree=1, sequences=[i], seconds=1.0) for i in range(5)]
    for strategy, order in (("dp-balance", [0, 1, 2, 3, 4]), ("pp-balance", [0, 2, 1, 3, 4])):
        _, microbatches = bytescale.assign([work[:2], work[2:]], 5, 0.0, strategy)
        assert [microbatch.pieces[0].sequences[0] for microbatch in microbatches] == order
    cost = analytic_cost(named_shape("llama-7b"), replace(named_hardware("h100"), attention_efficiency=0.36))
    cluster, ahead, both = Cluster(ranks=24, capacity_tokens=8192), set(), ("dp-balance", "pp-balance")
    for recipe in ("github", "wikipedia"):
        tokens, took = draw_lengths(recipe, 2**22, 0, longest_tokens=192_675), {}
        for tried in (both[:1], both[1:], both, both[::-1]):
            monkeypatch.setattr(bytescale, "STRATEGIES", tried)
            plan = plan_step(tokens, cluster, cost, PlanOptions(planner="bytescale"))
            took[tried] = plan.notes["predicted_seconds"]
        first = min(both, key=lambda name: took[name,])
        assert took[both] == took[both[::-1]] == took[first,] < max(took.values())
        ahead.add(first)
    assert ahead == set(both)


@pytest.mark.parametrize(
    ("delta", "then"), [(0.0, [([2], (3,)), ([0, 1], (1,))]), (0.2, [([0, 1], (1,)), ([2], (3,))])]
)
def test_bytescale_takes_ranks_within_delta_for_level(monkeypatch, delta, then):
    """Ranks 0 and 1 are busy for 10 s, rank 2 for 9: it lags, unless delta is 0.2 of the ideal 18.3 s."""
    monkeypatch.setattr(bytescale, "BUCKETS", (1,))
    monkeypatch.setattr(bytescale, "DELTA", delta)
    plan = plan_step([20, 18, 9, 8], Cluster(ranks=3, capacity_tokens=10), COST, PlanOptions(planner="bytescale"))
    assert _pieces(plan) == [([0, 1], (0,)), ([2], (2,)), *then]


def test_bytescale_takes_more_ranks_than_the_fewest_where_heads_then_split() -> None:
    """11 ranks hold it, and no group of heads divides 11."""
    cost = all_terms_cost(named_shape("llama-7b"), named_hardware("h100"))
    cluster, tokens = Cluster(ranks=16, capacity_tokens=1024), [11 * 1024, 700, 300]
    plans = {
        heads: plan_step(tokens, cluster, cost, PlanOptions(planner="bytescale", heads=heads, layers=32))
        for heads in ("off", "auto")
    }
    (plain,) = [piece for each in plans["off"].microbatches for piece in each.pieces if 0 in piece.sequences]
    (split,) = [piece for each in plans["auto"].microbatches for piece in each.pieces if 0 in piece.sequences]
    assert (plain.degree, plain.heads) == (11, 1)
    assert split.degree == 16
    assert split.heads > 1
    assert plans["auto"].notes["predicted_seconds"] < 0.9 * plans["off"].notes["predicted_seconds"]


def test_bytescale_naive_deals_long_ones_in_order_and_fills_rounds_with_packs() -> None:
    plan = plan_step(
        [150, 60, 250, 40, 30, 70], Cluster(ranks=4, capacity_tokens=100), COST, PlanOptions(planner="bytescale-naive")
    )
    pieces = [(microbatch.pieces[0].ranks, microbatch.pieces[0].sequences) for microbatch in plan.microbatches]
    assert pieces == [((0, 1), (0,)), ((2,), (5, 4)), ((3,), (1, 3)), ((0, 2, 1), (2,))]
    assert plan.notes["predicted_seconds"] == pytest.approx(100 + 250 / 3)


@pytest.mark.parametrize("planner", ["bytescale", "bytescale-naive"])
@given(tokens=st.lists(st.integers(1, 900), min_size=1, max_size=40), ranks=st.sampled_from([9, 11, 12]))
def test_bytescale_uses_the_fewest_ranks_and_the_naive_one_nearly_full_packs(planner, tokens, ranks):
    plan = plan_step(tokens, Cluster(ranks=ranks, capacity_tokens=100), COST, PlanOptions(planner=planner))
    pieces = [piece for microbatch in plan.microbatches for piece in microbatch.pieces]
    held = [sum(tokens[i] for i in piece.sequences) for piece in pieces]
    assert [piece.degree for piece in pieces] == [-(-each // 100) for each in held]
    assert all(piece.degree == 1 or len(piece.sequences) == 1 for piece in pieces)
    packs = [each for each in held if each <= 100]
    assert planner == "bytescale" or all(a + b > 100 for a, b in pairwise(packs))  # or they would be one pack
