"""The norm of a gradient that lies over all ranks, and what clipping by it multiplies with."""

from __future__ import annotations

import torch
from torch import Tensor

from lengthwise.comm import Transport
from lengthwise.engine.parameters import Parameters

_PARTS = 64  # of a rank's parameters
_LEAST_PART = 1 << 16  # entries; shorter parts cost more in launches than they save


def part_of(entries: int) -> int:
    """Return how many entries of a shard of so many are worked on at a time."""
    return max(_LEAST_PART, -(-entries // _PARTS))


def norm_bytes(gradients: Tensor) -> int:
    """Count the bytes that `gradient_norm` needs beside the gradients."""
    return 2 * 8 * min(len(gradients), part_of(len(gradients)))


def gradient_norm(gradients: Tensor, transport: Transport) -> float:
    """Return the L2 norm of the gradients of which each rank has its (entries,). Collective.

    What it needs beside them is fp64 for one part of them.
    """
    parts = gradients.split(part_of(len(gradients)))
    norms = [torch.linalg.vector_norm(part, dtype=torch.float64) for part in parts]
    squares = torch.stack(norms).square().sum().reshape(1)
    transport.all_reduce(squares)
    return squares.sqrt().item()


def reduce_gradients(parameters: Parameters, transport: Transport) -> float:
    """Sum gradients over all ranks; return their global norm. Collective."""
    return gradient_norm(parameters.reduce_gradients(), transport)


def clip_factor(limit: float, norm: float) -> float:
    """Return what `torch.nn.utils.clip_grad_norm_` multiplies gradients of this norm with."""
    return min(1.0, limit / (norm + 1e-6))
