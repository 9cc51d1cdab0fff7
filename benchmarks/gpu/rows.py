"""Rows of tables as JSON lines, one file a part, written as they are found: what a killed part had found stays.

A row is an object with `table`; its other keys are that table's columns, quantities with their unit in the name. The
page has one section a table, in the order of `TITLES`; tables without rows are left out.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import platform
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from lengthwise.core import __version__
from lengthwise.profiler.place import processor_name
from lengthwise.report.figures import count
from pages import commit_name, markdown

TITLES = {
    "part": "Parts",
    "copy": "Copies on the device",
    "matrix product": "Matrix products",
    "attention": "Attention, causal, forward and backward",
    "block": "One attention block, by kernel and length",
    "pack": "A long document and 500 short ones, in one call of the varlen kernel and in two",
    "many": "Layouts of parameters, stages, offload and trainers on several ranks",
    "replay": "Whole plans of many ranks, replayed on this device",
    "replay of waves": "Sharded parameters, ours and FSDP2's, replayed on this device wave by wave",
    "step": "Whole steps of one rank, beside plain Hugging Face",
    "kernel": "Kernels of one step",
    "hardware": "The device as `--hardware` describes it (`MODEL-HEADS-hardware.json` of the folder)",
    "term": "Terms of the costs, fitted by `lengthwise profile`",
    "ring parity": "Rings in bf16 beside one call, both against fp32",
    "logits": "Over 2^31 logits",
}
_LATEST = {"step": ("model", "batch", "loop")}
"""Tables of which a later row replaces one that is alike in these columns."""
_NOTES = {
    "block": "Forward and backward; *first seconds*: of a shape's first call, in which cuDNN plans.",
    "many": "Small models: whether it works, not how fast. *Loss difference*: the largest of five steps, from those of "
    "the first configuration.",
    "replay": "Arithmetic measured, transfers modelled; *simulation error* is of the simulator's makespan against this "
    "one (aim: 5 %).",
    "replay of waves": "As above; all hold as many tokens a rank. The slowest of three repeats of each rank counts.",
    "step": "MFU by the bf16 rate of the data sheet, recomputation not counted (`benchmarks/gpu/setting.py`); *times "
    "lengthwise* above 1: slower than ours; *loss difference*: of the first step, from ours.",
}
_PACKAGES = (
    "torch",
    "transformers",
    "numpy",
    "triton",
    "liger-kernel",
    "fla-core",
    "mamba-ssm",
    "causal-conv1d",
    "flash-attn",
)
_CLOCKS = ("clocks.sm", "clocks.max.sm", "clocks.mem", "power.draw", "power.limit", "temperature.gpu", "driver_version")
_HIDDEN = ("table", "part")
_NOT_TABLES = ("place", "end", "note", "step, each turn")


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


def finish(device: torch.device) -> None:
    """Wait until the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds_of(run: Callable[[], object], device: torch.device, *, repeats: int, warm_up: int = 1) -> list[float]:
    """Time each of `repeats` runs, after some that do not count."""
    took = []
    for repeat in range(warm_up + repeats):
        finish(device)
        start = time.perf_counter()
        run()
        finish(device)
        if repeat >= warm_up:
            took.append(time.perf_counter() - start)
    return took


def clocks() -> dict[str, str]:
    """Return clocks, power and temperature of the first GPU as nvidia-smi gives them; nothing where there is none."""
    if shutil.which("nvidia-smi") is None:
        return {}
    asked = ["nvidia-smi", f"--query-gpu={','.join(_CLOCKS)}", "--format=csv,noheader", "--id=0"]
    try:
        done = subprocess.run(asked, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return {}
    found = [each.strip() for each in done.stdout.strip().split(",")]
    return dict(zip(_CLOCKS, found, strict=True)) if done.returncode == 0 and len(found) == len(_CLOCKS) else {}


def device_name(device: torch.device) -> str:
    """Return the GPU's name; on the CPU the processor's."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else processor_name()


def add_place(records: Records, device: torch.device) -> None:
    """Write where and with what a part runs."""
    versions = dict[str, str]()
    for name in _PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)  # of the first on the path, which is what is imported
    records.add(
        "place", device=device_name(device), processor=processor_name(),
        date=datetime.datetime.now(tz=datetime.UTC).isoformat(timespec="seconds"), commit=commit_name(),
        python=platform.python_version(), cuda=torch.version.cuda, cudnn=torch.backends.cudnn.version(),
        device_bytes=torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None,
        versions={"lengthwise": __version__, **versions}, clocks=clocks(),
    )  # fmt: skip


def page_of(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the text of the page."""
    lines, names = _places(rows), {str(row["table"]) for row in rows} - set(_NOT_TABLES)
    for name in (*TITLES, *sorted(names - set(TITLES))):
        of_table = _latest(name, [row for row in rows if row["table"] == name])
        if of_table:
            note = [_NOTES[name], ""] if name in _NOTES else []
            columns = list(dict.fromkeys(key for row in of_table for key in row if key not in _HIDDEN))
            cells = ([_cell(key, row.get(key)) for key in columns] for row in of_table)
            table = markdown(" | ".join(column.replace("_", " ") for column in columns), cells)
            lines += [f"### {TITLES.get(name, name.capitalize())}", "", *note, *table, ""]
    return "\n".join(lines)


def _latest(table: str, rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Leave out rows that later ones replace."""
    if table not in _LATEST:
        return list(rows)
    return list({tuple(row[column] for column in _LATEST[table]): row for row in rows}.values())


def _cell(key: str, value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value).replace("|", "/").replace("\n", " ")
    if key.endswith("flops_per_second"):
        return f"{value / 1e12:.3g} TFLOP/s"
    if key.endswith(("_bytes", "_per_second")):
        return count(float(value)) + "B" * ("bytes" in key) + "/s" * key.endswith("_per_second")
    if key.endswith(("share", "spread", "error", "mfu", "difference")):
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
