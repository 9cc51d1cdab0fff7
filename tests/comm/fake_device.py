"""A device with a clock of its own: a host that runs ahead of it, a stream, transfers beside the stream."""

from __future__ import annotations


class FakeDevice:
    """Seconds of a host and of a stream that does in order what the host gives it."""

    def __init__(self) -> None:
        self.host = 0.0
        self.stream = 0.0  # when it will have done what it was given
        self.reads = 0  # how often the host waited for it

    def give(self, seconds: float = 0.0) -> float:
        """Give the stream some work; return when it is done."""
        self.stream = max(self.stream, self.host) + seconds
        return self.stream

    def wait_for(self, seconds: float) -> None:
        """Let the stream wait until then."""
        self.stream = max(self.give(), seconds)

    def event(self, *, enable_timing: bool = False) -> FakeEvent:
        """Stand for `torch.cuda.Event`."""
        return FakeEvent(self, timed=enable_timing)


class FakeEvent:
    """A point on the stream."""

    def __init__(self, device: FakeDevice, *, timed: bool) -> None:
        self._device, self._timed = device, timed
        self._seconds: float | None = None

    def record(self) -> None:
        self._seconds = self._device.give()

    def query(self) -> bool:
        return self._recorded <= self._device.host

    def synchronize(self) -> None:
        if not self.query():
            self._device.reads += 1
            self._device.host = self._recorded

    def elapsed_time(self, later: FakeEvent) -> float:
        assert (self._timed, later._timed) == (True, True), "events that are no clocks"
        return (later._recorded - self._recorded) * 1e3

    @property
    def _recorded(self) -> float:
        assert self._seconds is not None, "an event that was not recorded"
        return self._seconds
