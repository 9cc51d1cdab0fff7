"""`lengthwise demo`: the whole path on the source of Python's own standard library, in minutes on two cores.

Every number is measured here or marked "model".
"""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro
from rich.console import Console

from lengthwise.cli.machine import machine_lines
from lengthwise.core.names import counted
from lengthwise.report.figures import count, percent, seconds
from lengthwise.report.histogram import length_histogram, summarize_lengths

if TYPE_CHECKING:
    from lengthwise.data import Dataset
    from lengthwise.run.callbacks import TrainResult
    from lengthwise.run.verify_batch import VerifyBatch
    from lengthwise.simulator import Stretch

KEY = "# whole sequences, = parts of sequences that GPUs share, . waiting"
Show = Callable[..., None]
Rows = Sequence[dict[str, Any]]
_MODEL, _GPUS, _STEP_TOKENS, _LONGEST = "qwen3-8b", 8, 1 << 20, 128 * 1024
_RANKS, _STEPS, _CAPACITY, _LEAST_TOKENS, _MOST_TOKENS = 4, 20, 2048, 12_000, 16_000
_CHECK_TOKENS = 8_192
_COMPARED = 10  # steps that are also trained with a static mesh
_RUN_FILE = """\
# The run file of `lengthwise demo`; train it again with: lengthwise train {name} --ranks {ranks} --overwrite
model: tiny
data: [{{python_stdlib: true, max_tokens: 8192, too_long: skip}}]
seed: {seed}
steps: {steps}
global_batch: {{tokens: {tokens}}}
capacity_tokens: {capacity}
device: cpu
optimizer: {{lr: 1.0e-3}}
output: run
"""
_NEXT = """
[bold]Next[/bold]
lengthwise verify {run_file} --ranks 4
lengthwise plan --config {run_file} --ranks 4 --out plan.json
lengthwise simulate --model Qwen/Qwen3-8B --lengths github --gpus 8
lengthwise data {run_file}
lengthwise train --help   (your own JSON lines: data: \\[{{path: train.jsonl}}])"""


@dataclass(frozen=True, kw_only=True)
class Demo:
    """Plan and train on the Python standard library's own source files, on 4 CPU processes, in a few minutes."""

    output: Annotated[Path | None, tyro.conf.arg(metavar="FOLDER", help_behavior_hint="")] = None
    """The folder to write; default: a fresh one, runs/demo-DATE-TIME."""

    def run(self) -> int:
        begin = time.perf_counter()
        folder = fresh_folder(self.output)
        show = Console(highlight=False, soft_wrap=True).print
        show("\n".join(machine_lines()))
        dataset = _standard_library()
        _show_data(dataset, show)
        _show_plans(dataset, show)
        run_file = write_run_file(folder)
        result = _train(run_file)
        if result.stopped_by is not None:
            return 128 + result.stopped_by if result.stopped_by == signal.SIGINT else 0
        _compare(run_file, result.folder, show)
        passed = _check(run_file, show)
        opened = _open(folder / "run" / "model", result, show)
        files = "demo.yaml, static/, and in run/ metrics.jsonl, ledger.jsonl, plans/, model/"
        show(f"\n[bold]Files[/bold]\n{folder}: {files}")
        show(f"demo took {seconds(time.perf_counter() - begin)}")
        show(_NEXT.format(run_file=run_file))
        return 0 if passed and opened else 1


def fresh_folder(output: Path | None) -> Path:
    """Make the folder of this run; OutputError if the given one exists, or none can be made."""
    from lengthwise.core.errors import OutputError

    stem = output or Path("runs") / time.strftime("demo-%Y%m%d-%H%M%S")
    candidates = [stem] if output else [stem, *(stem.with_name(f"{stem.name}-{i}") for i in range(2, 100))]
    for folder in candidates:
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError as error:
            got, remedy = str(error), "Run the demo in another folder, or give --output."
            raise OutputError(str(folder), expected="a folder to write", got=got, remedy=remedy) from None
        return folder
    remedy = "Give another --output."
    raise OutputError(str(stem), expected="a folder that does not exist", got="one that does", remedy=remedy)


def write_run_file(folder: Path) -> Path:
    """Write the demo's run file, with the first seed whose steps all hold 12K to 16K tokens, to compare them."""
    from lengthwise.config import load_config
    from lengthwise.data import Batches, ByteTokenizer, load_dataset

    path = folder / "demo.yaml"
    settings = {"name": path, "ranks": _RANKS, "steps": _STEPS, "tokens": _MOST_TOKENS, "capacity": _CAPACITY}
    path.write_text(_RUN_FILE.format(seed=0, **settings), encoding="utf-8")
    config = load_config(path)
    dataset = load_dataset(config.data, tokenizer=ByteTokenizer, vocab_size=256)
    for seed in range(10_000):
        tried = config.model_copy(update={"seed": seed})
        if all(dataset.lengths[batch.ids].sum() >= _LEAST_TOKENS for batch in Batches(dataset, tried)):
            path.write_text(_RUN_FILE.format(seed=seed, **settings), encoding="utf-8")
            return path
    return path


def _standard_library() -> Dataset:
    from lengthwise.config import DataSource
    from lengthwise.data import ByteTokenizer, load_dataset

    return load_dataset([DataSource(python_stdlib=True)], tokenizer=ByteTokenizer, vocab_size=256)


def _show_data(dataset: Dataset, show: Show) -> None:
    lengths = [int(length) for length in dataset.lengths[dataset.ids]]
    summary = summarize_lengths(lengths)
    empty = dataset.skipped.get("empty", 0)
    show(
        f"\n[bold]Data: the source files of the Python standard library, one byte one token[/bold]\n"
        f"{summary.num_sequences} documents ({empty} empty ones left out), {count(summary.num_tokens)} tokens, "
        f"median {summary.median_tokens}, longest {summary.longest_tokens} "
        f"({dataset.name(int(dataset.ids[summary.longest_index]))})\n"
        f"the longest 1 % of documents hold {percent(summary.top_token_share)} of the tokens and "
        f"{percent(summary.top_attention_share)} of the attention work"
    )
    show("\n".join(length_histogram(lengths)), markup=False)


def _show_plans(dataset: Dataset, show: Show) -> None:
    show("\n[bold]One step of an 8B model on 8 H100s (simulated, not measured)[/bold]")
    for line in simulated_lines([int(each) for each in dataset.lengths[dataset.ids]]):
        show(line, markup=False)


def _train(run_file: Path) -> TrainResult:
    from lengthwise.cli.train import PrintedProgress
    from lengthwise.core.files import read_plan_text
    from lengthwise.core.plan import Plan
    from lengthwise.report.plans import degrees
    from lengthwise.report.progress import LiveLine
    from lengthwise.run.api import train

    print("\nTraining, for real", flush=True)
    result = train(run_file, ranks=_RANKS, timeout_seconds=100, callbacks=[PrintedProgress(LiveLine(sys.stdout))])
    plans = (Plan.from_json(read_plan_text(path)) for path in (result.folder / "plans").iterdir())
    occurred = sorted({degree for plan in plans for degree in degrees(plan)})
    print(f"ranks that shared a sequence, by the plans: {', '.join(map(str, occurred))}")
    return result


def _compare(run_file: Path, ours: Path, show: Show) -> None:
    show(f"\n[bold]The first {_COMPARED} of these steps again, with a static mesh[/bold]")
    static = train_static(run_file, _COMPARED, ranks=_RANKS)
    show(comparison_line(read_metrics(ours), read_metrics(static)), markup=False)


def _check(run_file: Path, show: Show) -> bool:
    from lengthwise.cli.verify import verification_lines
    from lengthwise.run.api import verify

    def announce(check: VerifyBatch) -> None:
        tokens = count(sum(check.plan.tokens))
        show(f"\n[bold]Check: {tokens} tokens on {_RANKS} processes against one process, in fp64[/bold]")

    half_a_step = ["precision=fp64", f"global_batch.tokens={_CHECK_TOKENS}"]
    found = verify(run_file, ranks=_RANKS, overrides=half_a_step, full=True, timeout_seconds=100, on_start=announce)
    assert found is not None, "the demo's rank 0 returns what it found"
    show("\n".join(verification_lines(found)), markup=False)
    return found.passed


def _open(model: Path, result: TrainResult, show: Show) -> bool:
    from transformers import AutoModelForCausalLM

    show("\n[bold]The saved model[/bold]")
    opened = AutoModelForCausalLM.from_pretrained(model, trust_remote_code=False)
    parameters = sum(parameter.numel() for parameter in opened.parameters())
    same = parameters == result.parameters
    found = f"{type(opened).__name__}, {count(parameters)} parameters"
    show(f"from_pretrained opens {model}: {found}: {'PASS' if same else 'FAIL'}")
    return same


def train_static(run_file: Path, steps: int, *, ranks: int) -> Path:
    """Train the first steps with planner `static`; return the folder. KeyboardInterrupt: a signal ended it."""
    from lengthwise.run.api import train

    overrides = ["planner=static", "output=static", f"steps={steps}"]
    result = train(run_file, ranks=ranks, overrides=overrides, timeout_seconds=100)
    if result.stopped_by is not None:
        raise KeyboardInterrupt
    return result.folder


def read_metrics(folder: Path) -> Rows:
    """Return the metrics of each step of a run."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def comparison_line(ours: Rows, static: Rows) -> str:
    """Return the difference of the losses of the steps that both ran, in words: a plan changes no result."""
    pairs = list(zip(ours, static, strict=False))
    apart = max(abs(a["loss"] - b["loss"]) / abs(b["loss"]) for a, b in pairs)
    return f"losses of {counted(len(pairs), 'step')} agree to {apart:.0e}: plans change the time, not the result"


def simulated_lines(lengths: Sequence[int]) -> Iterator[str]:
    """Simulate one step of an 8B model on 8 H100s from these lengths, as `lengthwise simulate` does; yield its GPUs."""
    from lengthwise.cost import named_hardware, named_shape
    from lengthwise.report.simulation import answer_notes, answer_sentence, answer_table
    from lengthwise.setup import lengths_of_a_batch
    from lengthwise.simulator import Scenario, compare, stretches

    step = lengths_of_a_batch([length for length in lengths if length <= _LONGEST], _STEP_TOKENS)
    found = compare([step], Scenario(shape=named_shape(_MODEL), hardware=named_hardware("h100"), devices=_GPUS))
    yield f"{_MODEL}, {len(step)} files"
    yield answer_sentence(found)
    yield answer_table(found)
    yield from answer_notes(found)
    shown = {row.planner: row.found for row in (found.best_other, found.ours) if row and row.found}
    most = max(each.step_seconds[0] for each in shown.values())
    for name, each in shown.items():
        yield f"{name}: {seconds(each.step_seconds[0])}"
        work = [stretches(each.first_plan, each.first, gpu) for gpu in range(_GPUS)]
        yield from gpu_lines(work, step_seconds=each.step_seconds[0], most_seconds=most)
    yield KEY


def gpu_lines(
    work: Sequence[Sequence[Stretch]], *, step_seconds: float, most_seconds: float, width: int = 60
) -> list[str]:
    """Return one line per GPU, `width` characters for `most_seconds`; a character shows the middle of its time.

    work: stretches of each GPU.
    """
    import numpy as np

    middles = (np.arange(width) + 0.5) * most_seconds / width
    lines = []
    for gpu, stretches in enumerate(work):
        drawn = np.where(middles < step_seconds, ".", " ")
        for start, end, kind in stretches:
            drawn[(middles >= start) & (middles < end)] = "=" if kind == "ring" else "#"
        lines.append(f"GPU {gpu:>{len(str(len(work) - 1))}} |{''.join(drawn.tolist()).rstrip()}|")
    return lines
