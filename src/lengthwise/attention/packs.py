"""Documents side by side in one attention call: what makes packs of short sequences fast on GPUs.

All diagonal blocks of a rank, of packed documents and of ring shards, are documents that see only themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from lengthwise.attention.kernels import Block, BlockKernel, Gradients, Saved
from lengthwise.program import BlockTask


@dataclass(frozen=True, slots=True, kw_only=True)
class Pack:
    """Documents that each attend to themselves, causally.

    cu_seqlens: (documents + 1,) int32 on the device: where each starts, and the end of the last.
    max_seqlen: tokens of the longest.
    window: a query sees itself and the window - 1 tokens before it; None: all before it.
    padding: rows of the last document, whose result nobody reads; 0: none.
    """

    cu_seqlens: Tensor
    max_seqlen: int
    window: int | None
    padding: int = 0


@runtime_checkable
class PackKernel(BlockKernel, Protocol):
    """A block kernel that also takes many documents at once: their tokens side by side in one `Block`."""

    def forward_pack(self, block: Block, pack: Pack) -> tuple[Tensor, Tensor]:
        """Return (out in q's dtype, lse in at least fp32)."""
        ...

    def backward_pack(self, grad_out: Tensor, block: Block, saved: Saved, pack: Pack) -> Gradients:
        """Return the documents' share of (dq, dk, dv)."""
        ...


def pack_of(tasks: Sequence[BlockTask], *, window: int | None, device: torch.device, padding: int = 0) -> Pack | None:
    """Join the diagonal blocks of a rank to documents; None when it holds no token.

    A window's tiles are joined: the kernel cuts the window. `padding`: rows after them, a document of their own.
    """
    diagonal = sorted((task for task in tasks if task.causal), key=lambda task: task.q_start)
    if not diagonal and not padding:
        return None
    borders, stop = [], 0
    for task in diagonal:
        assert task.q_start == stop, f"diagonal blocks must lie side by side, got {task.q_start} after {stop}"
        if task.distance == 0:
            borders.append(task.q_start)
        stop = task.q_stop
    borders += [stop, stop + padding] if padding else [stop]
    return Pack(
        cu_seqlens=to_device(torch.tensor(borders, dtype=torch.int32), device),
        max_seqlen=max(stop - start for start, stop in pairwise(borders)),
        window=window,
        padding=padding,
    )


def to_device(host: Tensor, device: torch.device) -> Tensor:
    """Copy a host tensor to `device`, to a GPU through pinned memory, so that the host does not wait for the stream."""
    if device.type == "cpu":
        return host.to(device)
    return host.pin_memory().to(device, non_blocking=True)
