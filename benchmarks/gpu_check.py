"""The checks of a machine with one GPU, in scripts of at most ten minutes, each usable alone and offline.

    python benchmarks/gpu_check.py [SCRIPT] [--out FOLDER] [--device cuda] [--tiny]

Every part is a process with a time limit of its own, nothing stops at a failure, and what was found is written as it is
found; at the end the exit status is 1 if a part failed or ran into its limit. SCRIPT is one of `SCRIPTS`, or all of
them. It needs a Python with torch and transformers and the pure packages that docs/gpu.md lists, and nothing to be
installed. Then `gpu_page.py` makes the page. With --device cpu --tiny it proves itself without a GPU.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from gpu.parts import ROOT, Part, python_path, run_parts

MOST_SECONDS = 600

SCRIPTS: dict[str, dict[str, float]] = {
    "contact": {
        "place": 45,
        "ceilings": 50,
        "test_gpu_nccl": 140,
        "test_gpu_kernels": 120,
        "test_gpu_engine": 40,
        "test_gpu_offload": 40,
        "test_gpu_runs": 155,
    },
    "steps": {"replay": 220, "steps": 280, "steps_liger": 90},
    "limits": {"longest": 240, "staged": 200, "shares": 60, "profile": 60},
    "switches": {"switches": 360, "parity": 120, "costs": 110},
}
"""The parts of each script and the seconds that each may take: tables of `gpu_step.py`, and files of tests/gpu."""
_TINY_TESTS = {
    "test_gpu_kernels": "kernel_for",
    "test_gpu_nccl": "moves_and_sums and 2]",
    "test_gpu_runs": "too_small",
}


def parts_of(script: str, folder: Path, *, device: str, tiny: bool) -> list[Part]:
    """Return the parts of a script."""
    environment = {
        "LENGTHWISE_TEST_GPU": "1" if device == "cuda" else "",
        "PYTHONPATH": python_path(),
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
    }
    parts = []
    for name, limit_seconds in SCRIPTS[script].items():
        if name.startswith("test_"):
            chosen = device if not tiny else f"{device} and ({_TINY_TESTS.get(name, 'gpu')})"
            tests = [str(ROOT / "tests" / "gpu" / f"{name}.py"), "-k", chosen]
            options = ["-q", "-W", "default", "-p", "no:cacheprovider", f"--rootdir={ROOT}"]
            command = [sys.executable, "-m", "pytest", *options, *tests]
        else:
            asked = ["--out", str(folder), "--device", device, *(["--tiny"] if tiny else [])]
            command = [sys.executable, str(ROOT / "benchmarks" / "gpu_step.py"), name, *asked]
        parts.append(Part(name=name, command=tuple(command), limit_seconds=limit_seconds, environment=environment))
    return parts


def main() -> None:
    """Run one script, or all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("script", nargs="?", default="all", metavar="SCRIPT", choices=(*SCRIPTS, "all"))
    parser.add_argument("--out", type=Path, default=Path("runs/gpu"), metavar="FOLDER")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="sizes for a test")
    arguments = parser.parse_args()
    wrong = []
    for script in SCRIPTS if arguments.script == "all" else (arguments.script,):
        parts = parts_of(script, arguments.out, device=arguments.device, tiny=arguments.tiny)
        wrong += run_parts(script, parts, arguments.out)
    if wrong:
        raise SystemExit(f"gpu_check: {', '.join(wrong)} failed; {arguments.out}/PART.log says why")


if __name__ == "__main__":
    main()
