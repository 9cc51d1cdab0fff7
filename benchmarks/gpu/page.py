"""Rows of tables to the page: one section a table, in this order; tables without rows are left out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lengthwise.report.figures import count

TITLES = {
    "copy": "Copies on the device",
    "matrix product": "Matrix products",
    "attention": "Attention, causal, forward and backward",
    "replay": "Whole plans of many ranks, replayed on this device",
    "step": "Whole steps of one rank, beside plain Hugging Face",
    "hardware": "The device as `--hardware` describes it (`hardware.json` of the folder)",
    "term": "Terms of the costs, fitted by `lengthwise profile`",
    "ring parity": "Rings in bf16 beside one call, both against fp32",
    "logits": "Over 2^31 logits",
}
_NOTES = {
    "replay": "Arithmetic measured, transfers modelled; *simulation error* is of the simulator's makespan against this "
    "one (aim: 5 %).",
    "step": "MFU by the bf16 rate of the data sheet, recomputation not counted (`benchmarks/gpu/models.py`); *times "
    "lengthwise* above 1: slower than ours.",
}
_HIDDEN = ("table", "part")
_NOT_TABLES = ("place", "end", "part", "note", "step, each turn")


def page_of(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the text of the page."""
    lines = [*_places(rows), *_parts(rows)]
    names = {str(row["table"]) for row in rows} - set(_NOT_TABLES)
    for name in (*TITLES, *sorted(names - set(TITLES))):
        of_table = [row for row in rows if row["table"] == name]
        if of_table:
            note = [_NOTES[name], ""] if name in _NOTES else []
            lines += [f"### {TITLES.get(name, name.capitalize())}", "", *note, *markdown_table(of_table), ""]
    return "\n".join(lines)


def markdown_table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a Markdown table with a column for every key that a row has."""
    columns = list(dict.fromkeys(key for row in rows for key in row if key not in _HIDDEN))
    lines = [f"| {' | '.join(column.replace('_', ' ') for column in columns)} |", "|---" * len(columns) + "|"]
    return lines + [f"| {' | '.join(_cell(key, row.get(key)) for key in columns)} |" for row in rows]


def _cell(key: str, value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value).replace("|", "/").replace("\n", " ")
    if key.endswith("flops_per_second"):
        return f"{value / 1e12:.3g} TFLOP/s"
    if key.endswith(("_bytes", "_per_second")):
        return count(float(value)) + "B" * ("bytes" in key) + "/s" * key.endswith("_per_second")
    if key.endswith(("share", "spread", "error", "mfu")):
        return f"{100 * value:.1f} %" if abs(value) >= 1e-3 or not value else f"{value:.1e}"
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def _places(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    places = [row for row in rows if row["table"] == "place"]
    if not places:
        return ["Nothing was measured.", ""]
    first = places[0]
    dates = sorted({str(row["date"])[:10] for row in places})
    versions = ", ".join(f"{name} {version}" for name, version in first["versions"].items())
    clocks = ", ".join(f"{name} {value}" for name, value in first["clocks"].items())
    lines = [
        f"## Measured on {', '.join(dates)}, {', '.join(sorted({str(row['device']) for row in places}))}",
        f"commit {', '.join(sorted({str(row['commit']) for row in places}))}; {first['processor']}; "
        f"Python {first['python']}, CUDA {first['cuda']}, cuDNN {first['cudnn']}; {versions}.",
    ]
    lines += [f"Clocks and power at the start: {clocks}."] if clocks else []
    lines += ["Medians; *spread* is largest less smallest repeat, over the median. All tokens are random.", ""]
    return lines


def _parts(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    parts = [row for row in rows if row["table"] == "part"]
    if not parts:
        return []
    return ["### Parts", "", *markdown_table(parts), ""]
