"""Bytes that work holds at its peak beside what is kept from step to step, measured and predicted.

On a GPU the allocator's; on the CPU all storages that operations make are counted until they are freed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from gpu.clock import finish
from gpu.loops import OurLoop
from lengthwise.cost import StepMemory, largest_peak, shape_from_config
from lengthwise.engine.activations import measure_microbatch
from lengthwise.engine.live_bytes import LiveBytes


def held_bytes(device: torch.device) -> int:
    """Return the bytes of all tensors on a GPU; 0 on the CPU, which does not count them."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def alloc_retries(device: torch.device) -> int:
    """Return how often the allocator had to free its cache and try again."""
    return int(torch.cuda.memory_stats(device).get("num_alloc_retries", 0)) if device.type == "cuda" else 0


def peak_beside(loop: OurLoop, run: Callable[[], object]) -> int:
    """Run something once; return the most bytes that it held beside what was there."""
    if loop.device.type == "cuda":
        finish(loop.device)
        torch.cuda.reset_peak_memory_stats(loop.device)
        before = held_bytes(loop.device)
        run()
        finish(loop.device)
        return torch.cuda.max_memory_allocated(loop.device) - before
    there = (*loop.model.parameters(), *loop.model.buffers(), *loop.parameters.tensors())
    with LiveBytes(*there) as live:
        run()
    return live.peak_bytes


class PredictedBytes:
    """Bytes of a microbatch of so many tokens, beside the state: as a run's start measures them, and by formula."""

    def __init__(self, loop: OurLoop, *, recompute: str = "none", logits_at_once: int | None, most_tokens: int) -> None:
        config: Any = loop.model.config
        self._recompute = recompute
        self._measured = measure_microbatch(
            loop.model, loop.kernel, recompute, logits_at_once=logits_at_once, most_rows=most_tokens
        )
        loop.parameters.clear_gradients()
        self._formula = StepMemory(
            shape=shape_from_config(config.to_dict()),
            dtype_bytes=next(iter(loop.model.parameters())).element_size(),
            parameters=sum(each.numel() for each in loop.model.parameters()),
            logits_at_once=logits_at_once,
        )

    def at_start(self, tokens: int) -> int:
        """Return the bytes as the start of a run says them."""
        return largest_peak([self._measured], tokens, 0.0)

    def by_formula(self, tokens: int) -> int:
        """Return the bytes as plans without a machine have them."""
        return int(self._formula.microbatch_bytes(tokens, self._recompute, 0.0))
