"""The oracle against every plan there is, tried one by one, on tinier steps than its own."""

import itertools
import sys
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exact.oracle import plan_oracle
from lengthwise.core.errors import ConfigError, PlanError
from lengthwise.core.held import held_tokens
from lengthwise.core.plan import Microbatch, Piece, Plan
from lengthwise.core.shape import Cluster
from lengthwise.cost import Cost, plain_cost
from lengthwise.planner import score
from lengthwise.program import check_plan
from planner.partitions import partitions
from properties import costliest

COSTS = st.builds(
    plain_cost,
    quadratic_seconds=st.sampled_from([0.0, 1.0]),
    linear_seconds=st.sampled_from([1.0, 40.0]),
    fixed_seconds=st.sampled_from([0.0, 100.0, 900.0]),
    ring_seconds=st.sampled_from([0.0, 9.0, 60.0]),
    hop_seconds=st.sampled_from([0.0, 70.0]),
)
EXACT = {"relative_gap": 1e-9, "most_nodes": 10**6}


def _fits(lengths: Sequence[int], degree: int, capacity: int, beside: int = 0) -> bool:
    """Tell whether a piece fits, and each sequence alone and with the longest, beside a pack of `beside` tokens."""
    longest = max(lengths)
    rest = list(lengths)
    rest.remove(longest)
    return all(
        held_tokens(some, degree).max() + beside <= capacity + (len(some) if degree > 1 else 0)
        for some in ([longest], *([longest, other] for other in rest), lengths)
    )


def _besides(groups, places, tokens, capacity):
    """Yield every way to put packs of one rank beside rings: {pack: ring}."""
    choices = []
    for pack, where in enumerate(places):
        held = sum(tokens[i] for i in groups[pack])
        rings = [
            ring
            for ring, other in enumerate(places)
            if len(where) == 1 < len(other)
            and where[0] in other
            and _fits([tokens[i] for i in groups[ring]], len(other), capacity, held)
        ]
        choices.append([None, *rings])
    for chosen in itertools.product(*choices):
        joined = {pack: ring for pack, ring in enumerate(chosen) if ring is not None}
        if len({(ring, places[pack]) for pack, ring in joined.items()}) == len(joined):
            yield joined


def _every_plan(tokens: Sequence[int], ranks: int, capacity: int) -> Iterator[Plan]:
    every = [where for n in range(1, ranks + 1) for where in itertools.combinations(range(ranks), n)]
    for groups in partitions(range(len(tokens))):
        held = [[tokens[i] for i in group] for group in groups]
        for places in itertools.product(every, repeat=len(groups)):
            if not all(_fits(group, len(where), capacity) for group, where in zip(held, places, strict=True)):
                continue
            pieces = [Piece(ranks=where, sequences=tuple(group)) for where, group in zip(places, groups, strict=True)]
            for joined in _besides(groups, places, tokens, capacity):
                rows = [
                    (pieces[j], *(pieces[pack] for pack, ring in joined.items() if ring == j))
                    for j in range(len(pieces))
                    if j not in joined
                ]
                for order in itertools.permutations(rows):
                    microbatches = tuple(Microbatch(pieces=row) for row in order)
                    yield Plan(
                        ranks=ranks, layers=1, capacity=capacity, tokens=tuple(tokens), microbatches=microbatches
                    )


def _least(tokens: Sequence[int], ranks: int, capacity: int, cost: Cost) -> float:
    return min(score(plan, cost).makespan_seconds for plan in _every_plan(tokens, ranks, capacity))


@costliest
@given(
    tokens=st.lists(st.integers(1, 45), min_size=1, max_size=3),
    ranks=st.sampled_from([2, 3]),
    capacity=st.integers(10, 30),
    cost=COSTS,
)
def test_oracle_finds_the_best_of_all_plans(tokens: list[int], ranks: int, capacity: int, cost: Cost) -> None:
    tokens = [min(length, ranks * capacity) for length in tokens]
    best = plan_oracle(tokens, Cluster(ranks=ranks, capacity_tokens=capacity), cost, **EXACT)
    assert best.makespan_seconds == pytest.approx(_least(tokens, ranks, capacity, cost), rel=1e-6)
    assert best.bound_seconds == pytest.approx(best.makespan_seconds, rel=1e-6)


BESIDE = plain_cost(linear_seconds=1.0, fixed_seconds=100.0, ring_seconds=9.0)


@pytest.mark.parametrize(
    ("tokens", "ranks", "capacity", "cost", "least"),
    [
        # three rings of two on three ranks: each rank has 20 s of work, but no two rings fit at once
        ([20] * 3, 3, 10, plain_cost(linear_seconds=1.0, ring_seconds=1000.0), 3 * (10 + 1000 * 10)),
        ([30, 30], 3, 20, Cost(linear_seconds=1.0, fixed_seconds=99.0), 99 + 20),  # cut, in one pack
        ([6, 4, 21], 2, 20, BESIDE, 100 + (1 + 9) * 21 / 2 + 6),  # packs beside a ring save launches
        ([21, 17, 6], 2, 20, BESIDE, None),  # 17 is too much beside
    ],
)
def test_oracle_finds_the_best_of_all_plans_where_rings_must_be(tokens, ranks, capacity, cost, least):
    best = plan_oracle(tokens, Cluster(ranks=ranks, capacity_tokens=capacity), cost, **EXACT)
    check_plan(best.plan)
    assert best.makespan_seconds == pytest.approx(least or _least(tokens, ranks, capacity, cost), rel=1e-6)


def test_oracle_refuses_what_is_not_tiny_and_tells_that_its_solver_is_missing(monkeypatch) -> None:
    with pytest.raises(PlanError, match="at most 8 ranks and 10 sequences; got 9 ranks and 1 sequences"):
        plan_oracle([5], Cluster(ranks=9, capacity_tokens=10), Cost(linear_seconds=1.0))
    monkeypatch.setitem(sys.modules, "highspy", None)
    with pytest.raises(ConfigError, match="pip install highspy"):
        plan_oracle([5], Cluster(ranks=2, capacity_tokens=10), Cost(linear_seconds=1.0))
