"""The peak memory of a rank: what is said before the first step, and by formulas alone, against what a step holds.

    python benchmarks/memory_model.py [--drawn 24] [--long] [--every 1]

Small models (6 layers, 128 wide, 4K words) of six kinds, both precisions, all kinds of recomputation, offload, both
losses, rings of up to 4 ranks and split heads. Measured: all tensors of the fullest rank at the peak of its second
step, counted one by one: parameters, master weights, gradients, moments, activations, what backward and loss need
beside them, buffers of rings and of the step's end. Bytes that kernels take inside are not seen. First cells that
differ from one another in one or two things, then drawn ones that differ in all.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from testing.peaks import (
    Cell,
    drawn,
    long_ones,
    measured_peak,
    one_at_a_time,
    predicted_at_start,
    predicted_by_formula,
)

from lengthwise.report.figures import count
from pages import Findings, add_out


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A cell, and the bytes that were measured and predicted."""

    cell: Cell
    measured: int
    at_start: float
    by_formula: float

    @property
    def errors(self) -> tuple[float, float]:
        """Prediction over measurement less 1: at the start, by formula."""
        return self.at_start / self.measured - 1, self.by_formula / self.measured - 1


def run(cells: Sequence[Cell]) -> list[Row]:
    """Measure and predict every cell."""
    rows = []
    for number, cell in enumerate(cells):
        row = Row(
            cell=cell,
            measured=measured_peak(cell),
            at_start=predicted_at_start(cell),
            by_formula=predicted_by_formula(cell),
        )
        rows.append(row)
        print(f"{number + 1}/{len(cells)}", "{:+.1%} {:+.1%}".format(*row.errors), cell, file=sys.stderr, flush=True)
    return rows


_COLUMNS = (
    "model, precision, recompute, offload, loss, degree x heads, tokens, measured, at the start, error, formula, error"
)
_GROUPS = {"": "family", " ": "precision", "recompute ": "recompute", "offload ": "offload", "degree ": "degree"}


def table(rows: Sequence[Row]) -> list[str]:
    """Return the table of all cells."""
    lines = [f"| {_COLUMNS.replace(', ', ' | ')} |", "|---" * 12 + "|"]
    for row in rows:
        cell, (start, formula) = row.cell, row.errors
        loss = "whole" if cell.logits_at_once is None else f"{count(cell.logits_at_once)} at once"
        tokens = str(cell.tokens) if cell.documents == 1 else f"{cell.documents} x {cell.tokens // cell.documents}"
        lines.append(
            f"| {cell.family} | {cell.precision} | {cell.recompute} | {cell.offload:g} | {loss} "
            f"| {cell.degree} x {cell.heads} | {tokens} | {count(row.measured)}B "
            f"| {count(row.at_start)}B | {start:+.1%} | {count(row.by_formula)}B | {formula:+.1%} |"
        )
    return lines


def summary(rows: Sequence[Row]) -> list[str]:
    """Return median, lowest and highest error, and the share within 5 %: of all cells and by each thing they vary."""
    groups: dict[str, list[Row]] = {"all": list(rows)}
    for said, of in _GROUPS.items():
        for row in rows:
            groups.setdefault(f"{said}{getattr(row.cell, of)}".strip(), []).append(row)
    error = "median, lowest, highest error"
    lines = [
        f"| cells | number | at the start: {error} | within 5 % | formula: {error} | within 5 % |",
        "|---" * 6 + "|",
    ]
    for name, each in groups.items():
        cells = []
        for errors in zip(*(row.errors for row in each), strict=True):
            cells.append(f"{statistics.median(map(abs, errors)):.1%}, {min(errors):+.1%}, {max(errors):+.1%}")
            cells.append(f"{sum(abs(error) <= 0.05 for error in errors) / len(each):.0%}")
        lines.append(f"| {name} | {len(each)} | {' | '.join(cells)} |")
    return lines


def main() -> None:
    """Print both tables, and write them into a page if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--drawn", type=int, default=24, help="cells that differ in everything")
    parser.add_argument("--long", action="store_true", help="and cells of 16K tokens, minutes each")
    parser.add_argument("--every", type=int, default=1, help="only every n-th cell")
    add_out(parser, "memory_model")
    asked, findings = parser.parse_args(), Findings("memory_model")
    torch.set_num_threads(1)
    cells = [*one_at_a_time(), *drawn(asked.drawn), *(long_ones() if asked.long else [])]
    rows = run(cells[:: asked.every])
    findings.add([*summary(rows), "", *table(rows)])
    findings.sign("Measured", "bytes, counted tensor by tensor, against predictions")
    findings.write(asked.out)


if __name__ == "__main__":
    main()
