"""Seconds of work on a device: what was launched is waited for; repeats of rivals take turns."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

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


def in_turns(runs: Mapping[str, Callable[[], object]], device: torch.device, *, repeats: int) -> dict[str, list[float]]:
    """Time all runs in turns, each first once in turn; the first round warms up and does not count."""
    took: dict[str, list[float]] = {name: [] for name in runs}
    for repeat in range(repeats + 1):
        names = list(runs)
        first = repeat % len(names)
        for name in names[first:] + names[:first]:
            (seconds,) = seconds_of(runs[name], device, repeats=1, warm_up=0)
            if repeat:
                took[name].append(seconds)
    return took
