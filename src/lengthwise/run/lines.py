"""The files of a run that have a line a step: which lines a run that goes on keeps, and which of them are lost."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lengthwise.config.problems import shown
from lengthwise.core.errors import OutputError
from lengthwise.core.files import parse_json, read_plain
from lengthwise.core.names import counted

METRICS = "metrics.jsonl"
LEDGER, OLD_LEDGER = "ledger.jsonl", "ledger.old.jsonl"  # the second: lines before the first's, where it grew long
COUNTED = (METRICS, "eval.jsonl", "not_finite.jsonl")  # a checkpoint says how many lines they have
LINES = (*COUNTED, LEDGER, OLD_LEDGER)
_MOST_SHOWN = 8


@dataclass(frozen=True, slots=True)
class Line:
    """A line, with its end, and the step it is of."""

    step: int
    text: str


def lines_up_to(path: Path, step: int) -> list[Line]:
    """Return the lines up to `step`; one that a fault left without its end goes. OutputError: one is damaged."""
    where, expected, kept = str(path), "a file of lines", list[Line]()
    try:
        *lines, _ = read_plain(path, most_bytes=path.stat().st_size).split(b"\n")
        for number, line in enumerate(lines, 1):
            where, expected = f"{path}:{number}", "an object with a step"
            row = parse_json(text := line.decode("utf-8"))
            if not isinstance(row, dict) or type(row.get("step")) is not int:
                raise ValueError(shown(row))
            if row["step"] > step:
                break
            kept.append(Line(row["step"], f"{text}\n"))
    except (OSError, ValueError) as error:
        remedy = "Correct it, or remove the file and give {accept_changes}."
        raise OutputError(where, expected=expected, got=str(error), remedy=remedy) from None
    return kept


def missing_lines(lines: Mapping[str, Sequence[Line]], counts: Mapping[str, int]) -> Iterator[tuple[str, str]]:
    """Yield each file that is not what was written up to a checkpoint, and what it has instead.

    lines: of the files that are there, by name. counts: of the checkpoint; those of earlier versions have none. The
    ledger has a line where metrics have one; its oldest may have been dropped, as the older half replaces another.
    """
    for name, count in counts.items():
        there = lines.get(name, ())
        if len(there) != count:
            yield name, f"{counted(len(there), 'line')}, where {count} had been written"
    ledger = {line.step for name in (OLD_LEDGER, LEDGER) for line in lines.get(name, ())}
    first = min(ledger, default=math.inf) if OLD_LEDGER in lines else 0
    lost = [line.step for line in lines.get(METRICS, ()) if line.step >= first and line.step not in ledger]
    if lost:
        more = f" and {len(lost) - _MOST_SHOWN} more" if len(lost) > _MOST_SHOWN else ""
        yield LEDGER, f"no line of step {', '.join(map(str, lost[:_MOST_SHOWN]))}{more}"
