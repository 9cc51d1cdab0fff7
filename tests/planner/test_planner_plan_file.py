"""The plan file: written and read back, plans of other tools read, bad files refused."""

import json
from typing import Any

import pytest

from lengthwise.core.errors import PlanError
from lengthwise.core.plan import Plan
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
    assert Plan.from_json(json.dumps({**json.loads(EXAMPLE), "who": "another tool"})).notes == {"who": "another tool"}
    with pytest.raises(PlanError, match="microbatch 2, rank 5"):  # 7,500 and 900 tokens: as printed, it does not fit
        check_plan(plan)
    check_plan(Plan.from_json(EXAMPLE.replace('"capacity": 8192', '"capacity": 8399')))


@pytest.mark.parametrize(
    ("header", "changes", "told"),
    [
        ({}, {"recompute": "elementwise+6/36"}, "a number of the plan's 32 layers; got elementwise\\+6/36"),
        ({}, {"recompute": "none+6/32", "offload": 0.5}, "one kind beside offload 0.5"),
        ({"schedule": {"kind": "pipeline", "stages": 2, "virtual": 1}}, {"recompute": "none+6/32"}, "in a pipeline"),
    ],
)
def test_a_mix_of_kinds_is_read_back_and_refused_where_it_cannot_run(header, changes, told):
    rows = {"tokens": [512], "microbatches": [{"ranks": [3], "sequences": [0], "recompute": "elementwise+6/32"}]}
    plan = Plan.from_json(json.dumps({**json.loads(EXAMPLE), **rows}))
    check_plan(plan)
    assert plan.microbatches[0].recompute == "elementwise+6/32"
    assert Plan.from_json(plan.to_json()) == plan
    rows["microbatches"][0].update(changes)
    with pytest.raises(PlanError, match=told):
        check_plan(Plan.from_json(json.dumps({**json.loads(EXAMPLE), "requires": ["pipeline"], **header, **rows})))


@pytest.mark.parametrize(
    ("key", "value", "told"),
    [
        ("schema", "lengthwise.plan/2", "lengthwise.plan/1"),
        ("requires", ["telepathy"], "telepathy"),
        ("ranks", True, "ranks"),
        ("capacity", float("nan"), "capacity"),
        ("capacity", 10**30, "capacity"),
        ("tokens", [20000, 1.5], r"tokens\[1\]"),
        ("parents", [None, -1], r"parents\[1\]"),
        ("schedule", {"kind": "magic"}, "schedule"),
        ("microbatches", [{"ranks": [0]}], "microbatch 0, piece 0: sequences"),
        ("microbatches", [{"ranks": [0], "sequences": [0], "offload": float("nan")}], "microbatch 0: offload"),
        ("microbatches", [{"ranks": [0], "sequences": [0], "recompute": "some"}], "microbatch 0: recompute"),
        ("microbatches", [{"ranks": [0], "sequences": [0], "recompute": ["none"]}], "microbatch 0: recompute"),
        ("microbatches", [{"ranks": [0], "sequences": [0], "recompute": "layer+1/32"}], "microbatch 0: recompute"),
        ("microbatches", [{"ranks": [0], "sequences": [0], "recompute": "none+32/32"}], "microbatch 0: recompute"),
        ("microbatches", [{"ranks": [0], "sequences": [0], "shares": [float("inf")]}], "shares"),
        ("planner", json.loads("[" * 900 + "]" * 900), "at most 50 levels"),
        ("microbatches", [{"pieces": []}], "microbatch 0"),
    ],
)
def test_plan_file_refuses_by_place(key: str, value: Any, told: str) -> None:
    text = json.dumps({**json.loads(EXAMPLE), key: value})
    with pytest.raises(PlanError, match=told):
        Plan.from_json(text, "plan.json")


@pytest.mark.parametrize(
    "text", ["[]", "{", '{"ranks": 1, "ranks": 1}', "[" * 100_000, '{"ranks": 1' + "0" * 5000 + "}"]
)
def test_plan_file_refuses_what_is_no_plan(text: str) -> None:
    with pytest.raises(PlanError, match=r"plan\.json"):
        Plan.from_json(text, "plan.json")
