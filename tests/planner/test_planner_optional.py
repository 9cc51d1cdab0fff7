"""Planners that need a package of somebody else: there where it is, and known by name where it is not."""

import importlib.metadata
import sys
from types import SimpleNamespace

import pytest

from lengthwise.core import packages as core_packages
from lengthwise.core.errors import ConfigError, PlanError
from lengthwise.core.shape import Cluster
from lengthwise.cost import Cost, all_terms_cost, named_hardware, named_shape
from lengthwise.planner import PlanOptions, plan_step, planner_names, register_planner
from lengthwise.program import check_plan

COST = Cost(quadratic_seconds=1.0, linear_seconds=100.0, fixed_seconds=500.0, ring_seconds=9.0)
CLUSTER = Cluster(ranks=4, capacity_tokens=100)
SCHEDULE = "megatron.core.pipeline_parallel.hybrid_cp_schedule"


class Scheduler:
    """Stands for Megatron-Core's: one sub-batch, sample 0 on all ranks but the last, the others there."""

    def __init__(self, most_tokens, group):
        self.ranks = group.size()

    def get_groups_and_subsamples(self, samples, _config):
        rest = [number for number, _ in samples[1:]]
        return None, [[[0]] * (self.ranks - 1) + [rest]]


def install(monkeypatch, *packages):
    """Let these packages alone be installed."""

    def found(name):
        if name not in packages:
            raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(core_packages, "distribution", found)


def test_optional_planners_are_there_where_their_package_is(monkeypatch):
    install(monkeypatch)
    assert not {"megatron-core", "flexsp"} & set(planner_names())
    for planner, install_it in (
        ("megatron-core", r"no megatron-core installed\. pip install --no-deps megatron-core==\S+ packaging"),
        ("flexsp", r"no highspy installed\. pip install 'lengthwise\[bench\]'"),
    ):
        with pytest.raises(ConfigError, match=install_it):
            plan_step([300], CLUSTER, COST, PlanOptions(planner=planner))
    install(monkeypatch, "megatron-core", "highspy")
    assert {"megatron-core", "flexsp"} <= set(planner_names())


def test_their_names_are_taken_wherever_they_are_not_installed(monkeypatch):
    install(monkeypatch)
    with pytest.raises(ConfigError, match=r"other than .*megatron-core"):
        register_planner("megatron-core", lambda request: [])


def test_flexsp_plans_small_steps_with_links_and_refuses_others_with_the_reason():
    pytest.importorskip("highspy")
    tokens = [300, 90, 40, 7]
    check_plan(plan_step(tokens, CLUSTER, COST, PlanOptions(planner="flexsp")))
    with pytest.raises(PlanError, match=r"solved in seconds: at most 96 ranks x sequences.*got 4 ranks x 25 sequences"):
        plan_step([9] * 25, CLUSTER, COST, PlanOptions(planner="flexsp"))
    links = all_terms_cost(named_shape("llama-7b"), named_hardware("h100"))
    asked, cluster = [20_000, 9_000, 3_000, 700, 512], Cluster(ranks=8, capacity_tokens=8192)
    seconds = {
        planner: plan_step(asked, cluster, links, PlanOptions(planner=planner, layers=32)).notes["predicted_seconds"]
        for planner in ("flexsp", "power-of-two")
    }
    assert seconds["flexsp"] <= seconds["power-of-two"] * (1 + 1e-9)  # it has the groups of the other


def test_megatron_core_plans_what_its_scheduler_says(monkeypatch):
    install(monkeypatch, "megatron-core")
    monkeypatch.setitem(sys.modules, SCHEDULE, SimpleNamespace(BalancedCPScheduler=Scheduler))
    plan = plan_step([300, 50, 40, 30], CLUSTER, COST, PlanOptions(planner="megatron-core"))
    check_plan(plan)
    assert [(piece.degree, piece.sequences) for each in plan.microbatches for piece in each.pieces] == [
        (3, (0,)), (1, (1, 2)), (1, (3,)),
    ]  # fmt: skip


def test_a_megatron_core_without_that_scheduler_is_refused_with_the_version_that_has_it(monkeypatch):
    install(monkeypatch, "megatron-core")
    monkeypatch.setitem(sys.modules, SCHEDULE, SimpleNamespace())
    with pytest.raises(PlanError, match=r"BalancedCPScheduler.*megatron-core==0\.16\.1"):
        plan_step([300, 50], CLUSTER, COST, PlanOptions(planner="megatron-core"))
