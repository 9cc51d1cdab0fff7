"""Documents side by side in few attention calls, which makes packs of short sequences fast on GPUs.

All diagonal blocks of a rank, of packed documents and of ring shards, are documents that see only themselves. A varlen
call starts as many tiles for every document as for its longest, so shorter documents have empty ones. Documents are
therefore grouped into calls by the costs of empty tiles and of calls: docs/decisions/attention-by-length.md.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, groupby, pairwise
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from lengthwise.attention.kernels import Block, BlockKernel, Gradients, Saved
from lengthwise.program import BlockTask

_TILE_TOKENS = 128
# Cost of one more call, in empty tiles of 0.27 us (both passes, 32 heads): 0.3 ms, the least time of a call of 1,024
# tokens (H200, torch 2.11). With fewer heads tiles cost less.
_TILES_OF_A_CALL = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Pack:
    """Documents of one call, side by side; each attends to itself, causally, or wholly to keys of its own.

    rows: place of the documents among the rank's rows.
    cu_seqlens: (documents + 1,) int32 on the device: starts of the documents in `rows`, and the end of the last.
    max_seqlen: tokens of the longest document.
    window: tokens that a query sees, itself included; None for all before it.
    padding: number of rows of the last document if it is padding, else 0.
    keys: (documents + 1,) int32 on the device: starts of each document's own keys, and the end of the last, or None.
    max_keys: keys of the document with the most, if they are others.
    """

    rows: slice
    cu_seqlens: Tensor
    max_seqlen: int
    window: int | None
    padding: int = 0
    keys: Tensor | None = None
    max_keys: int = 0


@runtime_checkable
class PackKernel(BlockKernel, Protocol):
    """A block kernel that also computes many documents at once: the rows of a `Pack` in one `Block`."""

    @property
    def alone_from(self) -> int | None:
        """Tokens from which a document without a cutting window is faster alone; None if empty tiles decide."""
        ...

    @property
    def full_from(self) -> int | None:
        """Queries and keys from which a block off the diagonal is faster alone; None if empty tiles decide."""
        ...

    def forward_pack(self, block: Block, pack: Pack) -> tuple[Tensor, Tensor]:
        """Return (out in q's dtype, lse in at least fp32)."""
        ...

    def backward_pack(self, grad_out: Tensor, block: Block, saved: Saved, pack: Pack) -> Gradients:
        """Return the documents' share of (dq, dk, dv)."""
        ...


def lengths_of(tasks: Sequence[BlockTask]) -> list[int]:
    """Join a rank's diagonal blocks, and tiles of a window, to documents; return their tokens in order."""
    borders, stop = [], 0
    for task in sorted((task for task in tasks if task.causal), key=lambda task: task.q_start):
        assert task.q_start == stop, f"diagonal blocks must lie side by side, got {task.q_start} after {stop}"
        if task.distance == 0:
            borders.append(task.q_start)
        stop = task.q_stop
    return [stop - start for start, stop in pairwise([*borders, stop])]


def pack_documents(
    lengths: Sequence[int], *, window: int | None, device: torch.device, padding: int = 0, alone_from: int | None = None
) -> tuple[Pack, ...]:
    """Return the calls for documents of these lengths, side by side. padding: rows after them.

    alone_from: see `PackKernel`. Padding is the last document of its call. The call with the most rows comes first, so
    that in backward its temporaries are free before memory for all rows is allocated.
    """
    alone = range(0) if alone_from is None else range(alone_from, sys.maxsize if window is None else window + 1)
    documents = [*lengths, padding] if padding else list(lengths)
    runs = runs_of(documents, alone)
    if padding and lengths and lengths[-1] in alone:  # causality hides the padding after it
        runs[-2:] = [range(len(lengths) - 1, len(documents))]
    starts = [0, *accumulate(documents)]
    borders = [[starts[i] - starts[run.start] for i in range(run.start, run.stop + 1)] for run in runs]
    joined = to_device(torch.tensor(list(chain(*borders)), dtype=torch.int32), device)
    packs = [
        Pack(
            rows=slice(starts[run.start], starts[run.stop]),
            cu_seqlens=each,
            max_seqlen=max(documents[run.start : run.stop]),
            window=window,
            padding=padding if run.stop == len(documents) else 0,
        )
        for run, each in zip(runs, joined.split([len(each) for each in borders]), strict=True)
    ]
    return tuple(sorted(packs, key=lambda pack: pack.rows.start - pack.rows.stop))


def joined_pack(documents: Sequence[int], keys: Sequence[int] | None, device: torch.device) -> Pack:
    """Return the call for documents of so many queries, side by side, that see so many keys of their own.

    keys: None for as many as queries, seen causally.
    """
    borders = [[0, *accumulate(each)] for each in (documents, keys) if each is not None]
    of_queries, *of_keys = to_device(torch.tensor(borders, dtype=torch.int32, device="cpu"), device)
    return Pack(
        rows=slice(0, sum(documents)),
        cu_seqlens=of_queries,
        max_seqlen=max(documents),
        window=None,
        keys=of_keys[0] if of_keys else None,
        max_keys=max(keys or [0]),
    )


def runs_of(lengths: Sequence[int], alone: range = range(0)) -> list[range]:
    """Group documents, by number, into runs of neighbours with the least cost of calls and empty tiles.

    alone: lengths of documents that are runs of their own.
    """
    runs: list[range] = []
    for is_alone, group in groupby(range(len(lengths)), key=lambda number: lengths[number] in alone):
        numbers = list(group)
        if is_alone:
            runs += [range(number, number + 1) for number in numbers]
        else:
            runs += _cheapest(numbers[0], [math.ceil(lengths[number] / _TILE_TOKENS) for number in numbers])
    return runs


def _cheapest(first: int, tiles: Sequence[int]) -> list[range]:
    """Group the documents from number `first` on, given by their tiles, at the least cost.

    Dynamic programming over groups of neighbours with equal tiles, which no cheapest cut divides.
    """
    groups = [(size, len(list(same))) for size, same in groupby(tiles)]
    sizes = np.array([size for size, _ in groups])
    numbers = np.array([0, *accumulate(count for _, count in groups)])  # first documents of the groups
    best, starts = np.zeros(len(groups) + 1, dtype=np.int64), [0]  # cost of the first n groups; start of their last run
    for stop in range(1, len(groups) + 1):
        longest = np.maximum.accumulate(sizes[:stop][::-1])[::-1]  # of a last run that starts at each group
        costs = best[:stop] + (numbers[stop] - numbers[:stop]) * longest
        starts.append(int(costs.argmin()))
        best[stop] = costs[starts[-1]] + _TILES_OF_A_CALL
    borders = [len(groups)]
    while borders[-1]:
        borders.append(starts[borders[-1]])
    return [range(first + int(numbers[a]), first + int(numbers[b])) for b, a in pairwise(borders)][::-1]


def rows_of(starts: Sequence[int], lengths: Sequence[int]) -> Tensor:
    """Return the rows of spans, one after another, on the host."""
    sizes = torch.tensor(lengths, device="cpu")
    shifts = torch.tensor(starts, device="cpu") - sizes.cumsum(0) + sizes
    return torch.arange(sum(lengths), device="cpu") + shifts.repeat_interleave(sizes)


def to_device(host: Tensor, device: torch.device) -> Tensor:
    """Copy a host tensor to `device`; to a GPU through pinned memory, so that the host does not wait."""
    if device.type == "cpu":
        return host.to(device)
    return host.pin_memory().to(device, non_blocking=True)
