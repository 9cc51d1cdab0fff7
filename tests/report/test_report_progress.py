"""How far work is: a line that replaces itself on a terminal, few plain lines elsewhere."""

import threading
import time

import pytest

from lengthwise.report import progress
from lengthwise.report.progress import LiveLine, PhaseLine


class Screen:
    def __init__(self, *, terminal):
        self.text, self._terminal = "", terminal

    def isatty(self):
        return self._terminal

    def write(self, text):
        self.text += text

    def flush(self):
        pass


@pytest.fixture
def clock(monkeypatch):
    """A clock that a test sets."""
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def test_a_live_line_on_a_terminal_replaces_itself_never_wraps_and_leaves_nothing(monkeypatch, clock):
    monkeypatch.setenv("COLUMNS", "20")
    line = LiveLine(screen := Screen(terminal=True))
    line.update("short")
    line.update("too soon")
    clock[0] += 1
    line.update("x" * 50)
    line.write("stays")
    clock[0] += 1
    line.update("again")
    line.close()
    line.close()
    assert screen.text == f"\r\x1b[Kshort\r\x1b[K{'x' * 16}...\r\x1b[Kstays\n\r\x1b[Kagain\r\x1b[K"


def test_elsewhere_a_line_of_progress_comes_every_ten_seconds_at_most(clock):
    line = LiveLine(screen := Screen(terminal=False))
    for second in range(25):
        clock[0] = 100.0 + second
        line.update(f"{second} s")
        if second == 12:
            line.write("stays")
    line.close()
    assert screen.text == "0 s\n10 s\nstays\n22 s\n"


def test_control_characters_are_shown_as_text():
    for terminal in (True, False):
        line = LiveLine(screen := Screen(terminal=terminal))
        line.write("model \x1b[31m\nwhole")
        assert screen.text == "model \\x1b[31m\nwhole\n"


def test_a_phase_is_shown_after_a_while_and_its_thread_ends(monkeypatch):
    monkeypatch.setattr(progress, "_LOOK_SECONDS", 0.01)
    phases = PhaseLine(LiveLine(screen := Screen(terminal=True)))
    phases.silent_seconds = 0.2
    phases.note("step 1, microbatch 1 of 4 forward")
    time.sleep(0.1)
    assert screen.text == ""
    deadline = time.monotonic() + 5.0
    while not screen.text and time.monotonic() < deadline:
        time.sleep(0.01)
    assert "step 1, microbatch 1 of 4 forward: 0:00" in screen.text
    phases.note("")
    assert "progress" not in {each.name for each in threading.enumerate()}
    assert screen.text.endswith("\r\x1b[K")
