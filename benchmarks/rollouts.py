"""What a step of GRPO takes beside plain TRL, where few completions are long: padded against planned.

    python benchmarks/rollouts.py [--of both] [--completions 32] [--longest 512] [--steps 5] [--layers 4] [--hidden 128]

One process and one thread, fp32. Completions are drawn: one in sixteen has `longest` tokens, the others a sixteenth of
that in the median. So a step is what TRL makes of them: old and reference log-probabilities, loss and update. Both
kinds train the same completions. Plain TRL takes `--at-once` of them in a forward pass, padded to the longest of the
step; the plan takes as many tokens as one of `longest` has.

Seconds are processor seconds of the process from a step's start to its end, means without the first step: other work on
the machine moves them little. Memory is the most that the process held, less what it held before it trained.

`--of prompts` measures what prompts that rows share save: steps of two sessions in turn, one with
`share_prefixes="off"`, on the same rows with the session's own loss. Seconds are medians without the first step; tokens
and the prediction are of the last one.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import resource
import statistics
import tempfile
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
import trl
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers

from lengthwise import Session
from lengthwise.integrations.trl import GRPOTrainer
from lengthwise.planner.prefixes import saved_ratio
from pages import Findings, markdown, parse_options

VOCAB, GROUP = 512, 8
PLAIN, PLANNED = "plain TRL", "planned"
CASES: dict[str, dict[str, Any]] = {
    "on-policy (`dapo`)": {},
    "off-policy with KL (`num_iterations=2`, `beta=0.05`)": {"num_iterations": 2, "beta": 0.05},
    "ratios of sequences (GSPO)": {"importance_sampling_level": "sequence", "loss_type": "grpo"},
}


@dataclass(frozen=True)
class Shared:
    """Rows of a step that share prompts. answer: its mean tokens. window: of attention in all layers."""

    groups: int
    rows: int
    prompt: int
    answer: int
    window: int | None = None


SHARED_TOKENS = 2048  # that a rank holds
SHARED = {
    "8 completions of a prompt, a quarter of their tokens": Shared(2, 8, 64, 192),
    "the same, windows of 128 tokens": Shared(2, 8, 64, 192, 128),
    "8 completions of a prompt, most of their tokens": Shared(2, 8, 448, 64),
    "pairs, as of DPO": Shared(8, 2, 256, 128),
}


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What is trained. at_once: completions in a forward pass of plain TRL."""

    completions: int
    longest: int
    steps: int
    layers: int
    hidden: int
    at_once: int


@dataclass(frozen=True, kw_only=True)
class Found:
    """What a kind takes. seconds: a step. memory: bytes. loss: of the last step."""

    seconds: float
    memory: int
    loss: float


class Clock(transformers.TrainerCallback):
    """Processor seconds of each step, and the last loss."""

    def __init__(self) -> None:
        self.seconds, self.loss = list[float](), float("nan")

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """Start the clock."""
        self._start = time.process_time()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Stop it."""
        self.seconds.append(time.process_time() - self._start)

    def on_log(self, *_: Any, logs: dict[str, float] | None = None, **__: Any) -> None:
        """Keep a loss."""
        self.loss = (logs or {}).get("loss", self.loss)


def lengths(count: int, longest: int, draw: random.Random) -> list[int]:
    """Return lengths of completions: one of sixteen is the longest, the others have a median of a sixteenth of it."""
    return [
        longest if number % 16 == 5 else min(longest, max(2, int(longest / 16 * draw.lognormvariate(0, 0.8))))
        for number in range(count)
    ]


def rollouts(texts: list[str], trainer: Any, *, longest: int) -> dict[str, Any]:
    """Return completions that depend on the step alone."""
    draw = random.Random(trainer.state.global_step)
    ids = [[draw.randrange(4, VOCAB) for _ in range(n)] for n in lengths(len(texts), longest, draw)]
    prompts = [trainer.processing_class(text)["input_ids"] for text in texts]
    return {"prompt_ids": prompts, "completion_ids": ids, "logprobs": None}


def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Return numbers that differ within a group."""
    return [(len(ids) * 7 + number) % 11 / 11 for number, ids in enumerate(completion_ids)]


def tokenizer() -> transformers.PreTrainedTokenizerFast:
    """Return one whose words are numbers."""
    words = {"<pad>": 0, "<eos>": 1} | {str(number): number for number in range(2, VOCAB)}
    tokens = Tokenizer(models.WordLevel(vocab=words, unk_token="<eos>"))
    tokens.pre_tokenizer = pre_tokenizers.Whitespace()  # pyright: ignore[reportAttributeAccessIssue]
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokens, pad_token="<pad>", eos_token="<eos>")


def trained(kind: str, sizes: Sizes, changes: dict[str, Any], folder: Path) -> Found:
    """Train, and return what a step takes."""
    clock, at_once = Clock(), sizes.at_once
    arguments = trl.GRPOConfig(
        str(folder / "out"), per_device_train_batch_size=at_once, num_generations=GROUP, max_steps=sizes.steps,
        gradient_accumulation_steps=sizes.completions // at_once, max_completion_length=sizes.longest,
        learning_rate=1e-3, logging_steps=1, report_to="none", disable_tqdm=True, save_strategy="no", use_cpu=True,
        bf16=False, seed=1, log_level="error", gradient_checkpointing=False, **changes,
    )  # fmt: skip
    made: Any = trl.GRPOTrainer if kind == PLAIN else GRPOTrainer
    options: dict[str, Any] = {} if kind == PLAIN else {"capacity_tokens": sizes.longest + GROUP}
    prompts = [{"prompt": " ".join(str(2 + (n + k) % 500) for k in range(8))} for n in range(64)]
    trainer = made(
        model=transformers.AutoModelForCausalLM.from_pretrained(folder / "model"), reward_funcs=[reward],
        args=arguments, train_dataset=Dataset.from_list(prompts), processing_class=tokenizer(), callbacks=[clock],
        rollout_func=partial(rollouts, longest=sizes.longest), **options,
    )  # fmt: skip
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    trainer.train()
    memory = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    return Found(seconds=statistics.fmean(clock.seconds[1:]), memory=memory, loss=clock.loss)


def alone(kind: str, sizes: Sizes, changes: dict[str, Any], folder: Path) -> Found:
    """Train in a process of its own."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("fork")) as pool:
        return pool.submit(trained, kind, sizes, changes, folder).result(timeout=600)


def rows(sizes: Sizes, folder: Path) -> Iterator[tuple[object, ...]]:
    """Yield the rows of the table as they are found."""
    for name, changes in CASES.items():
        plain, planned = (alone(kind, sizes, changes, folder) for kind in (PLAIN, PLANNED))
        apart = abs(planned.loss - plain.loss)
        assert apart < 1e-4, f"{name}: losses {planned.loss} and {plain.loss}: not the same training"
        seconds = (f"{each.seconds:.2f}" for each in (plain, planned))
        memory = (f"{each.memory / 1e6:.0f}" for each in (plain, planned))
        yield name, *seconds, f"{plain.seconds / planned.seconds:.1f}", *memory


def grouped_rows(shared: Shared, draw: random.Random) -> list[dict[str, torch.Tensor]]:
    """Return rows whose answers have from half to one and a half times the mean tokens."""
    made = list[dict[str, torch.Tensor]]()
    for _ in range(shared.groups):
        asked = [draw.randrange(4, VOCAB) for _ in range(shared.prompt)]
        for _ in range(shared.rows):
            said = [draw.randrange(4, VOCAB) for _ in range(int(shared.answer * draw.uniform(0.5, 1.5)))]
            labels = torch.tensor([-100] * len(asked) + said)
            made.append({"input_ids": torch.tensor(asked + said), "labels": labels})
    return made


def opened(shared: Shared, sizes: Sizes, **options: Any) -> tuple[Session, torch.optim.Optimizer]:
    """Return a session and its optimizer."""
    config = transformers.MistralConfig(
        vocab_size=VOCAB, hidden_size=sizes.hidden, intermediate_size=2 * sizes.hidden, num_attention_heads=4,
        num_key_value_heads=4, num_hidden_layers=sizes.layers, sliding_window=shared.window,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
    return Session(model, optimizer, capacity_tokens=SHARED_TOKENS, **options), optimizer


def shared_rows(sizes: Sizes) -> Iterator[tuple[object, ...]]:
    """Yield the rows of the table of shared prompts as they are found."""
    for name, shared in SHARED.items():
        ways = {way: opened(shared, sizes, share_prefixes=way) for way in ("off", "auto")}
        seconds, results, tokens = {way: list[float]() for way in ways}, dict[str, Any](), 0
        for step in range(sizes.steps + 1):
            rows = grouped_rows(shared, random.Random(step))
            tokens = sum(len(row["input_ids"]) for row in rows)
            for way in sorted(ways, reverse=step % 2 == 0):
                session, optimizer = ways[way]
                start = time.process_time()
                results[way] = session.backward(rows)
                optimizer.step()
                optimizer.zero_grad()
                seconds[way].append(time.process_time() - start)
        for session, _ in ways.values():
            session.close()
        apart = abs(results["off"].loss - results["auto"].loss)
        assert apart < 1e-4, f"{name}: losses apart by {apart}: not the same training"
        plan = results["auto"].plan
        assert plan.parents, f"{name}: the plan shares no prompt"
        off, auto = (statistics.median(seconds[way][1:]) for way in ("off", "auto"))
        predicted = saved_ratio(plan)
        computed = f"{tokens:,}", f"{sum(plan.tokens):,}"
        yield name, *computed, f"{off:.2f}", f"{auto:.2f}", f"{1 - auto / off:.0%}", f"{predicted:.0%}"


def main() -> None:
    """Measure what was asked for."""
    asked = parse_options(
        __doc__, of=["both", "padding", "prompts"], completions=(32, "a step"), longest=512, steps=5, layers=4,
        hidden=128, at_once=(8, "completions of plain TRL in a forward pass"),
    )  # fmt: skip
    names = Sizes.__annotations__
    sizes = Sizes(**{name: getattr(asked, name) for name in names})
    warnings.filterwarnings("ignore")
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)
    if asked.of != "prompts":
        report_padding(sizes, asked.out)
    if asked.of != "padding":
        findings = Findings("rollouts-prompts")
        heads = "rows of a step | tokens | computed | whole rows, s | prompts once, s | saved | predicted"
        findings.add(markdown(heads, shared_rows(sizes)))
        about = f"torch {torch.__version__}, medians of {sizes.steps} steps of both kinds in turn"
        findings.sign("Measured", f"{about}, load {os.getloadavg()[0]:.1f} at the end", asked.out)


def report_padding(sizes: Sizes, page: Path | None) -> None:
    """Train each case padded and planned, and write the table."""
    findings = Findings("rollouts")
    made = lengths(sizes.completions, sizes.longest, random.Random(0))
    padded = len(made) * max(made)
    findings.add([f"{len(made)} completions a step of {sum(made):,} tokens, {padded:,} with padding.", ""])
    with tempfile.TemporaryDirectory() as folder:
        config = transformers.LlamaConfig(
            vocab_size=VOCAB, hidden_size=sizes.hidden, intermediate_size=2 * sizes.hidden, num_attention_heads=4,
            num_hidden_layers=sizes.layers, pad_token_id=0, eos_token_id=1,
        )  # fmt: skip
        torch.manual_seed(0)
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(Path(folder) / "model")
        heads = "step | plain TRL, s | planned, s | times as fast | plain TRL, MB | planned, MB"
        findings.add(markdown(heads, rows(sizes, Path(folder))))
    about = f"torch {torch.__version__}, trl {trl.__version__}, means of {sizes.steps - 1} steps"
    findings.sign("Measured", f"{about}, load {os.getloadavg()[0]:.1f} at the end", page)


if __name__ == "__main__":
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    main()
