"""Planners of others, registered by name: small steps are planned, larger ones refused."""

import importlib

import pytest

import other_planners
from lengthwise.core.errors import PlanError
from lengthwise.core.shape import Cluster
from lengthwise.cost import Cost, all_terms_cost, named_hardware, named_shape
from lengthwise.planner import PlanOptions, plan_step, planner_names, registry
from lengthwise.program import check_plan
from other_planners import FLEXSP, MEGATRON, register_others

COST = Cost(quadratic_seconds=1.0, linear_seconds=100.0, fixed_seconds=500.0, ring_seconds=9.0)
CLUSTER = Cluster(ranks=4, capacity_tokens=100)


@pytest.fixture(autouse=True)
def _registered(monkeypatch):
    monkeypatch.setattr(registry, "_registered", {})


class Scheduler:
    """Stands for Megatron-Core's: one sub-batch, sample 0 on all ranks but the last, the others there."""

    def __init__(self, most_tokens, group):
        self.ranks = group.size()

    def get_groups_and_subsamples(self, samples, _config):
        rest = [number for number, _ in samples[1:]]
        return None, [[[0]] * (self.ranks - 1) + [rest]]


def test_flexsp_plans_small_steps_and_refuses_others_with_the_reason():
    pytest.importorskip("highspy")
    assert FLEXSP in register_others()
    plan = plan_step([300, 90, 40, 7], CLUSTER, COST, PlanOptions(planner=FLEXSP))
    check_plan(plan)
    with pytest.raises(PlanError, match=r"solved in 10 s: at most 96 ranks x sequences.*got 4 ranks x 25 sequences"):
        plan_step([9] * 25, CLUSTER, COST, PlanOptions(planner=FLEXSP))
    links = all_terms_cost(named_shape("llama-7b"), named_hardware("h100"))
    with pytest.raises(PlanError, match="costs with links"):
        plan_step([9] * 3, CLUSTER, links, PlanOptions(planner=FLEXSP))


def test_megatron_core_is_a_planner_only_where_it_is_installed(monkeypatch):
    def missing():
        return importlib.import_module("megatron_of_nobody")

    monkeypatch.setattr(other_planners, "load_scheduler", missing)
    assert register_others() == (FLEXSP,)
    assert MEGATRON not in planner_names()
    monkeypatch.setattr(other_planners, "load_scheduler", lambda: Scheduler)
    assert register_others() == (FLEXSP, MEGATRON)
    plan = plan_step([300, 50, 40, 30], CLUSTER, COST, PlanOptions(planner=MEGATRON))
    check_plan(plan)
    assert [(piece.degree, piece.sequences) for each in plan.microbatches for piece in each.pieces] == [
        (3, (0,)), (1, (1, 2)), (1, (3,)),
    ]  # fmt: skip
