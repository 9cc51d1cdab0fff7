"""The independent score: the clock of every rank, by hand."""

from dataclasses import replace

import pytest

from lengthwise.core.errors import PlanError
from lengthwise.core.plan import Microbatch, Piece, Plan
from lengthwise.cost import CostModel
from lengthwise.planner import score

COST = CostModel(linear_seconds=1.0, fixed_seconds=10.0)


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
