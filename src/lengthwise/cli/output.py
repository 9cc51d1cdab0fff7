"""Consoles and files of commands without torch; files are written whole or not at all.

A simulation has simulation.json, which lists its other files, report.html, and traces.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TextIO

from rich.console import Console

from lengthwise.core.errors import OutputError
from lengthwise.core.files import read_json, replace_file

FIGURES, PAGE = "simulation.json", "report.html"


def plain_console() -> Console:
    """Return a console that prints names of files unchanged, and cuts nothing."""
    return Console(highlight=False, soft_wrap=True, markup=False, emoji=False)


def fit_terminal(text: str, stream: TextIO) -> str:
    """Wrap text at words if `stream` is a terminal, except indented code."""
    if not stream.isatty():
        return text
    from lengthwise.report.tables import wrapped

    width = shutil.get_terminal_size().columns
    return "\n".join(line if line.startswith("    ") else wrapped(line, width, "  ") for line in text.split("\n"))


def refuse_unwritable(folder: Path) -> None:
    """Raise OutputError early for a folder that cannot be made or written into; leave nothing there."""
    there = next(each for each in (folder, *folder.absolute().parents) if each.exists())
    got = "" if there.is_dir() else f"{there}, which is not a folder"
    if not got:
        try:
            tempfile.TemporaryFile(dir=there).close()  # root has permission everywhere, but /proc takes no file
        except OSError as error:
            got = f"no permission to write into {there} ({error.strerror or error})"
    if got:
        raise OutputError(str(folder), expected="a folder to write into", got=got, remedy="Choose another --out.")


def refuse_unwritable_file(path: Path) -> None:
    """Raise OutputError early for a file that cannot be written, or is a device or pipe."""
    folders = ("/dev", "/dev/fd", "/proc/self/fd")
    is_special = (path.exists() and not path.is_file()) or str(path.absolute().parent) in folders
    got = "a folder" if path.is_dir() else "a device or a pipe" * is_special
    if got:
        raise OutputError(str(path), expected="a file to write", got=got, remedy="Choose another --out.")
    refuse_unwritable(path.parent)


def write_atomically(path: Path, text: str) -> None:
    """Write a file whole or not at all; OutputError if that fails, or it is not a regular file."""
    path = path.resolve()  # writes a link's target, and keeps the link
    refuse_unwritable_file(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, text)
    except OSError as error:
        got = error.strerror or str(error)
        raise OutputError(str(path), expected="a file to write", got=got, remedy="Choose another --out.") from None


def refuse_others_files(folder: Path) -> None:
    """Raise OutputError if the folder cannot be written, or has files that are not of a simulation."""
    refuse_unwritable(folder)
    from lengthwise.planner import planner_names

    ours = {FIGURES, PAGE, *map(_trace_name, planner_names())}
    there = sorted(name for name in ours if (folder / name).exists())
    if there and _earlier_planners(folder) is None:
        where, expected = str(folder), "an empty folder, or one of an earlier simulation, which is then replaced"
        got = f"{', '.join(there)}, not written by a simulation"
        raise OutputError(where, expected=expected, got=got, remedy="Choose another --out, or move these files.")


def write_simulation(folder: Path, figures: str, page: str, traces: Mapping[str, str]) -> None:
    """Replace all files of an earlier simulation. traces: traces by planner."""
    for planner in _earlier_planners(folder) or ():
        if planner not in traces:
            try:
                (folder / _trace_name(planner)).unlink(missing_ok=True)
            except OSError as error:
                where = str(folder / _trace_name(planner))
                expected, got = "permission to remove files of an earlier simulation", error.strerror or str(error)
                raise OutputError(where, expected=expected, got=got, remedy="Choose another --out.") from None
    for planner, trace in traces.items():
        write_atomically(folder / _trace_name(planner), trace)
    write_atomically(folder / PAGE, page)
    write_atomically(folder / FIGURES, figures)  # last, because it lists the others


def _earlier_planners(folder: Path) -> list[str] | None:
    from lengthwise.planner import planner_names
    from lengthwise.report.simulation import SCHEMA

    try:
        figures = read_json(folder / FIGURES)
    except ValueError:
        return None
    is_ours = isinstance(figures, dict) and figures.get("schema") == SCHEMA
    planners = figures.get("planners") if is_ours else None
    return [planner for planner in planner_names() if planner in planners] if isinstance(planners, dict) else None


def _trace_name(planner: str) -> str:
    return f"trace-{planner}.json"
