"""The folder of `lengthwise simulate`: one simulation at a time, and nothing of anybody else's is touched.

A second run into the same folder takes the place of the first: traces of planners that are no longer in it go, because
a reader could not tell them from those of this run. What an earlier run wrote is known from its simulation.json; files
of these names without one are not ours, and the run is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from lengthwise.cli.output import refuse_unwritable, write_atomically
from lengthwise.core.errors import OutputError
from lengthwise.core.files import read_json
from lengthwise.planner.registry import OPTIONAL_PLANNERS, planner_names
from lengthwise.report.simulation import SCHEMA

FIGURES, PAGE = "simulation.json", "report.html"


def trace_name(planner: str) -> str:
    """Name the trace of a planner."""
    return f"trace-{planner}.json"


def refuse_others_files(folder: Path) -> None:
    """Raise OutputError for a folder that cannot be written, or where files of our names are not of a simulation."""
    refuse_unwritable(folder)
    ours = {FIGURES, PAGE, *map(trace_name, _known_planners())}
    there = sorted(name for name in ours if (folder / name).exists())
    if there and _earlier_planners(folder) is None:
        where, expected = str(folder), "an empty folder, or that of an earlier simulation, which is then replaced"
        got = f"{', '.join(there)}, not written by a simulation"
        raise OutputError(where, expected=expected, got=got, remedy="Choose another --out, or take them out of it.")


def write_simulation(folder: Path, figures: str, page: str, traces: Mapping[str, str]) -> None:
    """Write all files of a simulation, `traces` by planner, in place of those of an earlier one.

    Raises:
        OutputError: one cannot be written, or an old one not be removed.
    """
    for planner in _earlier_planners(folder) or ():
        if planner not in traces:
            try:
                (folder / trace_name(planner)).unlink(missing_ok=True)
            except OSError as error:
                where = str(folder / trace_name(planner))
                expected, got = "leave to remove what an earlier simulation wrote", error.strerror or str(error)
                raise OutputError(where, expected=expected, got=got, remedy="Choose another --out.") from None
    for planner, trace in traces.items():
        write_atomically(folder / trace_name(planner), trace)
    write_atomically(folder / PAGE, page)
    write_atomically(folder / FIGURES, figures)  # last: it says which traces belong to it


def _earlier_planners(folder: Path) -> list[str] | None:
    """Name the planners of the simulation in a folder; None: there is none."""
    try:
        figures = read_json(folder / FIGURES)
    except ValueError:
        return None
    is_ours = isinstance(figures, dict) and figures.get("schema") == SCHEMA
    planners = figures.get("planners") if is_ours else None
    return [planner for planner in _known_planners() if planner in planners] if isinstance(planners, dict) else None


def _known_planners() -> tuple[str, ...]:
    """Name all that a simulation may have had, whose packages may be gone since."""
    return tuple(dict.fromkeys((*planner_names(), *OPTIONAL_PLANNERS)))
