"""Signals that ask a run to stop: noted at once, obeyed at the end of a step."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator

_GRACE_SECONDS = 3.0  # after the second signal
_ASKING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class StopRequest:
    """Counts the signals that ask this process to stop: Ctrl-C, SIGTERM, and SIGHUP when the terminal closes.

    ends_at_the_second: True for a process without a parent that would end it: the second signal interrupts Python, and
    three seconds later the process exits, even during a long operation of torch. announces: True answers the first
    Ctrl-C at once, as a step may take minutes. A `StopRequest` takes over the signal of an earlier one, in a forked
    child too.
    """

    def __init__(self, *, ends_at_the_second: bool = False, announces: bool = False) -> None:
        self.signal: int | None = None
        self.times = 0
        self._ends_at_the_second, self._announces = ends_at_the_second, announces

    @contextlib.contextmanager
    def listening(self) -> Iterator[StopRequest]:
        """Note signals inside the block instead of raising them; only in the main thread, as Python requires."""
        if threading.current_thread() is not threading.main_thread():
            yield self
            return
        before = {number: signal.signal(number, self._note) for number in asking_signals()}
        for handler in before.values():
            earlier = getattr(handler, "__self__", None)
            if isinstance(earlier, StopRequest):
                self.signal = self.signal or earlier.signal
        try:
            with _ending_at_the_second() if self._ends_at_the_second else contextlib.nullcontext():
                yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _note(self, number: int, _frame: object) -> None:
        self.signal = self.signal or number
        self.times += 1
        if self._announces and number == signal.SIGINT and self.times == 1:
            with contextlib.suppress(OSError):
                os.write(2, b"\nstopping after this step; press Ctrl-C again to stop now\n")
        if self.times > 1 and self._ends_at_the_second:
            raise KeyboardInterrupt


def asking_signals() -> list[int]:
    """Return the signals that ask this process to stop; not SIGHUP under nohup."""
    return [each for each in _ASKING if each != signal.SIGHUP or signal.getsignal(each) != signal.SIG_IGN]


@contextlib.contextmanager
def _ending_at_the_second() -> Iterator[None]:
    """End this process by a thread some seconds after a second signal, unless the block has ended.

    Python handles signals only between its own instructions, so the thread reads them from a pipe.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    ended = threading.Event()

    def watch() -> None:
        times = 0
        while times < 2:
            numbers = os.read(reader, 16)
            times += sum(number in _ASKING for number in numbers)
            if not numbers:
                return
        if not ended.wait(_GRACE_SECONDS):
            os.write(
                2, b"interrupted within a step: nothing more was saved; --resume continues from the newest checkpoint\n"
            )
            os._exit(128 + signal.SIGINT)

    thread = threading.Thread(target=watch, name="second signal", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        signal.set_wakeup_fd(before)
        os.close(writer)  # ends the thread
        thread.join()
        os.close(reader)
