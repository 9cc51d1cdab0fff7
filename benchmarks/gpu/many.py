"""What several ranks do with parameters, stages and offload, and the doors for a loop of one's own.

Each configuration of a run file is verified against one process, then trains five steps; all train the same rows, so
their losses are compared, too. A `Session` and TRL's trainer run under torchrun. Ranks with a GPU each use NCCL; where
ranks share one, all goes through host memory. Each command has a limit of its own, and its output is in the folder.
"""

from __future__ import annotations

import importlib.util
import json
import math
import random
import re
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from gpu.processes import last_lines, run_limited
from gpu.rows import Records
from gpu.setting import Sizes, model_config

STEPS = 5
COMMAND_LIMIT_SECONDS = 60.0
DOORS = Path(__file__).with_name("doors.py")
_WAIT_SECONDS = 40  # of a rank for another: less than the limit, so that the message is in the log
_TOLERANCES = {"bf16": 2e-2, "fp32": 1e-4}  # of losses of the same rows, relative
_SAID = {
    "transfers": r"^transfers: (.*)",
    "fused_layers": r"fused layers: (\w+)",
    "exercised": r"^exercised: (.*)",
    "verified": r"(PASS|FAIL).*$",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """What runs, on at least so many ranks. settings: keys of the run file; door: of `doors.py`, in its place.

    shares: whether ranks may share a GPU. needs: packages, without which it is left out.
    """

    settings: Mapping[str, Any] = field(default_factory=dict)
    door: str | None = None
    least_ranks: int = 2
    shares: bool = True
    needs: tuple[str, ...] = ()

    @property
    def commands(self) -> tuple[str, ...]:
        """The commands of it."""
        return ("verify", "train") if self.door is None else (self.door,)

    def ranks(self, gpus: int) -> int:
        """Return on how many ranks it runs: one a GPU, of at most four."""
        return max(self.least_ranks, min(gpus, 4)) if self.shares else max(1, min(gpus, 4))


CONFIGURATIONS = {
    "zero3": Configuration(settings={"shard": "zero3"}),
    "hybrid": Configuration(settings={"shard": "hybrid", "ranks_per_node": 2}, least_ranks=4),
    "stages with rings": Configuration(settings={"stages": 2}, least_ranks=4),
    "optimizer on the host": Configuration(settings={"optimizer": {"offload": True}}),
    "activations on the host": Configuration(settings={"offload": {"ratio": 0.5, "store": "host"}}),
    "Session": Configuration(door="session"),
    "SFTTrainer": Configuration(door="trainer", shares=False, needs=("trl", "datasets")),
}


def many(sizes: Sizes, records: Records, names: Sequence[str] = tuple(CONFIGURATIONS)) -> None:
    """Write a row `many` for each configuration.

    Raises:
        SystemExit: some of them failed; their rows say how.
    """
    gpus = torch.cuda.device_count() if sizes.device == "cuda" else 0
    folder = (records.folder / "many").resolve()
    first: list[float] = []
    failed = []
    for name in names:
        configuration, start = CONFIGURATIONS[name], time.perf_counter()
        if missing := [each for each in configuration.needs if importlib.util.find_spec(each) is None]:
            records.add("many", configuration=name, left_out=f"no package {' or '.join(missing)}")
            continue
        ranks = configuration.ranks(gpus) if gpus else configuration.least_ranks
        there = folder / re.sub(r"\W+", "-", name)
        shutil.rmtree(there, ignore_errors=True)  # a run does not go into the folder of another
        there.mkdir(parents=True)
        row, losses = _run(sizes, configuration, ranks, there)
        if losses and configuration.door is None:
            first = first or losses
            row["loss_difference"] = max(abs(a / b - 1) for a, b in zip(losses, first, strict=True))
            if row["loss_difference"] > _TOLERANCES[sizes.precision]:
                row["failed"] = f"losses are not those of {names[0]}"
        records.add("many", configuration=name, ranks=ranks, seconds=time.perf_counter() - start, **row)
        if "failed" in row:
            failed.append(name)
    if failed:
        raise SystemExit(f"many: {', '.join(failed)} failed; {folder} has the output of each command")


def _run(sizes: Sizes, configuration: Configuration, ranks: int, there: Path) -> tuple[dict[str, Any], list[float]]:
    """Run the commands of a configuration; return its row, and the losses of its steps."""
    row: dict[str, Any] = {}
    output = write_run(sizes, configuration, there)
    for what in configuration.commands:
        log = there / f"{what}.log"
        ended = run_limited(command_of(sizes, what, ranks, there), log, COMMAND_LIMIT_SECONDS)
        row |= _found(log.read_text(encoding="utf-8", errors="replace"))
        if ended != "ok":
            row["failed"] = f"{what}, {ended}: {' '.join(last_lines(log, 1))[:200]}"
            return row, []
    losses = [json.loads(line)["loss"] for line in output.read_text(encoding="utf-8").splitlines()]
    row |= {"first_loss": losses[0], "last_loss": losses[-1]}
    if len(losses) != STEPS or not all(map(math.isfinite, losses)):
        row["failed"] = f"{len(losses)} losses: {losses}"
        return row, []
    return row, losses


def _found(said: str) -> dict[str, str]:
    """Return what a command says of itself."""
    found = {name: re.search(pattern, said, re.MULTILINE) for name, pattern in _SAID.items()}
    return {name: each.group(1) for name, each in found.items() if each is not None}


def command_of(sizes: Sizes, what: str, ranks: int, there: Path) -> list[str]:
    """Return the command line of `verify`, `train` or a door."""
    if what in ("verify", "train"):
        command = ["-m", "lengthwise", what, str(there / "run.yaml"), "--ranks", str(ranks)]
        return [sys.executable, *command, "--timeout-seconds", str(_WAIT_SECONDS)]
    started = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return [sys.executable, *started, str(DOORS), what, sizes.device, str(there)]


def write_run(sizes: Sizes, configuration: Configuration, there: Path) -> Path:
    """Write the model's config, the rows and the run file; return where the losses of its steps will be."""
    model_config(sizes.many_model).save_pretrained(there / "model")
    rows, settings = rows_of(sizes), dict(configuration.settings)
    (there / "train.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    if "offload" in settings and sizes.device == "cpu":  # whose activations are in the host's memory already
        settings["offload"] = {**settings["offload"], "store": "disk", "path": str(there)}
    optimizer = {"lr": 1e-3, "schedule": "constant", "warmup_steps": 0, **settings.pop("optimizer", {})}
    values = {
        "model": "model", "data": [{"path": "train.jsonl"}], "steps": STEPS, "global_batch": {"sequences": len(rows)},
        "capacity_tokens": sizes.many_capacity_tokens, "precision": sizes.precision, "device": sizes.device,
        "output": "out", "optimizer": optimizer, "shard": "zero1", **settings,
    }  # fmt: skip
    if "stages" in settings:
        del values["shard"]
    (there / "run.yaml").write_text(json.dumps(values), encoding="utf-8")  # JSON is YAML
    return there / ("out/metrics.jsonl" if configuration.door is None else "losses.jsonl")


def rows_of(sizes: Sizes) -> list[dict[str, list[int]]]:
    """Return the rows of a step: the longest one needs a ring, the others are packed."""
    draw, capacity = random.Random(0), sizes.many_capacity_tokens
    lengths = [3 * capacity // 2, capacity // 2, *[capacity // 16] * 8]
    words = model_config(sizes.many_model).vocab_size
    return [{"input_ids": [draw.randrange(words) for _ in range(length)]} for length in lengths]
