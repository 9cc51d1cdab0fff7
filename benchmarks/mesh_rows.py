"""What a planner does on its best mesh, as a line of a file: searched once, then read again.

1. `search` asks the package for the best mesh of one planner (`lengthwise.simulator.best_meshes`): today's, of those
   that the engine of this version runs, and the best of all.
2. A line of JSON holds the seconds of every batch and a few ratios; tables are made from lines alone.

Cost: ten to twenty plans a line. Lines of a file are kept, so that a run can be taken up again.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lengthwise.core.errors import LengthwiseError
from lengthwise.cost import named_hardware, named_shape
from lengthwise.report.simulation import OURS
from lengthwise.simulator import Found, Gain, MeshQuestion, best_meshes, gain_over, stages_to_try, tensors_to_try


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """A planner on one mesh; entry i of the lists is of batch i.

    mesh: in words. bound_seconds: no plan of its kind on this mesh ends before it, the step's end left out.
    flops_ratio: of all devices' peak (MFU). trains: whether the engine runs these plans.
    """

    mesh: str
    seconds: list[float]
    ideal_seconds: list[float]
    bound_seconds: list[float]
    flops_ratio: float
    trains: bool

    @property
    def mean_seconds(self) -> float:
        """Of a step."""
        return float(np.mean(self.seconds))

    @property
    def ideal_ratio(self) -> float:
        """Ideal seconds over those of the steps: 1 where nothing is lost."""
        return sum(self.ideal_seconds) / sum(self.seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshRow:
    """One planner in one place (what was asked, as words of a table); None: no mesh holds the sequences."""

    place: tuple[str, ...]
    planner: str
    today: Taken | None
    any_mesh: Taken | None
    tried: int
    refused: str = ""

    @property
    def best(self) -> Taken | None:
        """Return that of the two which ends first: the search ranks meshes by one batch, and this is of all."""
        return self._first((self.today, self.any_mesh))

    @property
    def best_today(self) -> Taken | None:
        """Return that of the two which ends first of those that the engine runs: the wider search may meet one, too."""
        return self._first([side for side in (self.today, self.any_mesh) if side is not None and side.trains])

    @staticmethod
    def _first(sides: Iterable[Taken | None]) -> Taken | None:
        return min((side for side in sides if side is not None), key=lambda side: side.mean_seconds, default=None)

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> MeshRow:
        """Read a line."""
        sides = {name: Taken(**raw[name]) if raw[name] else None for name in ("today", "any_mesh")}
        return cls(**{**raw, **sides, "place": tuple(raw["place"])})


def read_lines(file: Path) -> list[dict[str, Any]]:
    """Return the objects of a file of JSON lines, none if there is no such file."""
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] if file.exists() else []


def add_line(file: Path, row: Any) -> None:
    """Write a record at the end of a file of JSON lines."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a", encoding="utf-8") as opened:
        opened.write(json.dumps(asdict(row)) + "\n")


def mesh_question(model: str, hardware_name: str, *, devices: int, longest_tokens: int) -> MeshQuestion:
    """Return what is asked of every planner: this model on these devices, all meshes that it could run on."""
    shape, hardware = named_shape(model), named_hardware(hardware_name)
    return MeshQuestion(
        shape=shape,
        hardware=hardware,
        devices=devices,
        context_tokens=longest_tokens,
        tensors=tensors_to_try(shape, hardware, devices),
        stages=stages_to_try(shape, devices),
    )


def search(place: tuple[str, ...], planner: str, batches: Sequence[Sequence[int]], question: MeshQuestion) -> MeshRow:
    """Search the best mesh of a planner; one that holds the sequences nowhere has a row that says so."""
    try:
        (best,) = best_meshes([planner], batches, question)
    except LengthwiseError as error:
        return MeshRow(place=place, planner=planner, today=None, any_mesh=None, tried=0, refused=str(error))
    sides = (_taken(best.today), _taken(best.any_mesh))
    refused = "" if best.refusal is None else str(best.refusal)
    return MeshRow(place=place, planner=planner, today=sides[0], any_mesh=sides[1], tried=best.tried, refused=refused)


def _taken(found: Found | None) -> Taken | None:
    if found is None:
        return None
    steps = found.result.steps
    return Taken(
        mesh=mesh_words(found),
        seconds=[step.step_seconds for step in steps],
        ideal_seconds=[step.ideal_seconds for step in steps],
        bound_seconds=[step.bound_seconds for step in steps],
        flops_ratio=found.result.flops_ratio,
        trains=found.trains,
    )


def mesh_words(found: Found) -> str:
    """Say what a planner took: devices of a rank, tokens that it holds, and what its plans use of what they may."""
    mesh, steps = found.mesh, found.result.steps
    held = [f"{tokens:,}" for tokens in found.held_tokens.values()]
    words = [f"TP {mesh.tensor}", *([f"PP {mesh.stages}"] if mesh.stages > 1 else []), f"{' or '.join(held)} tokens"]
    words += [f"recompute {kind}" for kind in found.held_tokens if kind != "none"]
    words += ["heads"] if max(step.most_heads for step in steps) > 1 else []
    words += ["offload"] if max(step.most_offload for step in steps) > 0 else []
    return ", ".join([*words, f"degree to {max(step.most_degree for step in steps):,}"])


def whole_places(rows: Sequence[MeshRow], planners: Iterable[str]) -> list[MeshRow]:
    """Return the rows of places that have all of these planners: a missing rival would flatter."""
    found: dict[tuple[str, ...], set[str]] = {}
    for row in rows:
        found.setdefault(row.place, set()).add(row.planner)
    return [row for row in rows if found[row.place].issuperset(planners)]


def best_other(sides: Mapping[str, Taken | None], *, among: Sequence[str] | None = None) -> tuple[str, Taken] | None:
    """Return the planner beside ours that ends first, with what it took; `among`: of these alone (default: of all)."""
    names = [name for name in sides if name != OURS] if among is None else among
    others = [(name, side) for name in names if (side := sides.get(name)) is not None]
    return min(others, key=lambda each: each[1].mean_seconds, default=None)


def gain_of(other: Taken, ours: Taken) -> Gain:
    """Compare two planners on the same batches."""
    return gain_over(other.seconds, ours.seconds)
