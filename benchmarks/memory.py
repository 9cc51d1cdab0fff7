"""The longest sequence that one rank trains within a budget of memory, with each way to save it, and what each costs.

    python benchmarks/memory.py [--budget 4e9] [--models 1M,100M] [--check-tokens 8192] [--folder /var/tmp]

One process in fp32, one sequence a step, AdamW; Llamas of 1M parameters beside 128K words and of 100M beside 32K.
Rivals: the plain Hugging Face model with its own loss, without and with its gradient checkpointing (torch's sdpa, which
on CPUs keeps no scores). Bytes are those of all tensors at the peak, counted one by one, and of parameters, gradients
and optimizer. They are counted at two lengths, grow linearly (checked at a third, where that fits the budget), and give
the length that fills the budget; at that length nothing was run. Seconds are of one forward and backward at the shorter
length, the median of three, over those of the plain model. Offload goes to a disk.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from testing import LiveBytes, make_batch, make_plan
from testing.laid import whole_parameters
from transformers import LlamaConfig

from lengthwise.attention import choose_kernel
from lengthwise.comm import Mesh, SoloTransport
from lengthwise.core.plan import Piece
from lengthwise.engine.offloading import Offloading
from lengthwise.engine.step import StepContext, run_part
from lengthwise.models import ModelSource, build_model
from lengthwise.models.adapter import ATTENTION_NAME
from lengthwise.offload import DiskStore
from lengthwise.report.figures import count
from pages import Findings, markdown, parse_options

MODELS = {
    "1M": {"hidden_size": 128, "num_hidden_layers": 4, "vocab_size": 131072},
    "100M": {"hidden_size": 768, "num_hidden_layers": 12, "vocab_size": 32000},
}
WAYS: dict[str, dict[str, Any]] = {
    "plain Hugging Face": {"plain": True, "recompute": "none"},
    "plain Hugging Face, gradient checkpointing": {"plain": True, "recompute": "layer"},
    "chunked loss": {},
    "chunked loss, offload 1": {"offload": 1.0},
    "chunked loss, `all_but_attention`": {"recompute": "all_but_attention"},
    "chunked loss, `layer`": {"recompute": "layer"},
    "chunked loss, `layer`, offload 1": {"recompute": "layer", "offload": 1.0},
}
_LENGTHS = (1024, 2048)
_MOMENT_BYTES = 8  # of AdamW, a parameter


def make_config(sizes: dict[str, int]) -> LlamaConfig:
    """Make a Llama with heads of 64, half as many for keys and values."""
    heads = sizes["hidden_size"] // 64
    more: dict[str, Any] = {
        **sizes, "num_attention_heads": heads, "num_key_value_heads": heads // 2, "max_position_embeddings": 1 << 20,
        "intermediate_size": 8 * sizes["hidden_size"] // 3, "tie_word_embeddings": True,
    }  # fmt: skip
    return LlamaConfig(**more)


class Way:
    """One way to run forward and backward of one sequence."""

    def __init__(
        self, config: LlamaConfig, folder: Path, *, plain: bool = False, recompute: str = "none", offload: float = 0.0
    ) -> None:
        source = ModelSource(name="llama", config=config, weights=False)
        self.model: Any = build_model(source, seed=0, attention="sdpa" if plain else ATTENTION_NAME)
        self.plain, self.recompute, self.offload = plain, recompute, offload
        self.store = DiskStore(folder, where="benchmark")
        self.parameters = sum(each.numel() for each in self.model.parameters())
        if plain:
            for parameter in self.model.parameters():
                parameter.grad = torch.zeros_like(parameter)
            if recompute == "layer":
                self.model.activation_checkpointing_enable()
            self.model.train()
            states = [*self.model.parameters(), *(each.grad for each in self.model.parameters())]
        else:
            flat = whole_parameters(self.model, SoloTransport(), dtype=torch.float32)
            states = [flat.values, flat.grads, flat.grad_shard, flat.master_weights]
        self.states = [each for each in states if each is not None]
        self.state_bytes = sum({each.untyped_storage().data_ptr(): each.nbytes for each in self.states}.values())
        self.state_bytes += _MOMENT_BYTES * self.parameters
        self.offloading = Offloading(self.model, choose_kernel(torch.device("cpu")), self.store)

    def run(self, tokens: int) -> None:
        """Run one sequence forward and backward."""
        batch = make_batch([tokens], vocab=self.model.config.vocab_size)
        if self.plain:
            ids = batch.whole(0)[0][None]
            self.model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
            return
        layers = self.model.config.num_hidden_layers
        plan = make_plan(1, [tokens], [Piece(ranks=(0,), sequences=(0,))], layers=layers)
        microbatch = replace(plan.microbatches[0], recompute=self.recompute, offload=self.offload)
        plan, kernel = replace(plan, microbatches=(microbatch,)), choose_kernel(torch.device("cpu"))
        context = StepContext(
            self.model, Mesh(SoloTransport(), 1), kernel, name="benchmark", offloading=self.offloading
        )
        run_part(plan, batch, context)

    def peak_bytes(self, tokens: int) -> int:
        """Return states and the most that tensors hold beside them."""
        with LiveBytes(*self.states) as live:
            self.run(tokens)
        return self.state_bytes + live.peak_bytes


def measure(
    config: LlamaConfig, folder: Path, budget: float, check_tokens: int, say: Callable[[str], None]
) -> list[tuple[str, int, float, float, float]]:
    """Return (way, longest tokens, bytes a token, error of the line at `check_tokens`, seconds over the first's)."""
    found: dict[str, tuple[int, float, float]] = {}
    seconds: dict[str, float] = {}
    for name, options in WAYS.items():
        way = Way(config, folder, **options)
        with closing(way.store):
            way.run(64)
            peaks = [way.peak_bytes(tokens) for tokens in _LENGTHS]
            a_token = (peaks[1] - peaks[0]) / (_LENGTHS[1] - _LENGTHS[0])
            longest = int(_LENGTHS[0] + (budget - peaks[0]) / a_token)
            error = 0.0
            if longest > check_tokens:
                error = (peaks[0] + a_token * (check_tokens - _LENGTHS[0])) / way.peak_bytes(check_tokens) - 1
            took = []
            for _ in range(3):
                start = time.perf_counter()
                way.run(_LENGTHS[0])
                took.append(time.perf_counter() - start)
        seconds[name] = statistics.median(took)
        found[name] = (longest, a_token, error)
        say(f"{name}: {longest} tokens, {seconds[name]:.2f} s")
    first = next(iter(seconds.values()))
    return [(name, *found[name], seconds[name] / first) for name in WAYS]


def main() -> None:
    """Print a table a model, and write them into a page if asked."""
    asked = parse_options(
        __doc__,
        budget=(4e9, "bytes of a rank"),
        models=(",".join(MODELS), "of these, separated by commas"),
        check_tokens=(8192, "where the line of bytes over tokens is checked"),
        folder=(Path("/var/tmp"), "of the offload's file, on a disk"),
    )
    torch.set_num_threads(1)
    findings = Findings("memory")
    heads = "way | longest sequence | over plain | over checkpointing | a token | error of the line | time"
    for name in asked.models.split(","):
        found = measure(make_config(MODELS[name]), asked.folder, asked.budget, asked.check_tokens, print)
        rows = (
            [
                *(way, count(longest), f"{longest / found[0][1]:.1f}x", f"{longest / found[1][1]:.1f}x"),
                *(f"{count(a_token)}B", f"{error:+.1%}", f"{ratio:.2f}"),
            ]
            for way, longest, a_token, error, ratio in found
        )
        words = f"**{name}**, {count(MODELS[name]['vocab_size'])} words, within {count(asked.budget)}B:"
        findings.add([words, "", *markdown(heads, rows), ""])
    findings.sign("Measured", "bytes, counted tensor by tensor", asked.out)


if __name__ == "__main__":
    main()
