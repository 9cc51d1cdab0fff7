"""Ranks end with a pack where that costs nothing: the step ends as before, and what is left could not be moved."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lengthwise.core.plan import Microbatch, Piece
from lengthwise.core.shape import Cluster
from lengthwise.cost import CostModel
from lengthwise.planner import score
from lengthwise.planner.placement.last_local import end_with_packs
from lengthwise.planner.problem.request import PlanRequest
from lengthwise.program import check_plan, ring_order

COST = CostModel(quadratic_seconds=0.1, linear_seconds=1.0, fixed_seconds=3.0)


def _request(tokens: tuple[int, ...], ranks: int, cost: CostModel = COST, **more) -> PlanRequest:
    return PlanRequest(tokens=tokens, cluster=Cluster(ranks=ranks, capacity_tokens=1000), cost=cost, **more)


def _ring(first: int, degree: int, sequence: int) -> Piece:
    return Piece(ranks=ring_order(first, degree), sequences=(sequence,))


def _pack(rank: int, *sequences: int) -> Piece:
    return Piece(ranks=(rank,), sequences=sequences)


def _ends_with_ring(microbatches: list[Microbatch], rank: int) -> bool:
    last = [m for m in microbatches if rank in m.ranks][-1]
    return any(rank in piece.ranks for piece in last.pieces if piece.degree > 1)


@st.composite
def steps(draw: st.DrawFn) -> tuple[PlanRequest, list[Microbatch]]:
    """Draw rings and packs in any order, some packs beside rings, on ranks of any speed."""
    ranks = draw(st.integers(1, 5))
    tokens = tuple(draw(st.lists(st.integers(1, 60), min_size=1, max_size=10)))
    rows: list[list[Piece]] = []
    for i in range(len(tokens)):
        degree = draw(st.integers(1, ranks))
        piece = _ring(draw(st.integers(0, ranks - degree)), degree, i)
        if rows and degree == 1 and draw(st.booleans()):
            draw(st.sampled_from(rows)).append(piece)
        else:
            rows.append([piece])
    cost = replace(COST, fixed_seconds=draw(st.sampled_from([0.0, 3.0, 30.0])))
    speeds = draw(st.none() | st.lists(st.sampled_from([0.5, 1.0, 1.5]), min_size=ranks, max_size=ranks))
    request = _request(tokens, ranks, cost, speeds=None if speeds is None else tuple(speeds))
    return request, [Microbatch(pieces=tuple(row)) for row in rows]


@settings(max_examples=300, deadline=None)
@given(step=steps())
def test_packs_come_last_wherever_the_step_ends_no_later(step: tuple[PlanRequest, list[Microbatch]]) -> None:
    request, before = step
    after = end_with_packs(request, before)
    check_plan(request.draft(after))
    least = score(request.draft(before), request.cost, speeds=request.speeds).makespan_seconds
    assert score(request.draft(after), request.cost, speeds=request.speeds).makespan_seconds <= least * (1 + 1e-12)
    for rank in {rank for microbatch in before for rank in microbatch.ranks}:
        assert _ends_with_ring(before, rank) or not _ends_with_ring(after, rank)


@pytest.mark.parametrize("speed", [1.0, 0.5])
def test_a_pack_before_the_last_ring_moves_behind_it_where_there_is_time(speed: float) -> None:
    """Rank 0 waits for rank 1 with nothing to do but a pack; both could as well end with what rank 0 holds."""
    request = _request((40, 30, 100, 400), 3, speeds=None if speed == 1 else (speed,) * 3)
    before = [Microbatch(pieces=(piece,)) for piece in (_pack(0, 0), _pack(1, 1), _ring(0, 2, 2), _pack(2, 3))]
    after = end_with_packs(request, before)
    assert [m.pieces[0] for m in after] == [_ring(0, 2, 2), _pack(2, 3), _pack(0, 0), _pack(1, 1)]


def test_a_pack_beside_the_last_ring_is_split_off_where_a_launch_fits() -> None:
    before = [Microbatch(pieces=(_ring(0, 2, 0), _pack(0, 1), _pack(1, 2))), Microbatch(pieces=(_pack(2, 3),))]
    roomy = _request((100, 5, 6, 400), 3)
    after = end_with_packs(roomy, before)
    assert [m.pieces for m in after] == [(_ring(0, 2, 0),), (_pack(2, 3),), (_pack(0, 1),), (_pack(1, 2),)]
    level = _request((100, 5, 6, 5), 3)  # rank 1 is the last to finish: a launch more and the step ends later
    assert end_with_packs(level, before) == before
    assert score(level.draft(before), COST).busy_seconds[0] + 3 > score(level.draft(before), COST).makespan_seconds


def test_the_pack_that_takes_least_moves() -> None:
    request = _request((40, 30, 100, 400), 3)
    before = [Microbatch(pieces=(piece,)) for piece in (_pack(0, 0), _pack(0, 1), _ring(0, 2, 2), _pack(2, 3))]
    assert end_with_packs(request, before)[-1].pieces == (_pack(0, 1),)


def test_nothing_moves_where_the_step_would_end_later() -> None:
    request = _request((40, 30, 100), 2)
    before = [Microbatch(pieces=(piece,)) for piece in (_pack(0, 0), _pack(1, 1), _ring(0, 2, 2))]
    assert end_with_packs(request, before) == before
