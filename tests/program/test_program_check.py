"""Every rule of the plan file, broken one at a time, and the features that plans use and readers know."""

import json
from dataclasses import replace
from typing import Any

import pytest
from testing.plans import make_plan

from lengthwise.core.errors import PlanError, Problems
from lengthwise.core.plan import KNOWN_FEATURES, Microbatch, Piece, Plan
from lengthwise.program import Feature, check_plan, refuse_unsupported
from lengthwise.program.features import features_of


def _plan(**changes: Any) -> Plan:
    raw: dict[str, Any] = {
        "schema": "lengthwise.plan/1",
        "ranks": 4,
        "layers": 8,
        "capacity": 100,
        "tokens": [250, 60, 40, 10],
        "microbatches": [
            {"ranks": [0, 2, 1], "sequences": [0]},
            {"ranks": [3], "sequences": [1, 2]},
            {"ranks": [0], "sequences": [3]},
        ],
    }
    return Plan.from_json(json.dumps({**raw, **changes}))


@pytest.mark.parametrize(
    ("rows", "told"),
    [
        ([{"ranks": [0, 1, 4], "sequences": [0]}], "microbatch 0, piece 0: .*got rank 4"),
        ([{"ranks": [0, 1, 1], "sequences": [0]}], "microbatch 0, piece 0: .*rank 1 2 times"),
        ([{"ranks": [0, 1, 2], "sequences": [9]}], "microbatch 0, piece 0: .*got sequence 9"),
        ([{"ranks": [], "sequences": [0]}], "microbatch 0, piece 0: expected at least one rank"),
        ([{"ranks": [0, 1, 2], "sequences": [0]}], "sequence 1 of 60 tokens: .*got in 0 places"),
        ([{"ranks": [0], "sequences": [3, 3]}], "sequence 3 of 10 tokens: .*got in 2 places"),
        ([{"ranks": [0, 1, 2], "sequences": [0], "heads": 2}], "heads that divide the 3 ranks"),
        ([{"ranks": [0, 1, 2], "sequences": [0], "shares": [1, 1]}], "3 shares, one per rank"),
        ([{"ranks": [0, 1, 2], "sequences": [0], "shares": [0, 0, 0]}], "finite sum above 0"),
        (
            [{"pieces": [{"ranks": [0, 1, 2], "sequences": [0]}, {"ranks": [1], "sequences": [1]}]}],
            r"microbatch 0, rank 1: expected at most 100 tokens held \(\+ 1 for rounding\)",
        ),
    ],
)
def test_check_plan_names_the_broken_rule(rows: list[dict[str, Any]], told: str) -> None:
    with pytest.raises((PlanError, Problems), match=told):
        check_plan(_plan(microbatches=rows))


@pytest.mark.parametrize(
    ("feature", "changes"),
    [
        ("branches", {"microbatches": [{"ranks": [0], "sequences": [1, 0]}], "tokens": [20, 9], "parents": [1, None]}),
        ("heads", {"microbatches": [{"ranks": [0, 1], "sequences": [0], "heads": 2}], "tokens": [20]}),
        ("shares", {"microbatches": [{"ranks": [0, 1], "sequences": [0], "shares": [1, 2]}], "tokens": [20]}),
        ("waves", {"schedule": {"kind": "waves"}}),
        ("pipeline", {"schedule": {"kind": "pipeline", "stages": 2, "virtual": 1}}),
    ],
)
def test_check_plan_wants_used_features_listed(feature: str, changes: dict[str, Any]) -> None:
    check_plan(_plan(**changes, requires=[feature]))
    with pytest.raises(PlanError, match=f'requires: expected "{feature}" listed'):
        check_plan(_plan(**changes))


@pytest.mark.parametrize(
    ("pieces", "parents"),
    [
        ([[1], [0, 2, 3]], [1, None, None, None]),  # in another piece
        ([[0, 1, 2, 3]], [1, None, None, None]),  # before it
        ([[1, 0, 2, 3]], [1, None, None, 1]),  # not next to what continues it
        ([[0, 1, 2, 3]], [1, 0, None, None]),  # each other
        ([[0, 1, 2, 3]], [None, None, None, 9]),
    ],
)
def test_check_plan_wants_branches_after_what_they_continue(pieces, parents):
    rows = [{"ranks": [0, 1, 2, 3], "sequences": each} for each in pieces]
    with pytest.raises((PlanError, Problems), match="which it continues, depth first after it"):
        check_plan(_plan(microbatches=rows, parents=parents, requires=["branches"]))


@pytest.mark.parametrize(
    ("changes", "more", "said"),
    [
        # 2 of 8 layers stay: 400 x 2 / 8
        ({"offload": 1.0, "ranks": [0], "tokens": 400}, 401, r"401 tokens at offload 1\.0"),
        # a token of rounding where a sequence is cut, and only there
        ({"ranks": [0, 1], "tokens": 200}, 204, r"at most 100 tokens held \(\+ 1 for rounding\); got 102"),
        ({"ranks": [0], "tokens": 100}, 101, r"at most 100 tokens held \(\+ 0 for rounding\); got 101 tokens"),
        ({"ranks": [0, 1], "shares": [3, 1], "tokens": 134}, 140, "microbatch 0, rank 0"),
    ],
)
def test_check_plan_counts_tokens_after_offload_rounding_and_shares(changes, more, said):
    row, requires = {"sequences": [0], **changes}, ["shares"] * ("shares" in changes)
    check_plan(_plan(tokens=[row.pop("tokens")], requires=requires, microbatches=[row]))
    with pytest.raises((PlanError, Problems), match=said):
        check_plan(_plan(tokens=[more], requires=requires, microbatches=[row]))


def test_check_plan_refuses_what_no_file_can_say() -> None:
    piece = Piece(ranks=(0,), sequences=(0,))
    for tokens, pieces, said in (
        ((0,), (piece,), r"tokens\[0\]"),
        ((), (), "microbatch 0: expected at least one piece"),
    ):
        plan = Plan(ranks=1, layers=1, capacity=9, tokens=tokens, microbatches=(Microbatch(pieces=pieces),))
        with pytest.raises(PlanError, match=said):
            check_plan(plan)
    with pytest.raises((PlanError, Problems), match="parents: expected one for each of the 4 sequences; got 2"):
        check_plan(_plan(parents=[None, None], requires=["branches"]))
    with pytest.raises(PlanError, match="schedule: virtual"):
        check_plan(_plan(schedule={"kind": "pipeline", "stages": 2}, requires=["pipeline"]))


RING = Piece(ranks=(0, 2, 1), sequences=(0,))
PAIR = Piece(ranks=(1, 2), sequences=(1,))


def test_features_are_those_that_a_plan_uses():
    plan = make_plan(3, [8, 4], [replace(RING, shares=(1.0, 2.0, 1.0)), PAIR])
    first, second = plan.microbatches
    plan = replace(plan, microbatches=(replace(first, recompute="layer"), replace(second, offload=0.5)))
    plan = replace(plan, schedule={"kind": "waves"}, notes={"speeds": [[3, 0.5]]})
    assert features_of(plan) == {"waves", "speeds", "recompute", "shares", "offload"}


def test_features_of_plain_rings_and_speeds_of_one_are_none():
    assert not features_of(replace(make_plan(3, [8, 4], [RING, PAIR]), notes={"speeds": [[2, 1], [1, 1.0]]}))
    assert {str(feature) for feature in Feature} >= KNOWN_FEATURES


def test_features_heads_and_schedules_are_refused_by_name():
    heads = make_plan(4, [8], [replace(RING, ranks=(0, 1, 2, 3), heads=2)])
    refuse_unsupported(heads)
    refuse_unsupported(heads, num_heads=6)
    with pytest.raises(PlanError, match=r"microbatch 0: heads.*divisor of the model's 7 attention heads.* 2"):
        refuse_unsupported(heads, num_heads=7)
    refuse_unsupported(replace(make_plan(3, [8], [RING]), schedule={"kind": "waves"}))
    with pytest.raises(PlanError, match=r"schedule.*pipeline"):
        refuse_unsupported(replace(make_plan(3, [8], [RING]), schedule={"kind": "pipeline"}))
    with pytest.raises(Problems) as several:
        refuse_unsupported(replace(heads, schedule={"kind": "pipeline"}), num_heads=7)
    assert len(several.value.problems) == 2
