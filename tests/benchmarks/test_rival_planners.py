"""Planners of others that benchmarks register: their plans can be run, and a missing package is named."""

import sys
from types import SimpleNamespace

import pytest

from lengthwise.core.errors import ConfigError, PlanError
from lengthwise.core.shape import Cluster
from lengthwise.cost import all_terms_cost, named_hardware, named_shape
from lengthwise.planner import PlanOptions, plan_step, registry
from lengthwise.program import check_plan
from rival_planners import register_rivals

COST = all_terms_cost(named_shape("llama-7b"), named_hardware("h100"))
CLUSTER = Cluster(ranks=4, capacity_tokens=8192)
TOKENS = [20_000, 8_000, 3_000, 700]


class Scheduler:
    """Stands for Megatron-Core's: one sub-batch, sample 0 on all ranks but the last, the others there."""

    def __init__(self, most_tokens, group):
        self.ranks = group.size()

    def get_groups_and_subsamples(self, samples, _config):
        rest = [number for number, _ in samples[1:]]
        return None, [[[0]] * (self.ranks - 1) + [rest]]


def test_registered_rivals_make_plans_that_run(monkeypatch):
    pytest.importorskip("highspy")
    monkeypatch.setattr(registry, "_registered", {})
    scheduler = "megatron.core.pipeline_parallel.hybrid_cp_schedule"
    monkeypatch.setitem(sys.modules, scheduler, SimpleNamespace())
    with pytest.raises(ConfigError, match=r"BalancedCPScheduler.*megatron-core==0\.16\.1"):
        register_rivals(["megatron-core"])
    monkeypatch.setitem(sys.modules, scheduler, SimpleNamespace(BalancedCPScheduler=Scheduler))
    register_rivals(["lengthwise", "flexsp", "megatron-core"])
    asked = ("flexsp", "power-of-two", "megatron-core")
    plans = {name: plan_step(TOKENS, CLUSTER, COST, PlanOptions(planner=name, layers=32)) for name in asked}
    for plan in plans.values():
        check_plan(plan)
    seconds = {name: plan.notes["predicted_seconds"] for name, plan in plans.items()}
    assert seconds["flexsp"] <= seconds["power-of-two"] * (1 + 1e-9)  # it has the groups of the other
    pieces = [piece for each in plans["megatron-core"].microbatches for piece in each.pieces]
    assert [(piece.degree, piece.sequences) for piece in pieces] == [(3, (0,)), (1, (1,)), (1, (2, 3))]
    with pytest.raises(PlanError, match=r"at most 96 ranks x sequences; got 4 ranks x 25 sequences"):
        plan_step([9] * 25, CLUSTER, COST, PlanOptions(planner="flexsp"))
