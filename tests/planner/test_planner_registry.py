"""Planners of others: registered, or by an installed package."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from lengthwise.core.errors import ConfigError, LengthwiseError, PlanError
from lengthwise.core.plan import Microbatch, Piece
from lengthwise.core.shape import Cluster
from lengthwise.cost import Cost
from lengthwise.planner import PLANNERS, PlanOptions, PlanRequest, plan_step, planner_names, register_planner, registry

COST = Cost(linear_seconds=1.0)
CLUSTER = Cluster(ranks=2, capacity_tokens=10)
PACKAGE = """
from lengthwise.core.plan import Microbatch, Piece

def in_turn(request):
    ranks = request.cluster.ranks
    return [Microbatch(pieces=(Piece(ranks=(i % ranks,), sequences=(i,)),)) for i in range(len(request.tokens))]
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
        "static = own_planner:in_turn\n"
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
    assert planner_names() == (*PLANNERS, "alone")
    notes = _plan("alone")
    assert (notes["planner"], notes["predicted_seconds"], notes["bound_seconds"]) == ("alone", 18.0, 9.0)


@pytest.mark.parametrize(
    ("name", "planner", "said"),
    [("", _alone, "a name of its own"), ("static", _alone, "a name of its own"), ("five", 5, "expected a function")],
)
def test_names_of_ours_are_not_taken_and_planners_are_functions(name, planner, said) -> None:
    with pytest.raises(ConfigError, match=said):
        register_planner(name, planner)


def _piece(ranks, sequences, **more):
    return Microbatch(pieces=(Piece(ranks=ranks, sequences=sequences, **more),))


@pytest.mark.parametrize(
    ("planned", "said"),
    [
        (_piece((0,), (0, 1)), "planner wrong, microbatch 0"),
        (_piece((5,), (0,)), "planner wrong: expected ranks from 0 to 1"),
        (_piece((0, 1), (0, 1, 2), heads=3), "planner wrong.*heads that divide the 2 ranks"),
        (_piece((np.int64(0),), (0,)), "planner wrong.*plain numbers"),
        (Microbatch(pieces=None), "planner wrong.*TypeError"),
        (1, "planner wrong: .*got a int in it"),
        (lambda request: 1 // 0, "planner wrong: expected a list of microbatches; got ZeroDivisionError"),
    ],
)
def test_what_a_planner_gets_wrong_names_it(planned, said):
    register_planner("wrong", planned if callable(planned) else lambda request: [planned])
    with pytest.raises(LengthwiseError, match=said) as caught:
        _plan("wrong")
    assert caught.value.exit_status == 2


@pytest.mark.usefixtures("installed")
def test_planners_of_installed_packages_have_names() -> None:
    assert planner_names() == (*PLANNERS, "in-turn", "missing")
    assert _plan("in-turn")["predicted_seconds"] == 12.0
    with pytest.raises(PlanError, match=r"planner missing: .* entry point own_planner:nothing; got AttributeError"):
        _plan("missing")
