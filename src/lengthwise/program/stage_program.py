"""Which rank is which stage of a replica, and which layers are in each chunk."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def rank_of(replica: int, stage: int, stages: int) -> int:
    """Return the rank of a stage of a replica; the stages of a replica are neighbours."""
    return replica * stages + stage


def cut_layers(
    layer_seconds: Sequence[float], chunks: int, *, first_seconds: float = 0.0, last_seconds: float = 0.0
) -> list[range]:
    """Cut layers into non-empty chunks so that the slowest is fastest; among equal cuts the last chunk is smallest.

    first_seconds, last_seconds: seconds beside the layers of the first chunk (embedding), and the last (head and loss).
    Costs chunks x layers^2.
    """
    count = len(layer_seconds)
    assert 1 <= chunks <= count, f"{chunks} chunks of {count} layers"
    sums = np.concatenate(([0.0], np.cumsum(layer_seconds)))
    best = np.full((chunks + 1, count + 1), np.inf)
    best[chunks, count], first = 0.0, np.zeros((chunks, count + 1), dtype=np.int64)
    for chunk in reversed(range(chunks)):
        for start in range(chunk, count - (chunks - chunk) + 1):
            stops = np.arange(start + 1, count - (chunks - chunk - 1) + 1)
            took = sums[stops] - sums[start] + (first_seconds if chunk == 0 else 0.0)
            took = took + (last_seconds if chunk == chunks - 1 else 0.0)
            slowest = np.maximum(took, best[chunk + 1, stops])
            place = len(stops) - 1 - int(np.argmin(slowest[::-1]))
            best[chunk, start], first[chunk, start] = slowest[place], stops[place]
    cuts, start = list[range](), 0
    for chunk in range(chunks):
        stop = int(first[chunk, start])
        cuts.append(range(start, stop))
        start = stop
    return cuts
