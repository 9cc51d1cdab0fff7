"""`lengthwise init`: write a first run file, with the reasons for its settings in comments."""

from __future__ import annotations

import json
import os
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from lengthwise.cli.options import named_alike
from lengthwise.cli.sources import KnownLengths, drawn_batch, lengths_of_data, refuse_data
from lengthwise.core.errors import Collector, ConfigError, DataError, LengthwiseError, Problems
from lengthwise.core.names import NO_TEMPLATE, counted
from lengthwise.core.sizes import read_whole
from lengthwise.report.figures import count

if TYPE_CHECKING:
    from lengthwise.core.shape import ModelShape
    from lengthwise.cost.hardware import Hardware
    from lengthwise.setup.first_settings import FirstSettings

_MOST_GPUS = 12_288
_BATCH_TOKENS, _WIDTH = 1 << 19, 118  # tokens of an optimizer step; columns of a line
_LEAST_STEPS, _LEAST_ROWS = 50, 8  # least steps of an epoch, and least rows of a step, for small data


@dataclass(frozen=True, kw_only=True)
class Init:
    """Write a first run file with settings that fit, and the reasons, from the memory model and the lengths of your
    data."""

    model: Annotated[str, tyro.conf.arg(metavar="NAME|FOLDER")]
    """A Hugging Face folder, or a hub name whose sizes are known here: Qwen/Qwen3-8B, meta-llama/Llama-3.1-8B, ..."""
    data: Annotated[tuple[Path, ...], tyro.conf.arg(metavar="FILE|FOLDER ...", help_behavior_hint="")]
    """Your rows: messages, text, prompt and completion, or input_ids."""
    gpus: Annotated[int, tyro.conf.arg(metavar="N")] = 1
    """The number of GPUs on all machines together."""
    hardware: Annotated[str, tyro.conf.arg(metavar="NAME")] = "h100"
    """The kind of GPU: h100, h200, a100, cpu, or a JSON file, as for `simulate`."""
    out: Annotated[Path, tyro.conf.arg(metavar="RUN.yaml")] = Path("run.yaml")
    """The run file to write."""
    force: tyro.conf.FlagCreatePairsOff[bool] = False
    """Replace --out if it exists."""

    def run(self) -> int:
        from lengthwise.cost.hardware import named_hardware
        from lengthwise.cost.shapes import check_trained, named_shape
        from lengthwise.setup.first_settings import first_settings
        from lengthwise.simulator.layouts import usual_lengths

        problems = Collector()
        problems.attempt(lambda: read_whole("gpus", self.gpus, most=_MOST_GPUS))
        problems.attempt(lambda: check_trained(self.model))
        shape = problems.attempt(lambda: named_shape(self.model))
        hardware = problems.attempt(lambda: named_hardware(self.hardware))
        problems.attempt(lambda: refuse_data(self.data, "error"))
        if self.out.exists() and not self.force:
            remedy = "Give --force to replace it, or another --out."
            problems.add(ConfigError("--out", expected="a new file", got=f"{self.out}, which exists", remedy=remedy))
        problems.raise_all()
        assert shape is not None, "it has no problem"
        assert hardware is not None, "it has no problem"
        known, unknown = self._lengths()
        longest = max(known.lengths) if known else 1
        batch = _batch_tokens(known)
        lengths = drawn_batch(known.lengths, batch, 0) if known else usual_lengths(self.gpus)
        chosen = first_settings(shape, hardware, self.gpus, longest, batch_tokens=batch, lengths=lengths)
        self.out.write_text(self._text(shape, hardware, known, unknown, chosen), encoding="utf-8")
        what = "adapters (LoRA)" if chosen.adapters else "the whole model"
        print(f"{self.out}: {what} on {self.gpus} x {hardware.name}")
        print(f"read it, then: lengthwise data {self.out}, lengthwise verify {self.out}, lengthwise train {self.out}")
        return 0

    def names(self) -> Mapping[str, str]:
        return named_alike("gpus model hardware")

    def _lengths(self) -> tuple[KnownLengths | None, str]:
        """Return (lengths of the rows, in the model's tokens or else in bytes, or None; the reason)."""
        reasons = []
        for tokenizer in (self.model, "bytes"):
            try:
                return lengths_of_data(self.data, tokenizer, "skip"), ""
            except LengthwiseError as error:
                for each in error.problems if isinstance(error, Problems) else (error,):
                    if isinstance(each, DataError) and not (tokenizer == "bytes" and NO_TEMPLATE in each.got):
                        raise each from None
                reasons.append(" ".join(str(error).split()))
        return None, reasons[0]

    def _text(
        self, shape: ModelShape, hardware: Hardware, known: KnownLengths | None, unknown: str, chosen: FirstSettings
    ) -> str:
        here = self.out.absolute().parent
        sources = ", ".join(f"{{path: {json.dumps(os.path.relpath(path.absolute(), here))}}}" for path in self.data)
        longest, _, rows = _of(known)
        state, device = _gigabytes(chosen.state_bytes), _gigabytes(hardware.device_bytes)
        capacities = ", ".join(f"{tokens:,} ({kind})" for kind, tokens in chosen.capacities.items())
        precision = "bf16" if hardware.compute_dtype_bytes == 2 else "fp32"
        kind = "adapters" if chosen.adapters else "models of this size"
        fewest = -(-longest // max(chosen.capacities.values()))
        cut = f"the longest over at least {fewest}" if fewest > 1 else "here one holds the longest"
        lines = [
            "# Written by lengthwise init: a start, not a result. Every key is in docs/run-file.md.",
            f"model: {json.dumps(self.model)}  # {count(shape.total_params).replace('G', 'B')} parameters",
            f"data: [{sources}]  # {rows}",
            *([] if known else textwrap.wrap(f"# Not counted: {unknown}", _WIDTH, subsequent_indent="#   ")),
            f"output: {json.dumps('runs/' + self.out.stem)}",
            "",
            "epochs: 1  # or steps",
            _global_batch(known),
            f"# precision: auto  # {precision} on {hardware.name}; masters, sums and merges are fp32",
            "# capacity_tokens: auto  # of one rank in one microbatch, measured at the start. Estimates, by recompute:",
            f"#   {capacities},",
            f"#   beside {state} of weights, gradients and optimizer states (a device has {device}).",
            f"#   Longer rows are cut over several ranks: {cut if known else 'the longest row is not known'}.",
            "# recompute: auto  # activation checkpointing where it saves time, chosen for each step",
        ]
        if chosen.shard != "zero1":
            lines += [
                f"# shard: auto  # by estimate {chosen.shard}: a rank holds its part of weights, gradients and states,",
                "#   and gathers each layer when it runs; docs/sharding.md",
            ]
        if chosen.adapters:
            lines += [
                f"# The whole model takes {_gigabytes(chosen.whole_bytes)} of a GPU's {device}; adapters: {state}.",
                "lora: {r: 16, lora_alpha: 32}  # pip install 'peft>=0.21'",
            ]
        if chosen.quantization is not None:
            lines.append(f"quantization: {chosen.quantization}  # the frozen base; pip install 'lengthwise[qlora]'")
        lines += [
            "optimizer:",
            f"  lr: {chosen.learning_rate:g}  # the usual start for {kind}; also try a third and three times of it",
            "  schedule: cosine",
            "  warmup_steps: 0.03  # of all steps",
            f"  weight_decay: {0.0 if chosen.adapters else 0.1}",
            "checkpoint: {every_steps: 100, keep_last: 2}  # --resume continues from the newest",
            "# report_to: [tensorboard]  # or wandb, trackio, mlflow",
            "# eval: {data: [{path: held-out.jsonl}], every_steps: 100}",
        ]
        return "\n".join(lines) + "\n"


def _gigabytes(num_bytes: float) -> str:
    value = num_bytes / 1e9
    return f"{value:.0f} GB" if value >= 1 else f"{num_bytes / 1e6:.0f} MB"


def _global_batch(known: KnownLengths | None) -> str:
    """Return the key with its reason: 512K tokens, or a number of rows if that made few steps per epoch."""
    if known is None:
        return f"global_batch: {{tokens: {_BATCH_TOKENS}}}  # of an optimizer step"
    rows, total = len(known.lengths), sum(known.lengths)
    if total >= _LEAST_STEPS * _BATCH_TOKENS:
        steps = f"about {total // _batch_tokens(known):,} steps an epoch"
        return f"global_batch: {{tokens: {_batch_tokens(known)}}}  # of an optimizer step; {steps}"
    batch = _batch_rows(rows)
    steps = counted(-(-rows // batch), "step")
    return f"global_batch: {{sequences: {batch}}}  # rows of an optimizer step; {steps} an epoch"


def _batch_rows(rows: int) -> int:
    return max(min(rows, _LEAST_ROWS), rows // _LEAST_STEPS)


def _batch_tokens(known: KnownLengths | None) -> int:
    longest, total, _ = _of(known)
    if known is None or total >= _LEAST_STEPS * _BATCH_TOKENS:
        return max(longest, _BATCH_TOKENS)
    return max(longest, total * _batch_rows(len(known.lengths)) // len(known.lengths))


def _of(known: KnownLengths | None) -> tuple[int, int, str]:
    if known is None:
        return 1, 0, "rows that were not counted"
    longest, total = max(known.lengths), sum(known.lengths)
    return longest, total, f"{counted(len(known.lengths), 'row')}, {count(total)} {known.unit}, the longest {longest}"
