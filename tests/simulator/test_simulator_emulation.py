"""Emulation of `benchmarks/`: steps that are slept take what is simulated, namespaces without a trace."""

import os
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from testing.pipelines import as_pipeline
from testing.strict import StrictWorld

import emulated
import namespaces
import pipeline
from emulated import EmulatedRank
from lengthwise.comm import Mesh
from lengthwise.core.errors import ConfigError
from lengthwise.core.plan import Microbatch, Piece, Plan
from lengthwise.cost import Cost
from lengthwise.cost.analytic import SCAN_CUT
from lengthwise.program import Mixing, far_peers, lower_plan
from lengthwise.simulator import simulate_plan
from pipeline import EmulatedStage

RANKS = 4


def _cost() -> Cost:
    """Costs under which own work, blocks, transfers and the step's end each take a part of the step that is seen."""
    cost = emulated.emulated_cost(8.0, nics=emulated.RANKS_PER_NODE)
    slow = replace(cost.near, bytes_per_second=cost.near.bytes_per_second / 60)
    faster = {"quadratic_seconds": 6 * cost.quadratic_seconds, "linear_seconds": cost.linear_seconds / 2}
    return replace(cost, near=slow, reduced_bytes=cost.reduced_bytes / 100, **faster)


def _hybrid_cost() -> Cost:
    """Costs of a model with states under which its scans are seen, too."""
    cost = emulated.emulated_cost(64.0, nics=emulated.RANKS_PER_NODE, model="qwen3.5-9b")
    more_seconds = 19 * cost.cut_seconds
    linear = cost.linear_seconds + more_seconds / SCAN_CUT
    return replace(cost, cut_seconds=cost.cut_seconds + more_seconds, linear_seconds=linear)


def _plan(pieces: list[Piece], tokens: list[int]) -> Plan:
    microbatches = tuple(Microbatch(pieces=(piece,)) for piece in pieces)
    return Plan(ranks=RANKS, layers=emulated.LAYERS, capacity=8192, tokens=tuple(tokens), microbatches=microbatches)


EVERY, NODES = (0, 1, 2, 3), (0, 2, 4, 6, 7, 5, 3, 1)
RING = _plan([Piece(ranks=EVERY, sequences=(0,)), Piece(ranks=(2,), sequences=(1,))], [6000, 700])
HEADS = _plan([Piece(ranks=EVERY, sequences=(0,), heads=2), Piece(ranks=(0, 1), sequences=(1,), heads=2)], [5000, 2000])
MANY = replace(_plan([Piece(ranks=NODES, sequences=tuple(range(20)))], [2000] * 20), ranks=8)
HYBRIDS = {
    "rings of 2, 3 and 8 beside packs": replace(
        RING,
        ranks=8,
        tokens=(9000, 14000, 40000, 900, 5000),
        microbatches=(
            Microbatch(pieces=(Piece(ranks=(0, 1), sequences=(0,)), Piece(ranks=(4, 6, 5), sequences=(1,)))),
            Microbatch(
                pieces=(Piece(ranks=NODES, sequences=(2,)), Piece(ranks=(2,), sequences=(3,))), recompute="layer"
            ),
            Microbatch(pieces=(Piece(ranks=(6,), sequences=(4,)),)),
        ),
    ),
    "many sequences in a ring": MANY,
    "states and heads": replace(
        _plan([Piece(ranks=tuple(range(8)), sequences=(0, 1), heads=4)], [20000, 5000]), ranks=8
    ),
}


class _Clocks(threading.local):
    """In place of `time`, a clock of each thread on which sleeping takes no time."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def _ratio(kind: Callable[..., EmulatedRank], plan: Plan, cost: Cost, monkeypatch: pytest.MonkeyPatch) -> float:
    """Return how long a step took without its end, on clocks of each rank, in parts of the simulated seconds."""
    clocks, stages = _Clocks(), plan.schedule.get("stages", 1)
    for module in (emulated, pipeline):
        monkeypatch.setattr(module, "time", clocks)

    def work(transport: Any) -> float:
        if stages > 1:
            return kind(Mesh(transport, stages), cost, 1e-6).run(plan)
        transport.connect(far_peers(lower_plan(plan, transport.rank), transport.rank, Mixing(has_states=True)))
        return kind(transport, cost, 1e-6).run(plan)

    end = cost.step_end_seconds(plan.ranks)
    took: list[Any] = StrictWorld(plan.ranks * stages).run(work)
    return (max(took) - end) / (simulate_plan(plan, cost).step_seconds - end)


@pytest.mark.parametrize("name", ["ring", "heads", *HYBRIDS])
def test_emulated_steps_take_what_is_simulated(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """To 1 %: ranks that are free early start a microbatch a little sooner than simulated."""
    plan, cost = {"ring": (RING, _cost()), "heads": (HEADS, _cost())}.get(name) or (HYBRIDS[name], _hybrid_cost())
    assert _ratio(EmulatedRank, plan, cost, monkeypatch) == pytest.approx(1.0, rel=0.01)


def test_emulated_pipelines_take_what_is_simulated(monkeypatch) -> None:
    cost = emulated.emulated_cost(8.0, nics=4, stages=2)
    cost = replace(cost, stage_bytes=60 * cost.stage_bytes, reduced_bytes=cost.reduced_bytes / 100)
    pieces = [Piece(ranks=(0, 1), sequences=(0,)), *(Piece(ranks=(i % 2,), sequences=(i,)) for i in range(1, 6))]
    plan = as_pipeline(replace(_plan(pieces, [3000, 700, 900, 400, 600, 800]), ranks=2), 2)
    assert _ratio(EmulatedStage, plan, cost, monkeypatch) == pytest.approx(1.0, rel=0.05)


def test_namespaces_without_root_are_refused(monkeypatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(ConfigError, match="root"), namespaces.shaped_nodes(2, 1e7):
        pass
