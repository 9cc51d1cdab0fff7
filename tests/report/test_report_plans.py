"""Plan tables: every number in them by hand."""

from dataclasses import replace

from rich.console import Console
from testing.plans import make_plan

from lengthwise.core.plan import Microbatch, Piece, Plan
from lengthwise.core.shape import Cluster
from lengthwise.cost import all_terms_cost, analytic_cost, named_hardware, named_shape
from lengthwise.planner import PlanOptions, plan_step, score
from lengthwise.report.figures import seconds
from lengthwise.report.plans import degree_table, degrees, plan_table


def shown(table):
    console = Console(width=120, color_system=None)
    with console.capture() as captured:
        console.print(table)
    return [line.split("  ") for line in captured.get().splitlines()]


def cells(row):
    return [cell.strip() for cell in row if cell.strip()]


def test_degree_table_by_hand():
    pieces = [(range(12), [0]), (range(2), [1]), ([3], [2, 3]), (range(16), [4]), (range(9), [5])]
    pieces = [Piece(ranks=tuple(ranks), sequences=tuple(sequences)) for ranks, sequences in pieces]
    plan = make_plan(16, [1000, 300, 50, 50, 2000, 600], pieces)
    assert degrees(plan) == (1, 2, 9, 12, 16)
    assert [cells(row) for row in shown(degree_table(plan))[1:]] == [
        ["1", "2", "100", "2.5 %"],
        ["2", "1", "300", "7.5 %"],
        ["9-16", "3", "3.60K", "90.0 %"],
    ]


def test_plan_table_tells_what_was_chosen():
    halves = Piece(ranks=(0, 2, 1, 3), sequences=(0,), heads=2)
    microbatches = (Microbatch(pieces=(halves,), recompute="layer"),)
    microbatches += (Microbatch(pieces=(Piece(ranks=(0,), sequences=(1,)),), offload=0.5, recompute="layer"),)
    plan = Plan(ranks=4, layers=4, capacity=1000, tokens=(900, 100), microbatches=microbatches)
    plan = replace(plan, requires=("heads",), notes={"bound_seconds": 1.0})
    cost = all_terms_cost(named_shape("llama-7b"), named_hardware("h100"))
    asked = ("recompute", "offload", "heads")
    rows = [cells(row) for row in shown(plan_table({"ours": plan}, cost, title="a title", chosen=asked))]
    assert rows[-3:] == [["recompute", "layer"], ["tokens offloaded", "10.0 %"], ["tokens in split heads", "90.0 %"]]
    unasked = [cells(row) for row in shown(plan_table({"ours": plan}, cost, title="a title", chosen=("heads",)))]
    assert [row[0] for row in unasked[-2:]] == ["microbatches", "tokens in split heads"]


def test_plan_table_shows_the_scores_of_the_cost_model():
    cost = analytic_cost(named_shape("llama-7b"), named_hardware("h100"))
    cluster, tokens = Cluster(ranks=8, capacity_tokens=16_384), [50_000, 3000, 700, 9000]
    plans = {name: plan_step(tokens, cluster, cost, PlanOptions(planner=name)) for name in ("static", "lengthwise")}
    lines = [cells(row) for row in shown(plan_table(plans, cost, title="a title (model)"))]
    assert lines[0] == ["a title (model)"]
    table = {row[0]: row[1:] for row in lines[-6:]}
    scored = [score(plan, cost) for plan in plans.values()]
    bounds = [plan.notes["bound_seconds"] for plan in plans.values()]
    assert table == {
        "planner": ["static", "lengthwise"],
        "step time": [seconds(each.makespan_seconds) for each in scored],
        "idle": [f"{100 * each.idle_ratio:.1f} %" for each in scored],
        "tokens in rings": [f"{100 * plan.ring_tokens / 62_700:.1f} %" for plan in plans.values()],
        "above the bound": [
            f"{100 * (each.makespan_seconds / bound - 1):.1f} %" for each, bound in zip(scored, bounds, strict=True)
        ],
        "microbatches": [str(len(plan.microbatches)) for plan in plans.values()],
    }
    assert table["tokens in rings"][0] == "100.0 %", "the static mesh cuts short ones, too"
