"""Tables of every planner with its best mesh, from lines of `mesh_rows`: what the engine runs, then all meshes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from lengthwise.report.simulation import MOST_MFU, OURS
from lengthwise.simulator import gain_text
from mesh_rows import MeshRow, Taken, best_other, gain_of

_ORDER = ("packed-dp", "static", "single-degree", "power-of-two", "megatron-core", "bytescale-naive", "bytescale", OURS)
Sides = Mapping[str, Taken | None]
Places = Mapping[tuple[str, ...], Sides]


@dataclass(frozen=True, slots=True, kw_only=True)
class Aim:
    """What is wished for, mean of some places: gain over the best of `others` (default: of all), ideal over step."""

    name: str
    places: Sequence[tuple[str, ...]]
    least_gain: float
    least_ideal_ratio: float = 0.9
    others: Sequence[str] | None = None


def table(title: str, heads: Sequence[str], lines: Iterable[Sequence[str]]) -> list[str]:
    """Write a table under a title; none without lines."""
    body = [f"| {' | '.join(cells)} |" for cells in lines]
    if not body:
        return []
    return [f"### {title}", "", f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}", *body, ""]


def best_tables(rows: Sequence[MeshRow], heads: Sequence[str], aims: Sequence[Aim]) -> list[str]:
    """Write seconds and gains of what the engine runs, then of all meshes, aims, and the mesh that each planner took.

    `heads`: of the words of a place.
    """
    places = dict.fromkeys(row.place for row in rows)
    planners = sorted({row.planner for row in rows} - {OURS}, key=_ORDER.index)
    today = {place: _sides(rows, place, "best_today") for place in places}
    any_mesh = {place: _sides(rows, place, "best") for place in places}
    titles = [*heads, *planners, OURS]
    return [
        *table(
            "What the engine runs today: seconds of a step, each planner with its best mesh of these",
            [*titles, "gain over the best other of these", "over the best other of all", "ideal over step"],
            _today_lines(today, any_mesh, planners),
        ),
        *table(
            "Best of all meshes, whether or not the engine runs them: seconds of a step",
            [*titles, "gain over the best other", "most that any plan could gain", "ideal over step"],
            _any_lines(any_mesh, planners),
        ),
        *table(
            "Aims",
            [
                "mean of",
                "places",
                "our plans",
                "gain",
                "aim",
                "most that any plan could gain",
                "ideal over step",
                "aim",
            ],
            (line for aim in aims for line in _aim_lines(aim, today, any_mesh)),
        ),
        *table(
            "The mesh that each took",
            [*heads, "planner", "runs today", "s", "ideal over step", "MFU", "mesh"],
            _mesh_lines(sorted(rows, key=lambda row: (list(places).index(row.place), _ORDER.index(row.planner)))),
        ),
    ]


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
    return f"{gain_text(gain_of(other[1], ours))} over {other[0]}{batches}"


def _aim_lines(aim: Aim, today: Places, any_mesh: Places) -> Iterator[list[str]]:
    """Write mean gains; only plans of ours that the engine runs, over others of all meshes, can meet an aim."""
    for name, ours_of, others_of in (
        ("run today, over others that would run today", today, today),
        ("run today, over all others", today, any_mesh),
        ("of all meshes, over all others", any_mesh, any_mesh),
    ):
        pairs = [
            (ours, other[1])
            for place in aim.places
            if (ours := ours_of.get(place, {}).get(OURS)) and (other := best_other(others_of[place], among=aim.others))
        ]
        if not pairs:
            continue
        gains = [gain_of(other, ours) for ours, other in pairs]
        gain = float(np.mean([each.ratio for each in gains]))
        possible = np.mean([1 / other.ideal_ratio for _, other in pairs])
        ideal = float(np.mean([ours.ideal_ratio for ours, _ in pairs]))
        gain_said = ideal_said = "-"
        if ours_of is today and others_of is any_mesh:
            few = f" in {len(pairs)} of {len(aim.places)}" if len(pairs) < len(aim.places) else ""
            doubt = ", within the error" if np.mean([each.low for each in gains]) < 1 else ""
            gain_said = _verdict(gain, aim.least_gain, few + doubt)
            ideal_said = _verdict(ideal, aim.least_ideal_ratio, few)
        counted = f"{len(pairs)} of {len(aim.places)}"
        yield [aim.name, counted, name, f"{gain:.2f}x", gain_said, f"{possible:.2f}x", f"{ideal:.3f}", ideal_said]


def _verdict(value: float, least: float, doubt: str = "") -> str:
    """Say whether an aim is met; a doubt is said of what is met alone."""
    return f"{least:.2f}: met{doubt}" if value >= least else f"{least:.2f}: **missed**"


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
