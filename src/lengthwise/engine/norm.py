"""The norm of a gradient that lies over all ranks, and the factor that clips it."""

from __future__ import annotations

import torch
from torch import Tensor

from lengthwise.comm import Transport
from lengthwise.engine.parameters import Parameters

_PARTS = 64  # parts of a rank's gradients; one at a time needs fp64
_LEAST_PART = 1 << 16  # entries of a part; shorter parts cost more in launches than they save


def _part_of(entries: int) -> int:
    return max(_LEAST_PART, -(-entries // _PARTS))


def norm_bytes(gradients: Tensor) -> int:
    """Return the bytes that `gradient_norm` needs beside the gradients."""
    return 2 * 8 * min(len(gradients), _part_of(len(gradients)))


def gradient_norm(gradients: Tensor, transport: Transport) -> float:
    """Return the L2 norm of all ranks' `gradients`, (entries,) here. Collective."""
    parts = gradients.split(_part_of(len(gradients)))
    norms = [torch.linalg.vector_norm(part, dtype=torch.float64) for part in parts]
    squares = torch.stack(norms).square().sum().reshape(1)
    transport.all_reduce(squares)
    return squares.sqrt().item()


def reduce_gradients(parameters: Parameters, transport: Transport) -> float:
    """Sum gradients over all ranks; return their global norm. Collective."""
    return gradient_norm(parameters.reduce_gradients(), transport)


def clip_factor(limit: float, norm: float) -> float:
    """Return the factor by which `torch.nn.utils.clip_grad_norm_` scales gradients of this norm."""
    return min(1.0, limit / (norm + 1e-6))
