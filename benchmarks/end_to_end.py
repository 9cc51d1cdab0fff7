"""Real training of the same batches by Lengthwise and its rivals, in wall-clock seconds.

    python benchmarks/end_to_end.py [--links loopback] [--ranks 2] [--capacity 8192] [--repeats 3] [--batches 2]
        [--batch-tokens 32768] [--ways static,lengthwise] [--core-use 0.6] [--profile-seconds 60] [--bytes-a-token 16]
        [--seconds 500]
    python benchmarks/end_to_end.py --ranks 1 --capacity 16384 --ways "one by one,lengthwise"

Files of the Python standard library up to 16K tokens, whole (a BPE of 1,024 words, 2.7 bytes a token) or with lengths
after their bytes; a model with a quarter as many heads of keys as of queries, fp32. Rivals: packed data parallelism,
where a rank holds the longest file alone, a fixed context-parallel mesh, one degree a step, ByteScale's scheduler; on
one rank the plain Hugging Face loop. Each has its best options (`rivals`), under the same capacity in tokens, planned
with the same measured costs. All take turns; their losses must agree to 1e-5, or the benchmark fails. Plans are made
before the clock starts, as a run makes them while the step before is under way.

Each rank, of one thread, gets a fixed share of a core (a cgroup): all seconds are of the wall clock, of cores that are
slower, and as many as ranks. Loopback: as it is. Shaped: a network namespace a rank, whose link lets out so many bytes
for a FLOP of training as 50 GB/s beside an H100 at 400 TFLOP/s, values of 2 bytes there and of 4 here.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from testing import make_plan, run_ranks
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig

from batches import stdlib_files
from core_shares import core_shares
from lengthwise.attention import choose_kernel
from lengthwise.cli.machine import machine_lines
from lengthwise.comm import Mesh, SoloTransport
from lengthwise.core.names import counted
from lengthwise.core.plan import Piece
from lengthwise.core.shape import Cluster, ModelShape
from lengthwise.cost import shape_from_config
from lengthwise.data.dataset import DatasetBuilder
from lengthwise.engine.batch import StepBatch, random_batch
from lengthwise.engine.step import StepContext, run_part
from lengthwise.models import ModelSource, build_model
from lengthwise.report.figures import count
from namespaces import shaped_nodes
from pages import Findings, markdown, parse_options
from rivals import LENGTHWISE, WAYS, Setting, TimedStep, Trained, Way, train_in_turns

LONGEST, WORDS = 16_384, 1024
CLUSTER_FLOPS, CLUSTER_BYTES, VALUE_BYTES = 400e12, 50e9, 2  # of an H100 in training; of its link; of a value there
TOLERANCE = 1e-5
_TIMEOUT_SECONDS = 900.0


def main() -> None:
    """Train in all ways, and print how much longer each took than Lengthwise."""
    asked = parse_options(
        __doc__, links=["loopback", "shaped"], ranks=2, capacity=8192, repeats=3,
        seconds=(500.0, "no repeat begins that would end later"), batches=2, batch_tokens=32_768,
        bytes_a_token=(0, "lengths after the files' bytes; 0: a BPE's"), ways=",".join(WAYS),
        core_use=(0.6, "share of all cores that ranks get; 0: no shares"), profile_seconds=60.0,
    )  # fmt: skip
    print(*machine_lines()[1:], sep="\n")
    marks = ["end_to_end", "-shaped" * (asked.links == "shaped"), "-short" * (asked.bytes_a_token > 0)]
    marks.append("-alone" * (asked.capacity >= LONGEST) if asked.ranks > 1 else "-one-rank")
    findings = Findings("".join(marks))
    source = model_source()
    batches = documents(asked.batches, asked.batch_tokens, asked.bytes_a_token)
    cluster = Cluster(ranks=asked.ranks, capacity_tokens=asked.capacity)
    setting = Setting(
        source=source, batches=tuple(batches), cluster=cluster,
        ranks_per_node=1 if asked.links == "shaped" else asked.ranks, ways=tuple(asked.ways.split(",")),
        repeats=asked.repeats, seconds=asked.seconds, profile_seconds=asked.profile_seconds,
        profile_tokens=min(asked.capacity, LONGEST // 4),
    )  # fmt: skip
    for number, batch in enumerate(batches):
        print(f"batch {number}: {len(batch.lengths)} files, {sum(batch.lengths)} tokens, {sorted(batch.lengths)[::-1]}")
    with machine(findings, asked, source) as enter:
        (trained, *_) = run_ranks(
            lambda transport: train_in_turns(transport, setting),
            asked.ranks,
            timeout_seconds=_TIMEOUT_SECONDS,
            before_joining=enter,
        )
    findings.add(report(trained))
    refuse_unequal(trained.steps)
    repeats = max(step.repeat for step in trained.steps)
    told = f"{counted(repeats, 'repeat')}, {len(batches)} batches of {count(asked.batch_tokens)} tokens"
    findings.sign("Measured", told, asked.out)


@contextmanager
def machine(findings: Findings, asked: argparse.Namespace, source: ModelSource) -> Iterator[Callable[[int], None]]:
    """Make the nodes and the shares of cores that were asked for; yield what takes a rank to its own."""
    ranks, cores = asked.ranks, os.cpu_count() or 1
    share = min(1.0, asked.core_use * cores / ranks) or 1.0
    with ExitStack() as stack:
        shares = stack.enter_context(core_shares([share] * ranks)) if asked.core_use else None
        nodes = None
        if asked.links == "shaped":
            flops = core_flops(source)
            rate = link_bytes_per_second(flops * share)
            told = f"A core reaches {count(flops)}FLOP/s in training this model, a rank has {share:.2f} of one"
            findings.add([f"{told}: links of {count(rate)}B/s.", ""])
            nodes = stack.enter_context(shaped_nodes(ranks, rate))

        def enter(rank: int) -> None:
            if shares is not None:
                shares.enter(rank)
            if nodes is not None:
                nodes.enter(rank)

        yield enter


def link_bytes_per_second(flops: float) -> float:
    """Return the rate beside which a rank of `flops` is what an H100 is beside its link, in fp32."""
    return CLUSTER_BYTES * flops / CLUSTER_FLOPS * 4 / VALUE_BYTES


def model_source() -> ModelSource:
    """Make a Llama with a quarter as many heads of keys as of queries, as 8 of 32; 32 would take minutes a step."""
    config = LlamaConfig(
        vocab_size=WORDS, hidden_size=256, intermediate_size=704, num_hidden_layers=2, num_attention_heads=8,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=LONGEST, tie_word_embeddings=True,
    )  # fmt: skip
    return ModelSource(name="small llama", config=config, weights=False)


def documents(batches: int, batch_tokens: int, bytes_a_token: int) -> list[StepBatch]:
    """Draw batches of files of the standard library, none above `LONGEST` tokens, each batch of about so many.

    bytes_a_token: 0: whole files; else of each only as many of its first tokens.
    """
    files = [path.read_text(encoding="utf-8", errors="replace") for path in stdlib_files()]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=WORDS, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(files[::8], trainer)
    random.Random(0).shuffle(files)
    builder, groups, left, row = DatasetBuilder(), [list[int]()], batch_tokens, 0
    builder.start_source("stdlib", "stdlib", None)
    for text in files:
        ids = np.array(tokenizer.encode(text).ids, dtype=np.int32)
        if bytes_a_token:
            ids = ids[: -(-len(text.encode()) // bytes_a_token)]
        if not 1 < len(ids) <= LONGEST:
            continue
        builder.add(ids, None)
        groups[-1].append(row)
        row, left = row + 1, left - len(ids)
        if left <= 0:
            if len(groups) == batches:
                break
            groups.append([])
            left = batch_tokens
    dataset = builder.finish()
    return [StepBatch(dataset, group) for group in groups]


def core_flops(source: ModelSource) -> float:
    """Measure the FLOP/s that a core reaches in training: forward and backward of 4,096 tokens and of 4 x 1,024."""
    return run_ranks(lambda _transport: _rank_flops(source), 1)[0]


def _rank_flops(source: ModelSource) -> float:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    model, shape, rates = build_model(source, seed=0), shape_from_config(source.config.to_dict()), []
    lengths = ((4096,), (1024,) * 4)
    for repeat in range(4):
        start = time.process_time()  # whatever else the machine does
        for each in lengths:
            plan = make_plan(1, each, [Piece(ranks=(0,), sequences=tuple(range(len(each))))], layers=shape.layers)
            batch = random_batch(each, vocab=shape.vocab)
            context = StepContext(model, Mesh(SoloTransport(), 1), choose_kernel(torch.device("cpu")), name="FLOP/s")
            run_part(plan, batch, context)
        if repeat:
            work = sum(training_flops(shape, tokens) for each in lengths for tokens in each)
            rates.append(work / (time.process_time() - start))
    torch.set_num_threads(threads)
    return max(rates)


def training_flops(shape: ModelShape, tokens: int) -> float:
    """Count forward and backward of one sequence: 6 a weight and token, attention 2 x width x tokens^2 and 2.5 x it."""
    attention = 3.5 * 2 * shape.layers * shape.heads * shape.head_dim * tokens**2
    return 6.0 * shape.linear_params * tokens + attention


def refuse_unequal(steps: Sequence[TimedStep]) -> None:
    """End the benchmark where two ways that saw the same batches have other losses."""
    worst = worst_difference(steps)
    if worst > TOLERANCE:
        raise SystemExit(f"expected the same losses to {TOLERANCE:g}, got a difference of {worst:.1e}: see the steps")


def worst_difference(steps: Sequence[TimedStep]) -> float:
    """Return the largest relative difference of the losses of one step."""
    losses: dict[tuple[int, int], list[float]] = {}
    for step in steps:
        losses.setdefault((step.repeat, step.batch), []).append(step.loss)
    return max(max(each) / min(each) - 1 for each in losses.values())


@dataclass(frozen=True, slots=True)
class Ratio:
    """How much longer a way took than Lengthwise: the median of the repeats, the least and the most."""

    median: float
    least: float
    most: float


def ratios(steps: Sequence[TimedStep], seconds_of: Callable[[TimedStep], float]) -> dict[str, Ratio]:
    """Compare seconds of all batches, repeat by repeat."""
    seconds: dict[tuple[str, int], float] = {}
    for step in steps:
        if step.repeat:
            key = step.way, step.repeat
            seconds[key] = seconds.get(key, 0.0) + seconds_of(step)
    found = {}
    for way in dict.fromkeys(step.way for step in steps):
        each = [taken / seconds[LENGTHWISE, repeat] for (name, repeat), taken in seconds.items() if name == way]
        found[way] = Ratio(statistics.median(each), min(each), max(each))
    return found


def report(trained: Trained) -> Iterator[str]:
    """Make the table: a row a way."""
    whole = ratios(trained.steps, lambda step: step.seconds)
    work = ratios(trained.steps, lambda step: step.work_seconds)
    (ours,) = (way.simulated_seconds for way in trained.ways if way.name == LENGTHWISE)

    def row(way: Way) -> list[str]:
        ratio, simulated = whole[way.name], f"{way.simulated_seconds / ours:.2f}" if way.simulated_seconds else "-"
        cells = [f"**{ratio.median:.2f}**", f"{ratio.least:.2f}, {ratio.most:.2f}", f"{work[way.name].median:.2f}"]
        waits, planned = waiting_share(trained.steps, way.name), 1e3 * way.plan_seconds
        return [way.name, way.options, *cells, simulated, f"{waits:.0%}", f"{planned:.0f}"]

    heads = "way | best options | step over Lengthwise's | least, most | without the step's end | simulated"
    yield from markdown(f"{heads} | waits for messages | plan, ms", map(row, trained.ways))
    yield ""
    yield f"Losses of all ways agree to {worst_difference(trained.steps):.0e}."


def waiting_share(steps: Sequence[TimedStep], way: str) -> float:
    """Return the share of all ranks' step time in which they waited for ring messages."""
    timed = [step for step in steps if step.way == way and step.repeat]
    return sum(sum(step.waited) for step in timed) / sum(step.seconds * len(step.waited) for step in timed)


if __name__ == "__main__":
    main()
