"""Seconds of a rank, and of its waits for other ranks.

For tensors on a device the stream waits; a wait is the time between two events around it, so only exposed time counts.
For host tensors the host waits. Events are read when an interval stops, which waits for the device once.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Spent:
    """Seconds of an interval, and of the rank's waits in it, in transfers and in collectives."""

    seconds: float
    transfer_seconds: float
    collective_seconds: float

    @property
    def waited_seconds(self) -> float:
        """Seconds of both kinds of waits."""
        return self.transfer_seconds + self.collective_seconds

    @property
    def busy_seconds(self) -> float:
        """Seconds outside waits; at least 0, as the clocks of host and device differ slightly."""
        return max(0.0, self.seconds - self.waited_seconds)


@dataclass(slots=True, kw_only=True)
class _Waited:
    """Seconds waited up to some point, [in transfers, in collectives]; a stream's are known when it gets there."""

    host_seconds: list[float]
    stream_seconds: list[float]

    def seconds(self, in_collectives: bool) -> float:
        return self.host_seconds[in_collectives] + self.stream_seconds[in_collectives]


class Clock:
    """Measures how long a rank waits for others; the rest of a step it is busy."""

    def __init__(self) -> None:
        self._waited = _Waited(host_seconds=[0.0, 0.0], stream_seconds=[0.0, 0.0])
        self._noted: list[tuple[torch.cuda.Event, torch.cuda.Event, bool] | _Waited] = []
        self._is_waiting = False

    @contextmanager
    def waiting(self, *, on_stream: bool = False, in_collective: bool = False) -> Iterator[None]:
        """Count the time inside the block as waiting; a nested block counts once.

        on_stream: True counts time on the current stream, not on the host. in_collective: True for a collective, not a
        transfer.
        """
        if self._is_waiting:
            yield
            return
        self._is_waiting = True
        before, start = _recorded() if on_stream else None, time.perf_counter()
        try:
            yield
        finally:
            self._is_waiting = False
            if before is None:
                self._waited.host_seconds[in_collective] += time.perf_counter() - start
            else:
                self._noted.append((before, _recorded(), in_collective))

    @property
    def waited_seconds(self) -> float:
        """Seconds of all waits; reading it waits until the device reaches their ends."""
        self.read()
        return self._waited.seconds(False) + self._waited.seconds(True)

    def read(self) -> _Waited:
        """Read the events of all waits so far."""
        for noted in self._noted:
            if isinstance(noted, _Waited):
                noted.stream_seconds = list(self._waited.stream_seconds)
            else:
                before, after, in_collective = noted
                self._waited.stream_seconds[in_collective] += _seconds_between(before, after)
        self._noted.clear()
        return self._waited

    def start(self, device: torch.device) -> Interval:
        """Start to measure this rank on `device`, without waiting for earlier work on it."""
        before = _Waited(host_seconds=list(self._waited.host_seconds), stream_seconds=[0.0, 0.0])
        self._noted.append(before)
        return Interval(self, before, None if device.type == "cpu" else _recorded())


class Interval:
    """A measured part of a run; on a device, from when its stream reaches the start until its work is done."""

    def __init__(self, clock: Clock, before: _Waited, start: torch.cuda.Event | None) -> None:
        self._clock, self._before, self._start, self._start_seconds = clock, before, start, time.perf_counter()

    def stop(self) -> Spent:
        """Wait for the device; return the seconds since the start, and those of waits."""
        if self._start is None:
            seconds = time.perf_counter() - self._start_seconds
        else:
            seconds = _seconds_between(self._start, _recorded())
        waited = self._clock.read()
        transfers, collectives = (waited.seconds(kind) - self._before.seconds(kind) for kind in (False, True))
        return Spent(seconds=seconds, transfer_seconds=transfers, collective_seconds=collectives)


def _recorded() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _seconds_between(before: torch.cuda.Event, after: torch.cuda.Event) -> float:
    after.synchronize()
    return before.elapsed_time(after) / 1e3
