"""Rows of tables as JSON lines, one file a part, written as they are found: what a killed part had found stays.

A row is an object with `table`; its other keys are that table's columns, quantities with their unit in the name.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any


class Records:
    """The rows of one part, `FOLDER/PART.jsonl`."""

    def __init__(self, folder: Path, part: str) -> None:
        self.folder, self.part = folder, part
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / f"{part}.jsonl"
        self._path.write_text("", encoding="utf-8")

    def add(self, table: str, **values: Any) -> None:
        """Write a row, and print it."""
        line = json.dumps({"table": table, **values})
        with self._path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
        print(line, flush=True)

    def keep(self, name: str, text: str) -> str:
        """Write a file of its own beside the rows, a plan for example; return its name."""
        (self.folder / name).write_text(text, encoding="utf-8")
        return name


def read_rows(folder: Path) -> list[dict[str, Any]]:
    """Read the rows of all parts; a last line that was cut short is left out, and `part` is added."""
    rows = []
    for path in sorted(folder.glob("*.jsonl")):
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                row = json.loads(line)
            except ValueError:  # the part was killed while it wrote
                continue
            rows.append({"part": path.stem, **row})
    return rows


def middle(seconds: Sequence[float]) -> dict[str, float]:
    """Return median and spread (largest less smallest, over the median) of repeats."""
    median = statistics.median(seconds)
    return {"seconds": median, "spread": (max(seconds) - min(seconds)) / median}
