"""The checks of a machine with one GPU, offline: parts with a time limit each, and the page of what they found.

    python benchmarks/gpu_check.py [PART ...] [--out FOLDER] [--page PAGE] [--device cuda] [--tiny] [--here]

A part is a table of `TABLES` or a file of tests/gpu; without PART all run. Each is a process of its own (with --here
tables run in this one), nothing stops at a failure, and rows are written as they are found; the exit status is 1 if a
part failed or ran into its limit. It needs a Python with torch and transformers and the pure packages that docs/gpu.md
lists. --page replaces what stands below the page's mark, by all that is in the folder. With --device cpu --tiny
everything runs on the CPU in seconds, which proves the script and no figure.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(1, str(Path(__file__).parents[1] / "src"))
sys.path.insert(2, str(Path(__file__).parents[1]))  # runs from a tree that is not installed, too

from lengthwise.cli.machine import prepare_environment
from lengthwise.comm import count_gpus

ROOT = Path(__file__).parents[1]
TABLES = {"place": 45, "ceilings": 50, "replay": 220, "steps": 280, "parity": 60, "profile": 60}
"""The seconds that each table may take; but for `place` its function in `gpu.replay` or `gpu.tables` has its name."""
TESTS = {
    "test_gpu_nccl": 140, "test_gpu_kernels": 120, "test_gpu_engine": 40, "test_gpu_offload": 40, "test_gpu_runs": 155,
}  # fmt: skip
TINY_TESTS = {"test_gpu_kernels": "kernel_for", "test_gpu_nccl": "moves_and_sums and 2]", "test_gpu_runs": "too_small"}
MARK = "<!-- what follows is written by benchmarks/gpu_check.py -->\n"
_GRACE_SECONDS = 5.0


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
    print(f"{name}: at most {limit_seconds:g} s", flush=True)
    with log.open("w", encoding="utf-8") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            status = process.wait(timeout=limit_seconds)
            ended = f"status {status}" if status else "ok"
        except subprocess.TimeoutExpired:
            ended = "time limit"
        finally:
            _end_group(process)
    row = {"table": "part", "name": name, "ended": ended, "seconds": time.perf_counter() - start}
    (folder / f"{name}-part.jsonl").write_text(json.dumps(row) + "\n", encoding="utf-8")
    print(f"{name}: {ended} after {row['seconds']:.1f} s", flush=True)
    if ended != "ok":
        print(*log.read_text(encoding="utf-8", errors="replace").splitlines()[-15:], sep="\n", flush=True)
    return ended == "ok"


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """End what is left of a part's session: ranks that it forked hold a GPU's memory."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
            process.wait(timeout=_GRACE_SECONDS)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            continue
    process.wait()


def write_table(name: str, arguments: argparse.Namespace) -> None:
    """Write one table, in this process; status 2 where there is no GPU and one is asked for."""
    prepare_environment()
    if arguments.device == "cuda" and not count_gpus():
        print("gpu_check: no GPU that torch can use on this machine; nothing was measured or written", file=sys.stderr)
        raise SystemExit(2)

    import torch

    from gpu import replay, tables
    from gpu.rows import Records, add_place, clocks
    from gpu.setting import sizes_of

    sizes, records = sizes_of(arguments.device, tiny=arguments.tiny), Records(arguments.out, name)
    torch.manual_seed(0)
    add_place(records, sizes.where)
    if name != "place":
        getattr(replay if name == "replay" else tables, name)(sizes, records)
    records.add("end", clocks=clocks())


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
    limits = {**TABLES, **TESTS}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(limits))
    parser.add_argument("--out", type=Path, default=Path("runs/gpu"), metavar="FOLDER")
    parser.add_argument("--page", type=Path, metavar="PAGE", help="docs/gpu.md, or another page with its mark")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="sizes for a test")
    parser.add_argument("--here", action="store_true", help="tables in this process, without a time limit")
    arguments = parser.parse_args()
    if unknown := set(arguments.parts) - set(limits):
        parser.error(f"expected parts of {', '.join(limits)}; got {', '.join(sorted(unknown))}")
    os.environ.update(
        PYTHONPATH=python_path(),
        HF_HUB_OFFLINE="1",
        TRANSFORMERS_OFFLINE="1",
        LENGTHWISE_TEST_GPU="1" if arguments.device == "cuda" else "",
    )
    wrong = []
    for name in arguments.parts or limits:
        if arguments.here and name in TABLES:
            write_table(name, arguments)
        elif not run_part(name, command_of(name, arguments), limits[name], arguments.out):
            wrong.append(name)
    if arguments.page:
        write_page(arguments.out, arguments.page)
    if wrong:
        raise SystemExit(f"gpu_check: {', '.join(wrong)} failed; {arguments.out}/PART.log says why")


if __name__ == "__main__":
    main()
