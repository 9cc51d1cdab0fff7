"""Planners of others: registered, by an installed package, or built in and with a package that may be missing."""

from __future__ import annotations

import importlib
import importlib.metadata
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from lengthwise.core import packages as core_packages
from lengthwise.core.errors import ConfigError, LengthwiseError, PlanError
from lengthwise.core.plan import Microbatch, Piece
from lengthwise.core.shape import Cluster
from lengthwise.cost import Cost, all_terms_cost, named_hardware, named_shape
from lengthwise.planner import PLANNERS, PlanOptions, PlanRequest, plan_step, planner_names, register_planner, registry
from lengthwise.planner.registry import optional_planners
from lengthwise.program import check_plan

COST = Cost(linear_seconds=1.0)
CLUSTER = Cluster(ranks=2, capacity_tokens=10)
PACKAGE = """
from lengthwise.core.plan import Microbatch, Piece

def in_turn(request):
    ranks = request.cluster.ranks
    return [Microbatch(pieces=(Piece(ranks=(i % ranks,), sequences=(i,)),)) for i in range(len(request.tokens))]

number = 7
"""


@pytest.fixture(autouse=True)
def unregistered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_registered", {})


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A package as pip leaves it: a module beside its dist-info."""
    (tmp_path / "own_planner.py").write_text(PACKAGE)
    info = tmp_path / "own_planner-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: own-planner\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[lengthwise.planners]\nin-turn = own_planner:in_turn\nmissing = own_planner:nothing\n"
        "absent = no_such_module:plan\nnumber = own_planner:number\nstatic = own_planner:in_turn\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    yield
    sys.modules.pop("own_planner", None)


def _alone(request: PlanRequest) -> list[Microbatch]:
    return [Microbatch(pieces=(Piece(ranks=(0,), sequences=(i,)),)) for i in range(len(request.tokens))]


def _plan(planner: str) -> dict[str, object]:
    return dict(plan_step([5, 6, 7], CLUSTER, COST, PlanOptions(planner=planner)).notes)


def test_a_registered_planner_plans_and_is_scored() -> None:
    with pytest.raises(ConfigError, match="planner: expected one of lengthwise"):
        _plan("alone")
    register_planner("alone", _alone)
    assert planner_names() == (*PLANNERS, *optional_planners(), "alone")
    notes = _plan("alone")
    assert (notes["planner"], notes["predicted_seconds"], notes["bound_seconds"]) == ("alone", 18.0, 9.0)


@pytest.mark.parametrize("name", ["", "static"])
def test_names_of_ours_are_not_taken(name: str) -> None:
    with pytest.raises(ConfigError, match="a name of its own"):
        register_planner(name, _alone)


def _piece(ranks, sequences, **more):
    return Microbatch(pieces=(Piece(ranks=ranks, sequences=sequences, **more),))


@pytest.mark.parametrize(
    ("planned", "said"),
    [
        (_piece((0,), (0, 1)), "planner wrong, microbatch 0"),
        (_piece((5,), (0,)), "planner wrong: expected ranks from 0 to 1"),
        (_piece((0,), (9,)), "planner wrong: expected ranks from 0 to 1 and sequences from 0 to 2"),
        (_piece((1,), (2,)), "planner wrong, .*sequence"),
        (replace(_piece((0,), (0,)), recompute="foo"), "planner wrong.*recompute"),
        (replace(_piece((0,), (0,)), offload=2.0), "planner wrong.*offload"),
        (_piece((0, 1), (0, 1, 2), heads=3), "planner wrong.*heads that divide the 2 ranks"),
        (_piece((np.int64(0),), (0,)), "planner wrong.*plain numbers"),
        (Microbatch(pieces=None), "planner wrong.*TypeError"),
        (Microbatch(pieces=({"ranks": [0]},)), "planner wrong.*AttributeError"),
        (1, "planner wrong: .*got a int in it"),
    ],
    ids=str,
)
def test_what_a_planner_gets_wrong_names_it(planned, said):
    register_planner("wrong", lambda request: [planned])
    with pytest.raises(LengthwiseError, match=said) as caught:
        _plan("wrong")
    assert caught.value.exit_status == 2


def test_a_planner_may_split_heads() -> None:
    microbatch = Microbatch(pieces=(Piece(ranks=(0, 1), sequences=(0, 1, 2), heads=2),))
    register_planner("heads", lambda request: [microbatch])
    cost = all_terms_cost(named_shape("llama-7b"), named_hardware("h100"))
    assert plan_step([5, 6, 7], CLUSTER, cost, PlanOptions(planner="heads")).requires == ("heads",)


def test_an_exception_of_a_planner_names_it() -> None:
    register_planner("divides", lambda request: 1 // 0)
    with pytest.raises(PlanError, match="planner divides: expected a list of microbatches; got ZeroDivisionError"):
        _plan("divides")
    with pytest.raises(ConfigError, match="planner five: expected a function from a PlanRequest to microbatches; got"):
        register_planner("five", 5)


@pytest.mark.usefixtures("installed")
def test_planners_of_installed_packages_have_names() -> None:
    assert planner_names() == (*PLANNERS, *optional_planners(), "absent", "in-turn", "missing", "number")
    assert _plan("in-turn")["predicted_seconds"] == 12.0


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("missing", "planner missing: expected what entry point own_planner:nothing names; got AttributeError"),
        ("absent", "planner absent: expected what entry point no_such_module:plan names; got ModuleNotFoundError"),
        ("number", "planner number: expected a function at entry point own_planner:number; got a int"),
    ],
)
def test_broken_entry_points_are_named(name: str, told: str) -> None:
    with pytest.raises(PlanError, match=told):
        _plan(name)


ALL_FOUR = Cost(quadratic_seconds=1.0, linear_seconds=100.0, fixed_seconds=500.0, ring_seconds=9.0)
FOUR_RANKS = Cluster(ranks=4, capacity_tokens=100)
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
            plan_step([300], FOUR_RANKS, ALL_FOUR, PlanOptions(planner=planner))
    with pytest.raises(ConfigError, match=r"other than .*megatron-core"):
        register_planner("megatron-core", lambda request: [])
    install(monkeypatch, "megatron-core", "highspy")
    assert {"megatron-core", "flexsp"} <= set(planner_names())


def test_flexsp_plans_small_steps_with_links_and_refuses_others_with_the_reason():
    pytest.importorskip("highspy")
    tokens = [300, 90, 40, 7]
    check_plan(plan_step(tokens, FOUR_RANKS, ALL_FOUR, PlanOptions(planner="flexsp")))
    with pytest.raises(PlanError, match=r"solved in seconds: at most 96 ranks x sequences.*got 4 ranks x 25 sequences"):
        plan_step([9] * 25, FOUR_RANKS, ALL_FOUR, PlanOptions(planner="flexsp"))
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
    plan = plan_step([300, 50, 40, 30], FOUR_RANKS, ALL_FOUR, PlanOptions(planner="megatron-core"))
    check_plan(plan)
    monkeypatch.setitem(sys.modules, SCHEDULE, SimpleNamespace())
    with pytest.raises(PlanError, match=r"BalancedCPScheduler.*megatron-core==0\.16\.1"):
        plan_step([300, 50], FOUR_RANKS, ALL_FOUR, PlanOptions(planner="megatron-core"))
    assert [(piece.degree, piece.sequences) for each in plan.microbatches for piece in each.pieces] == [
        (3, (0,)), (1, (1, 2)), (1, (3,)),
    ]  # fmt: skip
