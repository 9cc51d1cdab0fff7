"""Whole trainings of a few steps by run files, as a user starts them: on a GPU in processes of their own.

A process that has started CUDA cannot fork ranks. On the CPU they run in this process, by the same run file.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gpu.models import model_config
from gpu.sizes import Sizes
from lengthwise.core.errors import LengthwiseError, Problems
from lengthwise.training.api import train

_WARM_UP_STEPS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedRun:
    """What a run wrote, or why it ended: `refused`, then nothing else is there."""

    losses: tuple[float, ...] = ()
    seconds: tuple[float, ...] = ()
    num_tokens: tuple[int, ...] = ()
    ring_token_ratio: float = 0.0
    peak_bytes: int = 0
    refused: str | None = None

    @property
    def tokens_per_second(self) -> float:
        """Median over the steps after the first two."""
        return statistics.median(n / s for n, s in zip(self.num_tokens, self.seconds, strict=True))


def write_inputs(folder: Path, model: str, steps: Sequence[Sequence[int]], *, seed: int = 0) -> None:
    """Write a model's config and rows of random tokens, so many sequences a step, into a folder."""
    config = model_config(model)
    config.save_pretrained(folder / "model")
    random = np.random.default_rng(seed)
    with (folder / "rows.jsonl").open("w", encoding="utf-8") as file:
        for length in (length for step in steps for length in step):
            file.write(json.dumps({"input_ids": random.integers(0, config.vocab_size, length).tolist()}) + "\n")


def train_run(
    sizes: Sizes, folder: Path, name: str, settings: Mapping[str, Any], *, ranks: int, timeout_seconds: float = 300
) -> TrainedRun:
    """Train on what `write_inputs` wrote; settings are those of a run file, `name` that of its output folder."""
    values = {
        "model": str(folder / "model"),
        "weights": "fresh",
        "data": [{"path": str(folder / "rows.jsonl")}],
        "device": sizes.device,
        "precision": sizes.precision,
        "measurements": "off",
        "output": str(folder / name),
        **settings,
    }
    path = folder / f"{name}.yaml"
    path.write_text(json.dumps(values), encoding="utf-8")  # JSON is YAML
    refused = (_here if sizes.device == "cpu" else _in_a_process)(path, ranks, timeout_seconds)
    if refused is not None:
        return TrainedRun(refused=refused)
    rows = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text("utf-8").splitlines()]
    for left in (folder / name / "model").glob("*.safetensors"):
        left.unlink()  # gigabytes that nobody asks for
    timed = rows[min(_WARM_UP_STEPS, len(rows) - 1) :]
    return TrainedRun(
        losses=tuple(row["loss"] for row in rows),
        seconds=tuple(row["step_seconds"] for row in timed),
        num_tokens=tuple(row["num_tokens"] for row in timed),
        ring_token_ratio=max(row["ring_token_ratio"] for row in rows),
        peak_bytes=max(row["peak_memory_bytes"] for row in timed),
    )


def _here(path: Path, ranks: int, timeout_seconds: float) -> str | None:
    try:
        train(path, ranks=ranks, overwrite=True, timeout_seconds=timeout_seconds)
    except (LengthwiseError, Problems) as error:
        return " ".join(str(error).split())[:300]
    return None


def _in_a_process(path: Path, ranks: int, timeout_seconds: float) -> str | None:
    command = [sys.executable, "-m", "lengthwise", "train", str(path), "--ranks", str(ranks), "--overwrite"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_seconds)
    except subprocess.TimeoutExpired:
        return f"not done after {timeout_seconds:g} s"
    (path.parent / f"{path.stem}.log").write_text(done.stdout + done.stderr, encoding="utf-8")
    return None if done.returncode == 0 else " ".join(done.stderr.split())[-300:]
