"""The exchange of a plan's rings: never slower, and nothing else changed."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lengthwise.core.errors import ConfigError
from lengthwise.core.plan import Microbatch, Piece, Plan
from lengthwise.core.shape import Cluster
from lengthwise.cost import all_terms_cost, named_hardware, named_shape
from lengthwise.planner import PlanOptions, plan_step, score, split_heads
from lengthwise.program import check_plan, ring_order
from properties import costly

COST = all_terms_cost(replace(named_shape("llama-7b"), kv_heads=32), named_hardware("h100"))


@costly
@given(
    tokens=st.lists(st.integers(1, 90_000), min_size=1, max_size=12),
    ranks=st.sampled_from([12, 16, 24]),
    planner=st.sampled_from(["static", "lengthwise", "bytescale"]),
)
def test_split_heads_never_ends_later_and_moves_nothing(tokens, ranks, planner) -> None:
    plan = plan_step(tokens, Cluster(ranks=ranks, capacity_tokens=8192), COST, PlanOptions(planner=planner, layers=32))
    split = split_heads(plan, COST)
    check_plan(split)
    assert score(split, COST).makespan_seconds <= score(plan, COST).makespan_seconds * (1 + 1e-12)
    for before, after in zip(plan.microbatches, split.microbatches, strict=True):
        plain = [replace(p, heads=1, ranks=ring_order(min(p.ranks), p.degree)) for p in after.pieces]
        assert plain == list(before.pieces)
        assert all(p.ranks == ring_order(min(p.ranks), p.degree, p.heads) for p in after.pieces)
    assert ("heads" in split.requires) == any(p.heads > 1 for m in split.microbatches for p in m.pieces)


@pytest.mark.parametrize(("first", "expected"), [(0, 8), (4, 4), (6, 2), (5, 1)])
def test_heads_are_split_where_groups_stay_in_a_node(first: int, expected: int) -> None:
    """Nodes are of eight ranks: groups of eight stay in them from 0 on, of four from 4 on, of two from 6 on."""
    piece = Piece(ranks=ring_order(first, 16), sequences=(0,))
    plan = Plan(ranks=32, layers=32, capacity=8192, tokens=(80_000,), microbatches=(Microbatch(pieces=(piece,)),))
    fast_inside = replace(
        COST,
        near=replace(COST.near, bytes_per_second=1e13),
        far=replace(COST.far, bytes_per_second=2e10),
        exchange_bytes=40 * COST.exchange_bytes,
    )
    assert split_heads(plan, fast_inside).microbatches[0].pieces[0].heads == expected


@pytest.mark.parametrize("asked", [2, 8, "8", 5])
def test_heads_of_a_number_split_every_ring_where_the_number_divides(asked) -> None:
    tokens, number = [90_000, 40_000, 30_000, 20_000, 500], int(str(asked))
    options = PlanOptions(planner="lengthwise", layers=32, heads=asked)
    plan = plan_step(tokens, Cluster(ranks=24, capacity_tokens=8192), COST, options)
    check_plan(plan)
    rings = [piece for m in plan.microbatches for piece in m.pieces if piece.degree > 1]
    for piece in rings:
        fits = piece.degree % number == 0 and COST.heads % number == 0
        assert piece.heads == (number if fits else 1)
        assert piece.ranks == ring_order(min(piece.ranks), piece.degree, piece.heads)
    assert any(piece.heads > 1 for piece in rings) == (number != 5)


@pytest.mark.parametrize("asked", [0, "0", "00", -1, 1.5, "on", True])
def test_heads_of_another_kind_are_refused(asked) -> None:
    with pytest.raises(ConfigError, match="heads"):
        PlanOptions(heads=asked).checked(4, COST)
