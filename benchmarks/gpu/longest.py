"""The longest document that one rank trains, by recomputation and loss, beside what a run and a formula predict.

A GPU is held to a budget of memory, so that the documents stay short enough to be tried; on the CPU the tensors of a
microbatch are counted against it. What fits is searched around the prediction, a few runs each.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from gpu.loops import OurLoop
from gpu.peaks import PredictedBytes, held_bytes, peak_beside
from gpu.records import Records
from gpu.sizes import Sizes
from lengthwise.core.errors import MemoryShortage
from lengthwise.core.held import largest
from lengthwise.core.plan import RECOMPUTE_KINDS, Microbatch, Piece, Plan
from lengthwise.cost import LOGITS_AT_ONCE
from lengthwise.engine.batch import random_batch
from lengthwise.engine.step import run_plan

LOSSES = {"chunked": LOGITS_AT_ONCE, "whole": None}
_AROUND = 1.25  # times the prediction, and one over that: where it is searched


def longest(sizes: Sizes, records: Records) -> None:
    """Write a row `longest` for each kind of recomputation and loss."""
    device = sizes.where
    loop = OurLoop(sizes.longest_model, device, sizes.dtype)
    warm = _attempt(sizes, loop, "none", LOGITS_AT_ONCE)
    warm(min(128, sizes.longest_most_tokens))
    loop.optimizer.update(0.0, 1.0)  # moments are there from here on
    budget = sizes.longest_budget_bytes - held_bytes(device)
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(min(1.0, sizes.longest_budget_bytes / total))
    for recompute in RECOMPUTE_KINDS:
        for loss, logits_at_once in LOSSES.items():
            most = sizes.longest_most_tokens
            predicted = PredictedBytes(loop, recompute=recompute, logits_at_once=logits_at_once, most_tokens=most)
            guess = _most(predicted.at_start, budget, most)
            fits = _attempt(sizes, loop, recompute, logits_at_once)
            found, runs = search(fits, guess, most, runs=sizes.longest_runs)
            records.add(
                "longest",
                recompute=recompute,
                loss=loss,
                longest_tokens=found,
                runs=runs,
                start_tokens=guess,
                start_error=guess / found - 1 if found else None,
                formula_tokens=_most(predicted.by_formula, budget, most),
                budget_bytes=budget,
            )


def search(fits: Callable[[int], bool], guess: int, most: int, *, runs: int) -> tuple[int, int]:
    """Return the most tokens that were seen to fit, near a guess, and how many runs that took."""
    low, high, done = 0, most + 1, 0
    tokens = max(1, min(guess, most))
    while done < runs and high - low > 1:
        done += 1
        if fits(tokens):
            low = tokens
        else:
            high = tokens
        if low == 0:
            tokens = max(1, int(high / _AROUND))
        elif high > most:
            tokens = min(most, int(low * _AROUND) + 1)
            if tokens == low:
                break
        else:
            tokens = (low + high) // 2
    return low, done


def _most(bytes_of: Callable[[int], int], budget: int, most: int) -> int:
    return largest(lambda tokens: bytes_of(tokens) <= budget, most)


def _attempt(sizes: Sizes, loop: OurLoop, recompute: str, logits_at_once: int | None) -> Callable[[int], bool]:
    """Return what runs one document forward and backward, and says whether it fitted."""
    config: Any = loop.model.config

    def fits(tokens: int) -> bool:
        microbatch = Microbatch(pieces=(Piece(ranks=(0,), sequences=(0,)),), recompute=recompute)
        layers = config.num_hidden_layers
        plan = Plan(ranks=1, layers=layers, capacity=tokens, tokens=(tokens,), microbatches=(microbatch,))
        batch = random_batch((tokens,), vocab=config.vocab_size)

        def run() -> None:
            run_plan(
                loop.model,
                plan,
                batch,
                loop.transport,
                loop.kernel,
                name="longest",
                logits_at_once=logits_at_once,
            )

        try:
            held = peak_beside(loop, run)
        except MemoryShortage:
            return False
        finally:
            loop.parameters.clear_gradients()
            if loop.device.type == "cuda":
                torch.cuda.empty_cache()
        return loop.device.type == "cuda" or held <= sizes.longest_budget_bytes

    return fits
