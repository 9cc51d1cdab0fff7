"""A second's look at what one thread of this machine does, for the forecast of `verify`.

Timed, so never twice the same; each measure is the best of three, because whatever else the machine does can only make
it slower. Forward only, counted as a third of the work: a process whose autograd ever ran is better not forked.
"""

from __future__ import annotations

import os
import resource
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from lengthwise.cli.machine import memory_bytes
from lengthwise.core.shape import ModelShape
from lengthwise.report.forecast import ThreadRates

_TOKENS = 256
_WIDEST = 4096  # larger products run no faster
_PASSES = 3  # forward, and backward with twice its operations
_OPERATIONS_A_LAYER, _OPERATIONS_AN_EXPERT = 60, 8  # tensor operations of one layer's forward


def calibrate(shape: ModelShape, precision: str) -> ThreadRates:
    """Time one product, one attention, one copy, one draw and small operations, at the sizes of a model."""
    import torch
    import torch.nn.functional as F

    from lengthwise.models import DTYPES

    dtype = DTYPES[precision]
    hidden, width = min(shape.hidden, _WIDEST), min(shape.intermediate, _WIDEST)
    rows = torch.ones(_TOKENS, hidden, dtype=dtype)
    weight = torch.ones(width, hidden, dtype=dtype)
    heads, head_dim = shape.heads, shape.head_dim
    q = torch.ones(1, heads, 2 * _TOKENS, head_dim, dtype=dtype)
    large, small = torch.ones(1 << 22), torch.ones(8, 8, dtype=dtype)

    def operations() -> torch.Tensor:
        x = small
        for _ in range(_OPERATIONS_A_LAYER):
            x = x * 1.0
        return x

    with _one_thread():
        linear = _best_seconds(lambda: F.linear(rows, weight))
        attention = _best_seconds(lambda: F.scaled_dot_product_attention(q, q, q, is_causal=True))
        layer = _PASSES * _best_seconds(operations)
        draw = _best_seconds(lambda: large.normal_())
        copy = _best_seconds(lambda: large.add_(1.0))
    experts = 1 + _OPERATIONS_AN_EXPERT * (shape.experts if shape.experts > 1 else 0) / _OPERATIONS_A_LAYER
    return ThreadRates(
        cores=os.cpu_count() or 1,
        linear_flops_per_second=2.0 * _TOKENS * hidden * width / linear,
        attention_flops_per_second=2.0 * (2 * _TOKENS) ** 2 * heads * head_dim / attention,
        copy_bytes_per_second=2 * large.nbytes / copy,
        draw_per_second=large.numel() / draw,
        layer_seconds=layer * experts,
        process_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024),
        memory_bytes=memory_bytes(),
    )


def _best_seconds(run: Callable[[], object]) -> float:
    run()
    took = []
    for _ in range(3):
        start = time.perf_counter()
        run()
        took.append(time.perf_counter() - start)
    return max(min(took), 1e-9)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Compute on one thread: a process that ever ran more could not be forked (see `run.launch`)."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
