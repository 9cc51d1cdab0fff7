"""One table of a GPU, measured and written row by row, as JSON lines: what a step costs there, and against whom.

    python benchmarks/gpu_step.py [TABLE] [--out FOLDER] [--device cuda] [--tiny]

Tables: `TABLES` below, one module each in `benchmarks/gpu/`. All of them, with a time limit each: `gpu_check.py`; the
page that is made from what they wrote: `gpu_page.py`. With --device cpu --tiny everything runs on the CPU in seconds,
which proves the script and no figure. Without a GPU nothing else is measured, and the exit status is 2.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from pathlib import Path

sys.path.insert(1, str(Path(__file__).parents[1] / "src"))  # runs from a tree that is not installed, too

from gpu.parts import python_path
from gpu.place import add_place, clocks
from gpu.records import Records
from gpu.sizes import sizes_of
from lengthwise.cli.machine import prepare_environment
from lengthwise.comm import count_gpus

TABLES = {
    "place": "",
    "ceilings": "gpu.ceilings",
    "replay": "gpu.replay",
    "steps": "gpu.steps",
    "steps_liger": "gpu.steps",
    "staged": "gpu.staged",
    "shares": "gpu.shares",
    "switches": "gpu.switches",
    "costs": "gpu.costs",
    "longest": "gpu.longest",
    "parity": "gpu.parity",
    "profile": "gpu.profiled",
}
"""The module of each table, whose function has the table's name; `place` is written before every one."""


def main() -> None:
    """Write one table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", nargs="?", default="place", metavar="TABLE", choices=tuple(TABLES))
    parser.add_argument("--out", type=Path, default=Path("runs/gpu"), metavar="FOLDER")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="sizes for a test")
    arguments = parser.parse_args()
    prepare_environment()
    os.environ["PYTHONPATH"] = python_path()  # for the commands that tables start
    if arguments.device == "cuda" and not count_gpus():
        print("gpu_step: no GPU that torch can use on this machine; nothing was measured or written", file=sys.stderr)
        raise SystemExit(2)

    import torch

    sizes, records = sizes_of(arguments.device, tiny=arguments.tiny), Records(arguments.out, arguments.table)
    torch.manual_seed(0)
    add_place(records, sizes.where)
    if module := TABLES[arguments.table]:
        getattr(importlib.import_module(module), arguments.table)(sizes, records)
    records.add("end", clocks=clocks())


if __name__ == "__main__":
    main()
