"""How a model computes, chosen once for a run: all that runs it (training, `verify`, profiles, memory) sees the same.

The keys are those of the run file. What they change is speed and memory, never what is computed but by rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from lengthwise.attention import AttentionNeeds, BlockKernel, check_attention, choose_kernel
from lengthwise.models.families import has_windows, largest_head_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class Computing:
    """The run file's keys of the same names, with their defaults."""

    attention: str = "auto"


def check_computing(config: Any, computing: Computing, *, dtype: torch.dtype, on_gpus: bool) -> None:
    """Refuse, before any process starts, what a model of this Hugging Face config cannot compute so here.

    Raises:
        ConfigError: with what to set instead.
    """
    needs = AttentionNeeds(dtype=dtype, head_dim=largest_head_dim(config), windowed=has_windows(config))
    check_attention(computing.attention, needs, on_gpus=on_gpus)


def choose_model_kernel(
    config: Any,
    computing: Computing,
    device: torch.device,
    *,
    dtype: torch.dtype,
    say: Callable[[str], None] | None = None,
) -> BlockKernel:
    """Return the attention kernel of a model on `device`; `say` hears which, and why.

    Raises:
        ConfigError: the one that the run file names cannot be used here.
    """
    return choose_kernel(
        device,
        dtype=dtype,
        head_dim=largest_head_dim(config),
        windowed=has_windows(config),
        implementation=computing.attention,
        say=say,
    )
