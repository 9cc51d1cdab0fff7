"""Where rows come from: GPU, driver, clocks, power, versions, commit, date; without a GPU what there is of it."""

from __future__ import annotations

import datetime
import importlib
import importlib.metadata
import platform
import shutil
import subprocess
from pathlib import Path
from typing import Any

import torch

from gpu.records import Records
from lengthwise.core import __version__
from lengthwise.profiler.place import processor_name

PACKAGES = (
    *("torch", "transformers", "numpy", "safetensors", "pyyaml", "rich", "pydantic", "pydantic-core"),
    *("annotated-types", "typing-inspection", "typing-extensions", "tyro", "docstring-parser", "typeguard"),
    *("pytest", "pluggy", "iniconfig", "hypothesis", "sortedcontainers"),
)
"""What the scripts of a GPU import, directly or not."""
OPTIONAL = ("liger-kernel", "nvidia-cudnn-frontend", "triton")
_CLOCKS = ("clocks.sm", "clocks.max.sm", "clocks.mem", "power.draw", "power.limit", "temperature.gpu", "driver_version")


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


def versions(names: tuple[str, ...]) -> dict[str, str]:
    """Return the installed version of each package that there is."""
    found = {}
    for name in names:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def commit() -> str:
    """Return the commit of this tree, with + where files differ; unknown outside of git."""
    asked = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty=+"]
    try:
        return subprocess.run(asked, capture_output=True, text=True).stdout.strip() or "unknown"
    except OSError:  # no git on this machine
        return "unknown"


def add_place(records: Records, device: torch.device) -> None:
    """Write where and with what a part runs."""
    values: dict[str, Any] = {"cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version()}
    if device.type == "cuda":
        nccl: Any = importlib.import_module("torch.cuda.nccl")
        values |= {
            "nccl": ".".join(map(str, nccl.version())),
            "capability": ".".join(map(str, torch.cuda.get_device_capability(device))),
            "device_bytes": torch.cuda.get_device_properties(device).total_memory,
        }
    records.add(
        "place",
        device=device_name(device),
        processor=processor_name(),
        date=datetime.datetime.now(tz=datetime.UTC).isoformat(timespec="seconds"),
        commit=commit(),
        python=platform.python_version(),
        lengthwise=__version__,
        versions=versions((*PACKAGES, *OPTIONAL)),
        missing=[name for name in PACKAGES if name not in versions(PACKAGES)],
        clocks=clocks(),
        **values,
    )
