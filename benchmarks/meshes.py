"""Every planner with the best mesh that a competent user could find for it: all is simulated, nothing measured.

    python benchmarks/meshes.py [--settings 64:256K:4M,...] [--recipes github,prolong] [--planners static,...]
        [--batches 4] [--rows FILE] [--out PAGE]

A setting is GPUs : longest sequence : tokens of a step, of a 7B Llama on H100s; lengths are as of GitHub files and of
ProLong's mix for fine-tuning. `lengthwise.simulator.best_mesh` searches for all planners alike: tensor-parallel
devices and pipeline stages of a rank, recomputation, heads, offload, and how much of what memory leaves a rank may
hold. The first table has the meshes that the engine runs (asked of `lengthwise.program`), the second all. --rows keeps
what is done, a line for each planner, so that a run can be taken up again; --tables-only simulates nothing. A setting
takes two to five minutes of one core.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from lengthwise.core.sizes import parse_tokens
from lengthwise.cost import named_hardware, named_shape
from lengthwise.data.recipes import draw_lengths
from lengthwise.report.simulation import MOST_MFU
from lengthwise.report.simulation import OUR_PLANNER as OURS
from lengthwise.simulator import (
    Found,
    Gain,
    Scenario,
    best_mesh,
    gain_over,
    stages_to_try,
    tensors_to_try,
)
from pages import Findings, markdown, parse_options, verdict
from rival_planners import register_rivals

MODEL, HARDWARE = "llama-7b", "h100"
SETTINGS = "8:64K:1M,16:64K:2M,32:128K:2M,64:256K:4M,128:512K:4M,256:1M:8M"
RIVALS = ("packed-dp", "static", "single-degree", "power-of-two", "bytescale", OURS)
OTHERS = ("packed-dp", "static")  # that the aim is over
_LAST = ("bytescale-naive", "bytescale", OURS)
_ORDER = ("packed-dp", "static", "single-degree", "power-of-two", "megatron-core", "flexsp", *_LAST)
HEADS = ("set", "GPUs", "longest", "step")


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
        sides = [side for side in (self.today, self.any_mesh) if side is not None]
        return min(sides, key=lambda side: side.mean_seconds, default=None)

    @property
    def best_today(self) -> Taken | None:
        """Return that of the two which ends first of those that the engine runs: the wider search may meet one, too."""
        sides = [side for side in (self.today, self.any_mesh) if side is not None and side.trains]
        return min(sides, key=lambda side: side.mean_seconds, default=None)

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


def search(place: tuple[str, ...], planner: str, batches: Sequence[Sequence[int]], scenario: Scenario) -> MeshRow:
    """Search the best mesh of a planner; one that holds the sequences nowhere has a row that says so."""
    best = best_mesh(planner, batches, scenario)
    sides = (_taken(best.today), _taken(best.any_mesh))
    refused = "" if best.refusal is None else str(best.refusal)
    return MeshRow(place=place, planner=planner, today=sides[0], any_mesh=sides[1], tried=best.tried, refused=refused)


def _taken(found: Found | None) -> Taken | None:
    if found is None:
        return None
    steps = found.steps
    return Taken(
        mesh=mesh_words(found),
        seconds=found.step_seconds,
        ideal_seconds=[step.ideal_seconds for step in steps],
        bound_seconds=[step.bound_seconds for step in steps],
        flops_ratio=found.flops_ratio,
        trains=found.trains,
    )


def mesh_words(found: Found) -> str:
    """Say what a planner took: devices of a rank, tokens that it holds, and what its plans use of what they may."""
    mesh, steps = found.mesh, found.steps
    held = [f"{tokens:,}" for tokens in found.held_tokens.values()]
    staged = [f"PP {mesh.cut.stages}"] if mesh.cut.stages > 1 else []
    words = [f"TP {mesh.tensor}", *staged, f"{' or '.join(held)} tokens"]
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


Sides = Mapping[str, Taken | None]
Places = Mapping[tuple[str, ...], Sides]


@dataclass(frozen=True, slots=True, kw_only=True)
class Aim:
    """What is wished for: the mean gain in some places over the best of `others` (default: of all)."""

    name: str
    places: Sequence[tuple[str, ...]]
    least_gain: float
    others: Sequence[str] | None = None


def best_tables(rows: Sequence[MeshRow], heads: Sequence[str], aims: Sequence[Aim]) -> list[str]:
    """Write seconds and gains of what the engine runs, then of all meshes, aims, and the mesh that each planner took.

    `heads`: of the words of a place.
    """
    places = dict.fromkeys(row.place for row in rows)
    planners = sorted({row.planner for row in rows} - {OURS}, key=_ORDER.index)
    today = {place: _sides(rows, place, "best_today") for place in places}
    any_mesh = {place: _sides(rows, place, "best") for place in places}
    titles = [*heads, *planners, OURS]
    parts: list[tuple[str, str, Iterable[Sequence[str]]]] = [
        (
            "What the engine runs today: seconds of a step, each planner with its best mesh of these",
            " | ".join([*titles, "gain over the best other of these", "over the best other of all", "ideal over step"]),
            _today_lines(today, any_mesh, planners),
        ),
        (
            "Best of all meshes, whether or not the engine runs them: seconds of a step",
            " | ".join([*titles, "gain over the best other", "most that any plan could gain", "ideal over step"]),
            _any_lines(any_mesh, planners),
        ),
        (
            "Aims: plans of ours that the engine runs, over others of all meshes",
            "mean of | places | gain | aim | most that any plan could gain | ideal over step",
            [_aim_line(aim, today, any_mesh) for aim in aims],
        ),
        (
            "The mesh that each took",
            " | ".join([*heads, "planner | runs today | s | ideal over step | MFU | mesh"]),
            _mesh_lines(sorted(rows, key=lambda row: (list(places).index(row.place), _ORDER.index(row.planner)))),
        ),
    ]
    return [line for title, columns, lines in parts for line in (f"### {title}", "", *markdown(columns, lines), "")]


def _sides(best: Sequence[MeshRow], place: tuple[str, ...], name: str) -> Sides:
    return {row.planner: getattr(row, name) for row in best if row.place == place}


def _today_lines(today: Places, any_mesh: Places, planners: Sequence[str]) -> Iterator[list[str]]:
    for place, sides in today.items():
        ours = sides.get(OURS)
        gains = [_gain_cell(best_other(of), ours) for of in (sides, any_mesh[place])]
        yield [*place, *_seconds_cells(sides, planners), *gains, f"{ours.ideal_ratio:.3f}" if ours else "-"]


def _any_lines(any_mesh: Places, planners: Sequence[str]) -> Iterator[list[str]]:
    for place, sides in any_mesh.items():
        ours, other = sides.get(OURS), best_other(sides)
        possible = "-" if other is None else f"{1 / other[1].ideal_ratio:.2f}x"
        ideal = f"{ours.ideal_ratio:.3f}" if ours else "-"
        yield [*place, *_seconds_cells(sides, planners), _gain_cell(other, ours), possible, ideal]


def _seconds_cells(sides: Sides, planners: Sequence[str]) -> list[str]:
    taken = [sides.get(planner) for planner in (*planners, OURS)]
    return [f"{each.mean_seconds:.2f}" if each else "-" for each in taken]


def _gain_cell(other: tuple[str, Taken] | None, ours: Taken | None) -> str:
    if other is None or ours is None:
        return "-"
    by_batch = [theirs / own for theirs, own in zip(other[1].seconds, ours.seconds, strict=True)]
    batches = f" ({min(by_batch):.2f} to {max(by_batch):.2f} by batch)" if len(by_batch) > 1 else ""
    return f"{gain_of(other[1], ours)} over {other[0]}{batches}"


def _aim_line(aim: Aim, today: Places, any_mesh: Places) -> list[str]:
    """Write the mean gain; a doubt is said of an aim that is met alone."""
    pairs = [
        (ours, other[1])
        for place in aim.places
        if (ours := today.get(place, {}).get(OURS)) and (other := best_other(any_mesh[place], among=aim.others))
    ]
    counted = f"{len(pairs)} of {len(aim.places)}"
    if not pairs:
        return [aim.name, counted, "-", "-", "-", "-"]
    gains = [gain_of(other, ours) for ours, other in pairs]
    gain = float(np.mean([each.ratio for each in gains]))
    is_met = gain >= aim.least_gain
    doubt = f" in {counted}" if len(pairs) < len(aim.places) else ""
    doubt += ", within the error" if np.mean([each.low for each in gains]) < 1 else ""
    told = f"{aim.least_gain:.2f}: {verdict(is_met)}{doubt if is_met else ''}"
    possible = np.mean([1 / other.ideal_ratio for _, other in pairs])
    ideal = np.mean([ours.ideal_ratio for ours, _ in pairs])
    return [aim.name, counted, f"{gain:.2f}x", told, f"{possible:.2f}x", f"{ideal:.3f}"]


def _mesh_lines(best: Sequence[MeshRow]) -> Iterator[list[str]]:
    for row in best:
        if row.best is None:
            yield [*row.place, row.planner, "-", "-", "-", "-", "refused: no mesh holds the sequences"]
            continue
        taken = [row.best_today, *([row.best] if row.best is not row.best_today else [])]
        for each in taken:
            if each is None:
                continue
            flag = " (!)" if each.flops_ratio > MOST_MFU else ""
            cells = [f"{each.mean_seconds:.2f}", f"{each.ideal_ratio:.3f}", f"{each.flops_ratio:.2f}{flag}"]
            yield [*row.place, row.planner, "yes" if each.trains else "no", *cells, each.mesh]


def main() -> None:
    """Search what is asked for, print the tables, and write them into a page if asked."""
    arguments = parse_options(
        __doc__, settings=SETTINGS, recipes="github,prolong", planners=",".join(RIVALS), batches=4,
        rows=Path("runs/meshes.jsonl"), tables_only=(False, "of the rows that there are"),
    )  # fmt: skip
    findings = Findings("meshes")
    register_rivals(arguments.planners.split(","))
    rows = [MeshRow.from_json(line) for line in read_lines(arguments.rows)]
    known = {(row.place, row.planner) for row in rows}
    asked = (arguments.settings, arguments.recipes, arguments.planners)
    for setting, recipe, planner in product(*(each.split(",") for each in asked)):
        place = (recipe, *setting.split(":"))
        if arguments.tables_only or (place, planner) in known:
            continue
        rows.append(_search(place, planner, arguments.batches))
        add_line(arguments.rows, rows[-1])
        print(*place, planner, rows[-1].best and f"{rows[-1].best.mean_seconds:.3f} s", flush=True)
    places = [
        (recipe, *setting.split(":"))
        for recipe, setting in product(arguments.recipes.split(","), arguments.settings.split(","))
    ]
    whole = whole_places(rows, RIVALS)
    shown = [row for place in places for row in whole if row.place == place]
    findings.add(best_tables(shown, HEADS, _aims(places)))
    batches = " or ".join(map(str, sorted({len(row.best.seconds) for row in shown if row.best})))
    findings.sign("Simulated", f"means of {batches} batches; tables of all rows in {arguments.rows}", arguments.out)


def _aims(places: Sequence[tuple[str, ...]]) -> list[Aim]:
    recipes = dict.fromkeys(place[0] for place in places)
    few = {recipe: [place for place in places if place[0] == recipe and int(place[1]) <= 64] for recipe in recipes}
    return [
        Aim(name=f"{recipe}, 8 to 64 GPUs, over packed-dp and static", places=each, least_gain=1.2, others=OTHERS)
        for recipe, each in few.items()
    ]


def _search(place: Sequence[str], planner: str, batches: int) -> MeshRow:
    recipe, gpus, context, step = place
    longest = parse_tokens(context, "--settings")
    shape, hardware, devices = named_shape(MODEL), named_hardware(HARDWARE), int(gpus)
    scenario = Scenario(
        shape=shape, hardware=hardware, devices=devices, context_tokens=longest,
        tensors=tensors_to_try(shape, hardware, devices), stages=stages_to_try(shape, devices),
    )  # fmt: skip
    tokens = parse_tokens(step, "--settings")
    drawn = [draw_lengths(recipe, tokens, seed, longest_tokens=longest) for seed in range(batches)]
    return search(tuple(place), planner, drawn, scenario)


if __name__ == "__main__":
    main()
