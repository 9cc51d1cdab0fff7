"""What reading data costs a step: from prepared data of many sequences, against the same work on tokens in memory.

    python benchmarks/loader.py [--sequences 10000000] [--blocks 9] [--steps 6] [--tokens 4096] [--folder DIR]
                                 [--remote 1000000]

One rank, the model `tiny`, fp32, forward and backward. A block runs steps with what a run has: the order of the epoch,
planning in its process and read-ahead, from data that `lengthwise prepare` wrote; `from memory` runs the plans and
lengths of the block before on tokens made beforehand, without sampler, planner or data. Blocks take turns, each kind
first in turn; the first step of a block, which waits for the first plan, and the first blocks warm up. Figures are
medians over blocks of seconds a step, and the ratio is the median of those of neighbours. Aim: 1.02.

`cold` drops the data's pages from the system's cache before each block, and `no read-ahead` leaves it out; 16 sequences
of several thousand tokens would hide a disk, so rows are short (64 tokens on average), each in a page of its own.
`waited` are the seconds a step in which the training thread neither computed nor would have without a loader: taking
the next step, and making its tensors.

With `--remote`, instead: steps from so many raw chats that an actor of Ray tokenizes meanwhile (`remote: true`),
against the same steps from the same rows prepared, in turns, and what memory this process holds. Aim: 1.03. The
tokenizer is one of bytes with a chat template, of the tokenizers library.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pyarrow as pa
import torch
from pyarrow import parquet
from testing.laid import whole_parameters

from lengthwise.attention import choose_kernel
from lengthwise.comm import Mesh, SoloTransport, World
from lengthwise.config import DataSource, build_config
from lengthwise.core.plan import Plan
from lengthwise.cost.measured import base_cost
from lengthwise.data import ByteTokenizer, load_dataset
from lengthwise.data.feed_dataset import FeedDataset
from lengthwise.engine.batch import StepBatch, random_batch
from lengthwise.engine.step import StepContext, run_part
from lengthwise.models import ModelSource, build_model
from lengthwise.models.model_source import tiny_config
from lengthwise.planner.service.process import PlannerProcess
from lengthwise.planner.service.step_planning import step_planning
from lengthwise.run.checks import prepare_job
from lengthwise.run.job import Job, RunStart
from lengthwise.run.node_feed import FeedRank
from lengthwise.run.ray_feed import ray_feed
from lengthwise.session.source import PlanAhead
from lengthwise.setup import memory_of_settings
from pages import Findings, markdown, parse_options, verdict

AIM, CAPACITY = 1.02, 8192
FILES, MEAN_TOKENS, VOCAB = 8, 64, 256
KINDS = WARM, COLD, COLD_WITHOUT = "prepared", "prepared, cold", "prepared, cold, no read-ahead"


Block = tuple[float, float]  # seconds a step, and seconds waited a step


@dataclass(slots=True)
class Kind:
    """Blocks of one kind, each with its neighbour from memory."""

    blocks: list[tuple[Block, Block]] = field(default_factory=list)

    @property
    def ratios(self) -> list[float]:
        """Seconds a step over those of the neighbour."""
        return [ours[0] / memory[0] for ours, memory in self.blocks]

    @property
    def medians(self) -> tuple[float, float, float]:
        """Seconds a step, those from memory, and what is waited more."""
        columns = zip(*((ours[0], memory[0], ours[1] - memory[1]) for ours, memory in self.blocks), strict=True)
        step, memory, more = map(statistics.median, columns)
        return step, memory, more


class Loops:
    """One model, and the two ways to run a block of steps on it."""

    def __init__(self, job: Job, steps: int) -> None:
        self._steps, self._transport = steps, SoloTransport()
        self._model = build_model(ModelSource(name="tiny", config=tiny_config(), weights=False), seed=0)
        whole_parameters(self._model, self._transport, dtype=torch.float32)
        self._kernel = choose_kernel(torch.device("cpu"))
        self._made: list[tuple[StepBatch, Plan]] = []
        self._batches = job.batches()
        memory = memory_of_settings(job.config, job.trained, ranks=1, on_gpus=False)
        cost = base_cost(job.trained.shape, "cpu", precision="fp32")
        choices = {"planner": job.config.planner, "heads": job.config.heads}
        self._planning = step_planning(memory, cost, {"none": CAPACITY}, **choices)

    def prepared(self, process: PlannerProcess) -> Block:
        """Run a block from prepared data; return seconds a step, and those waited."""
        planner = lambda batch: process.plan(self._planning, batch.lengths)  # noqa: E731
        ahead = PlanAhead(self._batches, planner, self._transport, timeout_seconds=600)
        self._made, spent, waited = [], 0.0, 0.0
        with noted_tensors() as reading:
            for number in range(1 + self._steps):
                start, read = time.perf_counter(), len(reading)
                step = ahead.next(f"step {number}")
                assert step is not None, "epochs without end"
                taken = time.perf_counter() - start
                self._run(step.batch, step.plan)
                if number:
                    spent += time.perf_counter() - start
                    waited += taken + sum(reading[read:])
                    self._made.append((random_batch(step.batch.lengths, vocab=VOCAB), step.plan))
        ahead.close()
        return spent / self._steps, waited / self._steps

    def from_memory(self) -> Block:
        """Run the lengths and plans of the block before on tokens in memory."""
        start = time.perf_counter()
        with noted_tensors() as reading:
            for batch, plan in self._made:
                self._run(batch, plan)
            return (time.perf_counter() - start) / self._steps, sum(reading) / self._steps

    def _run(self, batch: StepBatch, plan: Plan) -> None:
        run_part(plan, batch, StepContext(self._model, Mesh(self._transport, 1), self._kernel, name="step"))


@contextmanager
def noted_tensors() -> Iterator[list[float]]:
    """Note the seconds of each `StepBatch.tensors` of the block."""
    found, tensors = list[float](), StepBatch.tensors

    def timed(self: StepBatch, segments: object) -> object:
        start = time.perf_counter()
        made = tensors(self, segments)  # pyright: ignore[reportArgumentType]
        found.append(time.perf_counter() - start)
        return made

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
                left_out = patch.object(StepBatch, "read_ahead", lambda *_: None)
                with left_out if name == COLD_WITHOUT else nullcontext():
                    ours = loops.prepared(process)
                memory = loops.from_memory()
                if block >= 0:
                    found[name].blocks.append((ours, memory))
    return found


def drop_cache(store: Path) -> None:
    """Drop the tokens' pages from the system's cache."""
    for path in store.glob("data-*.arrow"):
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


def opened(source: Mapping[str, object], tokens: int, **more: object) -> Job:
    """Open the data as a run does."""
    settings = {
        "model": "tiny", "data": [source], "global_batch": {"tokens": tokens}, "precision": "fp32",
        "capacity_tokens": CAPACITY, "steps": 100_000, "output": "unused", **more,
    }  # fmt: skip
    return prepare_job(RunStart(config=build_config(settings, folder=Path.cwd()), ranks=1, timeout_seconds=600))


TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def write_chats(folder: Path, rows: int) -> Path:
    """Write raw chats of two to six turns, of up to 1,220 letters, and a tokenizer; return their file."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE({letter: number for number, letter in enumerate(letters)}, []))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    made = PreTrainedTokenizerFast(tokenizer_object=inner)
    made.chat_template = TEMPLATE
    made.save_pretrained(folder / "tokenizer")
    path, random = folder / f"chats-{rows}.jsonl", np.random.default_rng(0)
    if not path.exists():
        text = " ".join(f"word{number}" for number in range(2000))
        with path.with_suffix(".tmp").open("w") as file:
            for turns in random.integers(1, 4, rows).tolist():
                sizes = np.minimum(20 + random.lognormal(3.5, 1.0, 2 * turns), 1200).astype(int).tolist()
                roles = ("user", "assistant") * turns
                chat = [{"role": role, "content": text[:size]} for role, size in zip(roles, sizes, strict=True)]
                file.write(json.dumps({"messages": chat}) + "\n")
        path.with_suffix(".tmp").rename(path)
    return path


def remote_table(folder: Path, rows: int, blocks: int, steps: int, tokens: int) -> Iterator[str]:
    """Run blocks of the same steps from prepared and from remote rows in turns; yield what they took."""
    path, store = write_chats(folder, rows), folder / f"chats-{rows}"
    tokenizer, start = str(folder / "tokenizer"), time.perf_counter()
    if not store.exists():
        command = [sys.executable, "-m", "lengthwise", "prepare", str(path), "--tokenizer", tokenizer]
        subprocess.run([*command, "--out", str(store)], check=True)
    prepared_seconds = time.perf_counter() - start
    jobs = [
        opened(source, tokens, tokenizer=tokenizer)
        for source in ({"path": str(store)}, {"path": str(path), "remote": True, "max_tokens": CAPACITY})
    ]
    start, found, held = time.perf_counter(), list[tuple[Block, Block]](), list[float]()
    with PlannerProcess() as process, ExitStack() as stack:
        assert isinstance(jobs[1].dataset, FeedDataset)
        rank = FeedRank(
            dataset=jobs[1].dataset,
            world=World(rank=0, world_size=1),
            transport=SoloTransport(),
            timeout_seconds=600.0,
            say=lambda _line: None,
            cleanup=stack,
        )
        stack.enter_context(ray_feed(rank))
        started = time.perf_counter() - start
        ours, theirs = Loops(jobs[1], steps), Loops(jobs[0], steps)
        for block in range(-1, blocks):
            pair = [loops.prepared(process) for loops in ((ours, theirs) if block % 2 else (theirs, ours))]
            held.append(resident_bytes() / 1e6)
            if block >= 0:
                found.append((pair[0], pair[1]) if block % 2 else (pair[1], pair[0]))
    kind = Kind(blocks=found)
    step, other, more = kind.medians
    yield f"{rows:,} raw chats of {path.stat().st_size / 1e6:,.0f} MB; preparing them took {prepared_seconds:.0f} s, "
    yield f"Ray and an index of the rows {started:.1f} s."
    yield ""
    ratios = [f"{statistics.median(kind.ratios):.3f}", f"{min(kind.ratios):.3f} to {max(kind.ratios):.3f}"]
    memory = ", ".join(f"{each:.0f}" for each in held)
    heads = "raw, remote: step, ms | prepared, ms | ratio | blocks | waited more, ms a step"
    yield from markdown(heads, [[f"{1e3 * step:.1f}", f"{1e3 * other:.1f}", *ratios, f"{1e3 * more:.2f}"]])
    yield ""
    yield f"Memory of this process after each pair of blocks, MB: {memory}."


def resident_bytes() -> int:
    """Return what of this process is in memory and belongs to it alone: anonymous pages."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon:"))


def table(found: dict[str, Kind]) -> Iterator[str]:
    """Yield a row a kind, and what that says of the aim."""

    def row(name: str, kind: Kind) -> list[str]:
        ours, memory, more = kind.medians
        ratios = [f"{statistics.median(kind.ratios):.3f}", f"{min(kind.ratios):.3f} to {max(kind.ratios):.3f}"]
        return [name, f"{1e3 * ours:.1f}", f"{1e3 * memory:.1f}", *ratios, f"{1e3 * more:.2f}"]

    heads = "data | step, ms | from memory, ms | ratio | blocks | waited more, ms a step"
    yield from markdown(heads, (row(*each) for each in found.items()))
    yield ""
    for name in (WARM, COLD):
        ratio = statistics.median(found[name].ratios)
        yield f"{name}: {ratio:.3f} (aim {AIM}: {verdict(ratio <= AIM)})."


def main() -> None:
    """Make the data, and run all blocks."""
    asked = parse_options(
        __doc__, sequences=10_000_000, blocks=9, steps=6, tokens=(4096, "a step"),
        folder=(Path(), "keeps the prepared data; default: a temporary one"), remote=(0, "raw chats"),
    )  # fmt: skip
    torch.set_num_threads(1)
    findings = Findings("loader")
    with nullcontext(asked.folder) if asked.folder else tempfile.TemporaryDirectory() as folder:
        if asked.remote:
            sizes = (asked.remote, asked.blocks, asked.steps, asked.tokens)
            print("\n".join(remote_table(Path(folder), *sizes)), f"\nload {os.getloadavg()[0]:.1f}")
            return
        store, made = prepared_store(Path(folder), asked.sequences)
        start = time.perf_counter()
        load_dataset([DataSource(path=store)], tokenizer=ByteTokenizer, vocab_size=VOCAB)
        opening = time.perf_counter() - start
        job = opened({"path": str(store)}, asked.tokens)
        tokens = job.dataset.lengths.sum() / 1e6
        findings.add(
            [f"{len(job.dataset.lengths):,} sequences of {tokens:,.0f}M tokens, {made}; opened in {opening:.2f} s.", ""]
        )
        findings.add(table(measured(Loops(job, asked.steps), store, asked.blocks)))
    load = os.getloadavg()[0]
    about = f"medians of {asked.blocks} blocks of {asked.steps} steps, one thread, load {load:.1f} at the end"
    findings.sign("Measured", f"torch {torch.__version__}, {about}", asked.out)


if __name__ == "__main__":
    main()
