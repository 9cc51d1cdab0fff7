"""What reading data costs a step: from prepared data of many sequences, against the same work on tokens in memory.

    python benchmarks/loader.py [--sequences 10000000] [--blocks 9] [--steps 6] [--tokens 4096] [--folder DIR]

One rank, the model `tiny`, fp32, forward and backward. A block runs steps with what a run has: the order of the epoch,
planning in its process and read-ahead, from data that `lengthwise prepare` wrote; `from memory` runs the plans and
lengths of the block before on tokens made beforehand, without sampler, planner or data. Blocks take turns, each kind
first in turn; the first step of a block, which waits for the first plan, and the first blocks warm up. Figures are
medians over blocks of seconds a step, and the ratio is the median of those of neighbours. Aim: 1.02.

`cold` drops the data's pages from the system's cache before each block, and `no read-ahead` leaves it out; 16 sequences
of several thousand tokens would hide a disk, so rows are short (64 tokens on average), each in a page of its own.
`waited` are the seconds a step in which the training thread neither computed nor would have without a loader: taking
the next step, and making its tensors.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pyarrow as pa
import torch
from pyarrow import parquet

from lengthwise.attention import choose_kernel
from lengthwise.comm import SoloTransport
from lengthwise.config import build_config
from lengthwise.core.plan import Plan
from lengthwise.data import load_dataset, load_tokenizer
from lengthwise.engine.batch import StepBatch, random_batch
from lengthwise.engine.replicated import FlatParameters
from lengthwise.engine.step import run_plan
from lengthwise.models import ModelSource, build_model
from lengthwise.models.load import tiny_config
from lengthwise.steps.planner_process import PlannerProcess
from lengthwise.steps.planning import PlanAhead
from lengthwise.training.job import Job, prepare_job
from pages import Findings, add_out

AIM, CAPACITY = 1.02, 8192
FILES, MEAN_TOKENS, VOCAB = 8, 64, 256
KINDS = WARM, COLD, COLD_WITHOUT = "prepared", "prepared, cold", "prepared, cold, no read-ahead"


@dataclass(slots=True)
class Kind:
    """Blocks of one kind, each with its neighbour from memory: (seconds a step, seconds waited a step) of both."""

    blocks: list[tuple[tuple[float, float], tuple[float, float]]] = field(default_factory=list)

    @property
    def ratios(self) -> list[float]:
        """Seconds a step over those of the neighbour."""
        return [ours[0] / memory[0] for ours, memory in self.blocks]

    @property
    def ratio(self) -> float:
        """Their median."""
        return statistics.median(self.ratios)

    @property
    def medians(self) -> tuple[float, float, float]:
        """Seconds a step, those from memory, and what is waited more."""
        return (
            statistics.median(ours[0] for ours, _ in self.blocks),
            statistics.median(memory[0] for _, memory in self.blocks),
            statistics.median(ours[1] - memory[1] for ours, memory in self.blocks),
        )


class Loops:
    """One model, and the two ways to run a block of steps on it."""

    def __init__(self, job: Job, steps: int) -> None:
        self._job, self._steps, self._transport = job, steps, SoloTransport()
        self._model = build_model(ModelSource(name="tiny", config=tiny_config(), weights=False), seed=0)
        FlatParameters(self._model, self._transport, dtype=torch.float32)
        self._kernel = choose_kernel(torch.device("cpu"))
        self._made: list[tuple[StepBatch, Plan]] = []
        self._batches = job.batches()

    def prepared(self, process: PlannerProcess) -> tuple[float, float]:
        """Run a block from prepared data; return seconds a step, and those waited."""
        ahead = PlanAhead(
            self._batches, partial(process.plan, self._job.planning), self._transport, timeout_seconds=600
        )
        self._made, spent, waited = [], 0.0, 0.0
        with noted_tensors() as reading:
            for number in range(1 + self._steps):
                start, read = time.perf_counter(), reading.seconds
                step = ahead.next(f"step {number}")
                assert step is not None, "epochs without end"
                taken = time.perf_counter() - start
                self._run(step.batch, step.plan)
                if number:
                    spent += time.perf_counter() - start
                    waited += taken + reading.seconds - read
                    self._made.append((random_batch(step.batch.lengths, vocab=VOCAB), step.plan))
        ahead.close()
        return spent / self._steps, waited / self._steps

    def from_memory(self) -> tuple[float, float]:
        """Run the lengths and plans of the block before on tokens in memory."""
        spent = waited = 0.0
        with noted_tensors() as reading:
            for batch, plan in self._made:
                start = time.perf_counter()
                self._run(batch, plan)
                spent += time.perf_counter() - start
            waited += reading.seconds
        return spent / self._steps, waited / self._steps

    def _run(self, batch: StepBatch, plan: Plan) -> None:
        run_plan(self._model, plan, batch, self._transport, self._kernel, name="step")


@dataclass(slots=True)
class Reading:
    """Seconds in which tensors were made."""

    seconds: float = 0.0


@contextmanager
def noted_tensors() -> Iterator[Reading]:
    """Time all `StepBatch.tensors` of the block."""
    found, tensors = Reading(), StepBatch.tensors

    def timed(self: StepBatch, segments: object) -> object:
        start = time.perf_counter()
        try:
            return tensors(self, segments)  # pyright: ignore[reportArgumentType]
        finally:
            found.seconds += time.perf_counter() - start

    with patch.object(StepBatch, "tensors", timed):
        yield found


def measured(loops: Loops, store: Path, blocks: int) -> dict[str, Kind]:
    """Run blocks in turns; `from memory` after each other kind, so that every block has a neighbour of its lengths."""
    found = {name: Kind() for name in KINDS}
    with PlannerProcess() as process:
        for block in range(-1, blocks):
            for name in (*KINDS[block % len(KINDS) :], *KINDS[: block % len(KINDS)]):
                if name != WARM:
                    drop_cache(store)
                with without_read_ahead() if name == COLD_WITHOUT else nullcontext():
                    ours = loops.prepared(process)
                memory = loops.from_memory()
                if block >= 0:
                    found[name].blocks.append((ours, memory))
    return found


@contextmanager
def without_read_ahead() -> Iterator[None]:
    """Leave it to the first who reads a page to wait for it."""
    with patch.object(StepBatch, "read_ahead", lambda *_: None):
        yield


def drop_cache(store: Path) -> None:
    """Drop the tokens' pages from the system's cache."""
    for path in store.glob("tokens-*.bin"):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def write_rows(folder: Path, sequences: int) -> int:
    """Write Parquet files of rows of random ids; return how many tokens."""
    random, total = np.random.default_rng(0), 0
    for number in range(FILES):
        lengths = 1 + random.geometric(1 / MEAN_TOKENS, sequences // FILES + (number < sequences % FILES))
        ids = pa.array(random.integers(0, VOCAB, int(lengths.sum()), dtype=np.int32))
        rows = pa.ListArray.from_arrays(pa.array(np.append(0, np.cumsum(lengths)), pa.int32()), ids)
        parquet.write_table(pa.table({"input_ids": rows}), folder / f"rows-{number}.parquet")
        total += len(ids)
    return total


def prepared_store(folder: Path, sequences: int) -> tuple[Path, str]:
    """Return prepared data of so many rows, made anew unless `folder` has them, and how long that took."""
    store, start = folder / f"tokens-{sequences}", time.perf_counter()
    if store.exists():
        return store, "found from before"
    with tempfile.TemporaryDirectory(dir=folder) as rows:
        tokens = write_rows(Path(rows), sequences)
        start = time.perf_counter()
        command = [sys.executable, "-m", "lengthwise", "prepare", rows, "--tokenizer", "bytes", "--out", str(store)]
        subprocess.run(command, check=True)
    spent = time.perf_counter() - start
    return store, f"prepared from Parquet in {spent:.0f} s ({tokens / spent / 1e6:.1f}M tokens/s)"


def resident_mb() -> float:
    """Return the memory of this process that is not mapped from files."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return int(status.split("RssAnon:")[1].split()[0]) / 1024


def opened(store: Path, tokens: int) -> tuple[Job, str]:
    """Open the data as a run does; return it, and what that takes."""
    before = resident_mb()
    settings = {
        "model": "tiny",
        "data": [{"path": str(store)}],
        "global_batch": {"tokens": tokens},
        "capacity_tokens": CAPACITY,
        "steps": 100_000,
        "output": "unused",
    }
    job = prepare_job(build_config(settings, folder=Path.cwd()), ranks=1, timeout_seconds=600)
    took, start = resident_mb() - before, time.perf_counter()
    load_dataset(job.config.data, tokenizer=lambda: load_tokenizer("bytes"), vocab_size=VOCAB)
    opening, start = time.perf_counter() - start, time.perf_counter()
    next(job.batches())
    ordering, rows, data = time.perf_counter() - start, len(job.dataset.lengths), job.dataset.lengths.sum()
    return job, (
        f"{rows:,} sequences of {data / 1e6:,.0f}M tokens: opened in {opening:.2f} s, ordered for the first epoch in "
        f"{ordering:.1f} s. A run's start takes {took:,.0f} MB beside mapped pages ({took * 1e6 / rows:.0f} bytes a "
        "sequence)."
    )


def table(found: Mapping[str, Kind]) -> Iterator[str]:
    """Yield a row a kind, and what that says of the aim."""
    yield "| data | step, ms | from memory, ms | ratio | blocks | waited more, ms a step |"
    yield "|---" * 6 + "|"
    for name, kind in found.items():
        ours, memory, more = kind.medians
        low, high = min(kind.ratios), max(kind.ratios)
        yield (
            f"| {name} | {1e3 * ours:.1f} | {1e3 * memory:.1f} | {kind.ratio:.3f} | {low:.3f} to {high:.3f} | "
            f"{1e3 * more:.2f} |"
        )
    yield ""
    for name in (WARM, COLD):
        met = "met" if found[name].ratio <= AIM else "**missed**"
        yield f"{name}: {found[name].ratio:.3f} (aim {AIM}: {met})."


def main() -> None:
    """Make the data, and run all blocks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, default=10_000_000)
    parser.add_argument("--blocks", type=int, default=9)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=4096, help="a step")
    parser.add_argument("--folder", type=Path, help="keeps the prepared data; default: a temporary one")
    add_out(parser, "loader")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    findings = Findings("loader")
    with nullcontext(arguments.folder) if arguments.folder else tempfile.TemporaryDirectory() as folder:
        store, made = prepared_store(Path(folder), arguments.sequences)
        job, memory = opened(store, arguments.tokens)
        findings.add([f"{memory} {made[0].upper()}{made[1:]}.", ""])
        findings.add(table(measured(Loops(job, arguments.steps), store, arguments.blocks)))
    load = os.getloadavg()[0]
    about = f"medians of {arguments.blocks} blocks of {arguments.steps} steps, one thread, load {load:.1f} at the end"
    findings.sign("Measured", f"torch {torch.__version__}, {about}")
    findings.write(arguments.out)


if __name__ == "__main__":
    main()
