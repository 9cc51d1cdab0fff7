"""The files of a run that have a line per step: which lines a resumed run keeps, and which are missing."""

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
LEDGER, OLD_LEDGER = "ledger.jsonl", "ledger.old.jsonl"  # the old ledger has the older lines of a long one
COUNTED = (METRICS, "eval.jsonl", "not_finite.jsonl")  # files whose numbers of lines a checkpoint has
LINES = (*COUNTED, LEDGER, OLD_LEDGER)
_MOST_SHOWN = 8


@dataclass(frozen=True, slots=True)
class StepLine:
    """A line, newline included, and its step."""

    step: int
    text: str


def lines_up_to(path: Path, step: int) -> list[StepLine]:
    """Return the lines up to `step`, without a last line that a fault cut off; OutputError for a damaged line."""
    where, expected, kept = str(path), "a file of lines", list[StepLine]()
    try:
        *lines, _ = read_plain(path, most_bytes=path.stat().st_size).split(b"\n")
        for number, line in enumerate(lines, 1):
            where, expected = f"{path}:{number}", "an object with a step"
            row = parse_json(text := line.decode("utf-8"))
            if not isinstance(row, dict) or type(row.get("step")) is not int:
                raise ValueError(shown(row))
            if row["step"] > step:
                break
            kept.append(StepLine(row["step"], f"{text}\n"))
    except (OSError, ValueError) as error:
        remedy = "Correct it, or remove the file and give {accept_changes}."
        raise OutputError(where, expected=expected, got=str(error), remedy=remedy) from None
    return kept


def missing_lines(lines: Mapping[str, Sequence[StepLine]], counts: Mapping[str, int]) -> Iterator[tuple[str, str]]:
    """Yield (file that lacks lines up to a checkpoint, what it has instead).

    lines: lines of the existing files, by name. counts: the checkpoint's numbers of lines; checkpoints of earlier
    versions have none. The ledger has a line for every line of the metrics, but its oldest may have been dropped.
    """
    for name, count in counts.items():
        there = lines.get(name, ())
        if len(there) != count:
            yield name, f"{counted(len(there), 'line')} of {count}"
    ledger = {line.step for name in (OLD_LEDGER, LEDGER) for line in lines.get(name, ())}
    first = min(ledger, default=math.inf) if OLD_LEDGER in lines else 0
    lost = [line.step for line in lines.get(METRICS, ()) if line.step >= first and line.step not in ledger]
    if lost:
        more = f" and {len(lost) - _MOST_SHOWN} more" if len(lost) > _MOST_SHOWN else ""
        yield LEDGER, f"no line of step {', '.join(map(str, lost[:_MOST_SHOWN]))}{more}"
