"""The checks of a machine with GPUs, offline: parts with a time limit each, and the page of what they found.

    python benchmarks/gpu_check.py [PART ...] [--out FOLDER] [--page PAGE] [--device cuda] [--tiny] [--here]

If torch starts no GPU, the reason comes first, and nothing runs (status 2). A part is a table or a file of tests/gpu
(`gpu.limits` has all, in their order); without PART all run. Each is a process of its own (with --here tables run in
this one), nothing stops at a failure, and rows are written as they are found; the exit status is 1 if a part failed or
ran into its limit. It needs a Python with torch and transformers and the pure packages that docs/gpu.md lists. --page
replaces what stands below the page's mark, by all that is in the folder. With --device cpu --tiny everything runs on
the CPU, which proves the script and no figure.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(1, str(Path(__file__).parents[1] / "src"))
sys.path.insert(2, str(Path(__file__).parents[1]))  # runs from a tree that is not installed, too

import torch

from gpu.limits import PARTS, TABLES
from gpu.processes import last_lines, run_limited
from gpu.setting import sizes_of
from lengthwise.comm import find_gpus

ROOT = Path(__file__).parents[1]
TINY_TESTS = {"test_gpu_kernels": "kernel_for", "test_gpu_nccl": "moves_and_sums and 2]", "test_gpu_runs": "too_small"}
MARK = "<!-- what follows is written by benchmarks/gpu_check.py -->\n"


def python_path() -> str:
    """Return PYTHONPATH with this tree before what is there: nothing of it need be installed."""
    tree = [str(ROOT / each) for each in ("src", "benchmarks", "tests", "")]
    return os.pathsep.join([*tree, *filter(None, [os.environ.get("PYTHONPATH")])])


def command_of(name: str, arguments: argparse.Namespace) -> list[str]:
    """Return the command line of a part."""
    if name in TABLES:
        asked = ["--out", str(arguments.out), "--device", arguments.device, *(["--tiny"] if arguments.tiny else [])]
        return [sys.executable, __file__, name, "--here", *asked]
    chosen = f"{arguments.device} and ({TINY_TESTS.get(name, 'gpu')})" if arguments.tiny else arguments.device
    options = ["-q", "-W", "default", "-p", "no:cacheprovider", f"--rootdir={ROOT}", "-m", ""]
    return [sys.executable, "-m", "pytest", *options, str(ROOT / "tests" / "gpu" / f"{name}.py"), "-k", chosen]


def run_part(name: str, command: Sequence[str], limit_seconds: float, folder: Path) -> bool:
    """Run a part, its output into `FOLDER/NAME.log`; write how it ended, and return whether well."""
    folder.mkdir(parents=True, exist_ok=True)
    log, start = folder / f"{name}.log", time.perf_counter()
    ended = run_limited(command, log, limit_seconds)
    row = {"table": "part", "name": name, "ended": ended, "seconds": time.perf_counter() - start}
    row |= {"decides": PARTS[name].decides}
    (folder / f"{name}-part.jsonl").write_text(json.dumps(row) + "\n", encoding="utf-8")
    print(f"{name}: {ended} after {row['seconds']:.1f} s", flush=True)
    if ended != "ok":
        print(*last_lines(log, 15), sep="\n", flush=True)
    return ended == "ok"


def write_table(name: str, arguments: argparse.Namespace) -> None:
    """Write one table, in this process."""
    from gpu import many, replay, steps, tables, trace
    from gpu.rows import Records, add_place, clocks

    sizes, records = sizes_of(arguments.device, tiny=arguments.tiny), Records(arguments.out, name)
    torch.manual_seed(0)
    add_place(records, sizes.where)
    if name.startswith("steps"):
        steps.steps(sizes, records, name)
    elif name != "place":
        owner = {"many": many, "replay": replay, "replay_waves": replay, "trace": trace}.get(name, tables)
        getattr(owner, name)(sizes, records)
    records.add("end", clocks=clocks())


def refuse_without_gpus() -> None:
    """Say why torch starts no GPU, where it does not.

    Raises:
        SystemExit: with status 2.
    """
    found = find_gpus()
    if not found.number:
        built = f"torch {torch.__version__}, for CUDA {torch.version.cuda or '(none)'}"
        remedy = "Install a driver for it, or a torch for the driver that is there (pytorch.org/get-started)."
        reason = f"gpu_check: torch starts no GPU: {found.why_none}. This is {built}. {remedy}"
        print(f"{reason} Nothing was measured or written.", file=sys.stderr)
        raise SystemExit(2)


def expected_lines(parts: Sequence[str], arguments: argparse.Namespace) -> list[str]:
    """Say how long parts should take, by arithmetic, what they may take, and what they decide."""
    sizes = sizes_of(arguments.device, tiny=arguments.tiny)
    seconds = {name: PARTS[name].estimate(sizes) for name in parts}
    lines = [
        f"{name}: about {seconds[name]:.0f} s, at most {PARTS[name].limit_seconds:g} s; {PARTS[name].decides}"
        for name in parts
    ]
    limits = sum(PARTS[name].limit_seconds for name in parts)
    return [*lines, f"all: about {sum(seconds.values()) / 60:.0f} min, at most {limits / 60:.0f} min, by arithmetic"]


def write_page(folder: Path, page: Path) -> None:
    """Replace what stands below the mark of a page.

    Raises:
        SystemExit: the page has no mark, or there are no rows.
    """
    from gpu.rows import page_of, read_rows

    before, mark, _ = page.read_text(encoding="utf-8").partition(MARK)
    rows = read_rows(folder)
    if not mark or not rows:
        raise SystemExit(f"{page}: expected the line {MARK.strip()}, and rows in {folder}; nothing was written")
    page.write_text(f"{before}{mark}\n{page_of(rows)}", encoding="utf-8")


def main() -> None:
    """Run parts, then write the page if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--out", type=Path, default=Path("runs/gpu"), metavar="FOLDER")
    parser.add_argument("--page", type=Path, metavar="PAGE", help="docs/gpu.md, or another page with its mark")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="sizes for a test")
    parser.add_argument("--here", action="store_true", help="tables in this process, without a time limit")
    arguments = parser.parse_args()
    if unknown := set(arguments.parts) - set(PARTS):
        parser.error(f"expected parts of {', '.join(PARTS)}; got {', '.join(sorted(unknown))}")
    on_gpus = arguments.device == "cuda"
    os.environ.update(
        PYTHONPATH=python_path(),
        **({"LENGTHWISE_TRANSPORT_WRAPPER": "testing.staged:staged"} if on_gpus else {}),  # for ranks that share a GPU
        HF_HUB_OFFLINE="1",
        TRANSFORMERS_OFFLINE="1",
        LENGTHWISE_TEST_GPU="1" if on_gpus else "",
    )
    if on_gpus:
        refuse_without_gpus()
    parts, wrong = arguments.parts or list(PARTS), []
    if not arguments.here:
        print(*expected_lines(parts, arguments), sep="\n", flush=True)
    for name in parts:
        if arguments.here and name in TABLES:
            write_table(name, arguments)
        elif not run_part(name, command_of(name, arguments), PARTS[name].limit_seconds, arguments.out):
            wrong.append(name)
    if arguments.page:
        write_page(arguments.out, arguments.page)
    if wrong:
        raise SystemExit(f"gpu_check: {', '.join(wrong)} failed; {arguments.out}/PART.log says why")


if __name__ == "__main__":
    main()
