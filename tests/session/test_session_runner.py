"""The line that a session prints after its first step."""

from dataclasses import replace

import pytest

from lengthwise.cost import plain_cost
from lengthwise.planner import PlanOptions
from lengthwise.planner.service.step_planning import StepPlanning
from lengthwise.session.runner import StepResult, first_step_sentence
from lengthwise.simulator import Branches


@pytest.mark.parametrize(
    ("prompt", "said"),
    [(150, ""), (1000, "; prompts that rows share are computed once: 29% fewer tokens, 21% less time predicted")],
)
def test_the_first_line_says_what_prompts_save_where_they_are_computed_once(prompt: int, said: str) -> None:
    """Before 8 answers of 2,000 tokens; prompts of 150 tokens would save 6 % of them, but 4 % of the time."""
    cost = plain_cost(linear_seconds=1e-4, fixed_seconds=1.0)
    planning = StepPlanning(ranks=1, cost=cost, capacities={"none": 40_000}, options=PlanOptions())
    rows, branches = [prompt + 2000] * 8, Branches(completions=8, prompt_tokens=prompt)
    plan = planning.plan(rows, branches.shared(rows))
    assert ("seconds_apart" if said else "seconds_shared") in plan.notes
    step = StepResult(
        loss=1.0,
        plan=plan,
        num_sequences=8,
        num_tokens=sum(rows),
        num_loss_tokens=16_000,
        busy_seconds=(1.0,),
        wait_seconds=(0.0,),
        step_seconds=1.0,
        plan_seconds=0.0,
    )
    assert first_step_sentence(step, planning, on_gpus=True).endswith(f"(forward and backward only){said}")
    plan = replace(plan, notes={**plan.notes, "predicted_seconds": "0.04"})
    short = first_step_sentence(replace(step, plan=plan), planning, on_gpus=True)
    shared = said.removesuffix(", 21% less time predicted")
    assert short.endswith(f"0% of tokens in rings, took 1.00 s, mostly overhead with so little work{shared}")
