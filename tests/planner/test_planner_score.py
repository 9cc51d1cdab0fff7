"""The independent score: the clock of every rank, by hand."""

from dataclasses import replace

import pytest

from lengthwise.core.errors import PlanError
from lengthwise.core.plan import Microbatch, Piece, Plan
from lengthwise.cost import Cost
from lengthwise.planner import score

COST = Cost(linear_seconds=1.0, fixed_seconds=10.0)


def _plan(*rows: list[tuple[tuple[int, ...], tuple[int, ...]]], tokens: tuple[int, ...], ranks: int = 3) -> Plan:
    microbatches = tuple(
        Microbatch(pieces=tuple(Piece(ranks=where, sequences=which) for where, which in row)) for row in rows
    )
    return Plan(ranks=ranks, layers=1, capacity=100, tokens=tokens, microbatches=microbatches)


def test_score_starts_a_ring_when_its_last_rank_is_free() -> None:
    plan = _plan([((0,), (0,))], [((0, 1), (1,))], [((2,), (2,))], tokens=(5, 40, 7))
    scored = score(plan, COST)
    assert scored.busy_seconds == (15 + 30, 30, 17)
    assert scored.makespan_seconds == 15 + 30
    assert scored.idle_ratio == pytest.approx(1 - (45 + 30 + 17) / 3 / 45)
    assert scored.ring_tokens == 40
    assert scored.ring_token_ratio == 40 / 52


def test_score_keeps_a_rank_busy_for_the_sum_of_its_pieces_and_one_launch() -> None:
    plan = _plan([((0, 1), (0,)), ((1,), (1,))], tokens=(40, 7), ranks=2)
    assert score(plan, COST).busy_seconds == (30, 37)


def test_score_lets_ranks_run_apart() -> None:
    plan = _plan([((0,), (0,))], [((1,), (1,))], [((0,), (2,))], tokens=(5, 50, 6))
    assert score(plan, COST).makespan_seconds == 60


def test_score_of_waves_waits_for_every_rank() -> None:
    plan = _plan([((0,), (0,))], [((1,), (1,))], tokens=(5, 50))
    waves = replace(plan, schedule={"kind": "waves"}, requires=("waves",))
    assert score(waves, COST).makespan_seconds == 15 + 60


def test_score_of_idle_ranks_counts_them() -> None:
    assert score(_plan([((0,), (0,))], tokens=(5,), ranks=4), COST).idle_ratio == 0.75


@pytest.mark.parametrize(
    ("feature", "microbatch"),
    [
        ("offload", Microbatch(pieces=(Piece(ranks=(0, 1), sequences=(0,)),), offload=0.5)),
        ("heads", Microbatch(pieces=(Piece(ranks=(0, 1), sequences=(0,), heads=2),))),
        ("shares", Microbatch(pieces=(Piece(ranks=(0, 1), sequences=(0,), shares=(1.0, 2.0)),))),
    ],
)
def test_score_refuses_what_its_costs_do_not_tell(feature: str, microbatch: Microbatch) -> None:
    plan = Plan(ranks=2, layers=4, capacity=100, tokens=(20,), microbatches=(microbatch,))
    with pytest.raises(PlanError, match=feature):
        score(plan, COST)


def test_score_of_a_pipeline_runs_its_stages() -> None:
    plan = _plan(*[[((rank,), (2 * i + rank,))] for i in range(4) for rank in (0, 1)], tokens=(20,) * 8, ranks=2)
    piped = replace(plan, schedule={"kind": "pipeline", "stages": 4, "virtual": 2}, requires=("pipeline",))
    scored = score(piped, COST)
    assert scored.makespan_seconds == pytest.approx(30 / 2 * (4 * 2 + 3))
    assert scored.busy_seconds == (120, 120)
    assert score(replace(piped, schedule={**piped.schedule, "stages": 1}), COST).makespan_seconds == 120


def test_score_of_a_pipeline_depends_on_the_order_of_unequal_microbatches() -> None:
    """Of 60, 40 and 20 seconds in two stages, falling or rising, F and B are 1 and 2 of 3 parts."""
    ends = {}
    for tokens in ((50, 30, 10), (10, 30, 50), (30, 10, 50)):
        plan = _plan(*[[((0,), (i,))] for i in range(3)], tokens=tokens, ranks=1)
        piped = replace(plan, schedule={"kind": "pipeline", "stages": 2, "virtual": 1}, requires=("pipeline",))
        ends[tokens] = score(piped, COST).makespan_seconds
    # stage 1: F and B of 60 from 20 to 80; stage 0: B of 60 until 120, F of 20, B of 40 until 153.3, B of 20
    assert ends[50, 30, 10] == pytest.approx(20 + 60 + 40 + 20 / 3 + 80 / 3 + 40 / 3)
    assert ends[10, 30, 50] == pytest.approx(20 / 3 + 20 + 40 + 60 + 40)
    assert ends[30, 10, 50] > 166
