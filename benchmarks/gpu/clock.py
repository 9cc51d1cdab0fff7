"""Seconds of work on a device: what was launched is waited for."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch


def finish(device: torch.device) -> None:
    """Wait until the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds_of(run: Callable[[], object], device: torch.device, *, repeats: int, warm_up: int = 1) -> list[float]:
    """Time each of `repeats` runs, after some that do not count."""
    took = []
    for repeat in range(warm_up + repeats):
        finish(device)
        start = time.perf_counter()
        run()
        finish(device)
        if repeat >= warm_up:
            took.append(time.perf_counter() - start)
    return took
