"""The plan file: written and read back, plans of other tools read, bad files refused."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from testing.plans import clip_for

from lengthwise.core.errors import PlanError
from lengthwise.core.plan import Plan
from lengthwise.core.shape import Cluster
from lengthwise.cost import Cost
from lengthwise.planner import PLANNERS, PlanOptions, plan_step
from lengthwise.program import check_plan

EXAMPLE = """
{"schema": "lengthwise.plan/1", "requires": [], "ranks": 8, "layers": 32, "capacity": 8192,
 "tokens": [20000, 512, 700, 60000, 900],
 "schedule": {"kind": "free"},
 "microbatches": [
   {"pieces": [{"ranks": [0, 1, 2], "sequences": [0]}], "offload": 0.0, "recompute": "none"},
   {"ranks": [3], "sequences": [1, 2]},
   {"pieces": [{"ranks": [0, 1, 2, 3, 4, 5, 6, 7], "sequences": [3]}, {"ranks": [5], "sequences": [4]}]}]}
"""


def test_plan_file_reads_several_pieces_in_a_microbatch() -> None:
    plan = Plan.from_json(EXAMPLE)
    assert [len(microbatch.pieces) for microbatch in plan.microbatches] == [1, 1, 2]
    assert plan.microbatches[2].pieces[1].sequences == (4,)
    assert plan.microbatches[1].pieces[0].ranks == (3,)
    with pytest.raises(PlanError, match="microbatch 2, rank 5"):  # 7,500 and 900 tokens: as printed, it does not fit
        check_plan(plan)
    check_plan(Plan.from_json(EXAMPLE.replace('"capacity": 8192', '"capacity": 8399')))


@given(
    tokens=st.lists(st.integers(1, 400), min_size=1, max_size=12),
    ranks=st.integers(4, 9),
    planner=st.sampled_from(PLANNERS),
)
def test_plan_file_round_trip_is_the_same_plan_and_text(tokens: list[int], ranks: int, planner: str) -> None:
    cost = Cost(quadratic_seconds=1e-3, linear_seconds=0.1, fixed_seconds=0.3, version='a "quoted" version')
    tokens = clip_for(planner, tokens, 100)
    plan = plan_step(tokens, Cluster(ranks=ranks, capacity_tokens=100), cost, PlanOptions(planner=planner, layers=3))
    again = Plan.from_json(plan.to_json())
    assert again == plan
    assert again.to_json() == plan.to_json()
    assert again.digest() == plan.digest()
    assert again.notes["planner"] == planner


@pytest.mark.parametrize(
    ("key", "value", "told"),
    [
        ("schema", "lengthwise.plan/2", "lengthwise.plan/1"),
        ("requires", ["telepathy"], "telepathy"),
        ("requires", "heads", "requires"),
        ("ranks", 0, "ranks"),
        ("ranks", 8.0, "ranks"),
        ("ranks", True, "ranks"),
        ("layers", None, "layers"),
        ("capacity", "8192", "capacity"),
        ("capacity", float("nan"), "capacity"),
        ("tokens", [20000, -1], r"tokens\[1\]"),
        ("tokens", [20000, 1.5], r"tokens\[1\]"),
        ("tokens", "12", "tokens"),
        ("schedule", {"kind": "magic"}, "schedule"),
        ("microbatches", {}, "microbatches"),
        ("microbatches", [{"ranks": [0]}], "microbatch 0, piece 0: sequences"),
        ("microbatches", [{"ranks": [0.5], "sequences": [0]}], "microbatch 0, piece 0: ranks"),
        ("microbatches", [{"ranks": [0], "sequences": [0], "offload": float("nan")}], "microbatch 0: offload"),
        ("microbatches", [{"ranks": [0], "sequences": [0], "offload": 1.5}], "microbatch 0: offload"),
        ("microbatches", [{"ranks": [0], "sequences": [0], "recompute": "some"}], "microbatch 0: recompute"),
        ("microbatches", [{"ranks": [0], "sequences": [0], "shares": [float("inf")]}], "shares"),
        ("microbatches", [{"ranks": [0], "sequences": [0], "shares": [10**400]}], "shares"),
        ("planner", json.loads("[" * 900 + "]" * 900), "at most 50 levels"),
        ("microbatches", [{"pieces": []}], "microbatch 0"),
    ],
)
def test_plan_file_refuses_by_place(key: str, value: Any, told: str) -> None:
    text = json.dumps({**json.loads(EXAMPLE), key: value})
    with pytest.raises(PlanError, match=told):
        Plan.from_json(text, "plan.json")


@pytest.mark.parametrize("text", ["", "[]", "null", "{", "7", '"plan"', "[" * 100_000])
def test_plan_file_refuses_what_is_no_plan(text: str) -> None:
    with pytest.raises(PlanError, match=r"plan\.json"):
        Plan.from_json(text, "plan.json")


def test_plan_file_keeps_extra_keys_as_notes() -> None:
    text = json.dumps({**json.loads(EXAMPLE), "who": "another tool"})
    assert Plan.from_json(text).notes == {"who": "another tool"}


@pytest.mark.parametrize("number", ["1" + "0" * 30, "1" + "0" * 5000], ids=["thirty digits", "thousands of digits"])
def test_numbers_beyond_any_machine_are_refused(number):
    sizes = f'"ranks": 1, "layers": 1, "capacity": {number}, "tokens": [1]'
    text = f'{{"schema": "lengthwise.plan/1", {sizes}, "microbatches": []}}'
    with pytest.raises(PlanError):
        Plan.from_json(text)
    with pytest.raises(PlanError):
        Plan.from_json(text.replace(number, "5").replace("[1]", f"[{number}]"))
