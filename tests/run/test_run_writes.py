"""What a failing disk does not take is written later, whole and in order; the third failure in a row is an error."""

import errno
import os
import random
import subprocess
import sys

import pytest

from lengthwise.run import writes
from lengthwise.run.writes import MOST_FAILURES, Writes, insist
from tiers import some


@pytest.fixture
def disk(monkeypatch):
    """A disk with as many bytes left as `disk[0]`; None: room for all."""
    left = [None]
    append = writes._append_whole

    def limited(path, content):
        if left[0] is not None and len(content) > left[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        append(path, content)
        left[0] = left[0] if left[0] is None else left[0] - len(content)

    monkeypatch.setattr(writes, "_append_whole", limited)
    monkeypatch.setattr(writes, "_BETWEEN_TRIES_SECONDS", 0.0)
    return left


@pytest.mark.parametrize("seed", some(range(6), 0, 1, 2))
def test_lines_come_whole_and_in_order_after_a_full_disk(tmp_path, disk, seed):
    draw = random.Random(seed)
    noted, in_a_row = [], 0
    found = Writes(tmp_path, noted.append)
    expected = {"a": "", "b/c": ""}
    for number in range(50):
        disk[0] = 0 if in_a_row < MOST_FAILURES - 1 and draw.random() < 0.5 else None
        in_a_row = in_a_row + 1 if disk[0] == 0 else 0
        name = draw.choice(list(expected))
        expected[name] += f"{number}\n"
        found.append(name, f"{number}\n".encode())
    disk[0] = None
    found.finish()
    assert {name: (tmp_path / name).read_text() for name in expected} == expected
    assert noted
    assert all(line.startswith(f"not written yet: {tmp_path}") for line in noted)


def test_third_failure_in_a_row_is_an_error(tmp_path, disk):
    found = Writes(tmp_path, lambda _line: None)
    disk[0] = 0
    for _ in range(MOST_FAILURES - 1):
        found.append("a", b"x")
    with pytest.raises(OSError, match="No space"):
        found.append("a", b"x")


def test_failures_are_not_tried_again_at_every_line(tmp_path, disk, monkeypatch):
    """Steps of milliseconds would use up three tries before anyone could make room."""
    monkeypatch.setattr(writes, "_BETWEEN_TRIES_SECONDS", 3600.0)
    found = Writes(tmp_path, lambda _line: None)
    disk[0] = 0
    for _ in range(100):
        found.append("a", b"x")
    disk[0], found._next_try = None, 0.0
    found.finish()
    assert (tmp_path / "a").read_text() == "x" * 100


def test_what_was_written_in_part_is_taken_back(tmp_path):
    """A real limit of the system on the size of files: the line before it stays, no half one after it."""
    code = (
        "import resource, signal, pathlib\n"
        "from lengthwise.run.writes import Writes\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        f"writes = Writes(pathlib.Path({str(tmp_path)!r}), print)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))\n"
        "writes.append('a', b'x' * 70 + b'\\n')\n"
        "writes.append('a', b'y' * 70 + b'\\n')\n"
        f"print(len(pathlib.Path({str(tmp_path / 'a')!r}).read_bytes()))\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))\n"
        "writes._next_try = 0\n"
        "writes.finish()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    note, size = done.stdout.splitlines()
    assert note == f"not written yet: {tmp_path / 'a'}: File too large"
    assert int(size) == 71
    assert (tmp_path / "a").read_text() == "x" * 70 + "\n" + "y" * 70 + "\n"


def test_insist_ends_with_the_third_failure(monkeypatch):
    monkeypatch.setattr(writes, "_BETWEEN_TRIES_SECONDS", 0.0)
    heard = []

    def failing():
        raise OSError(str(len(heard)))

    with pytest.raises(OSError, match=str(MOST_FAILURES - 1)):
        insist(failing, heard.append, OSError)
    assert len(heard) == MOST_FAILURES - 1
    with pytest.raises(ValueError, match="another"):
        insist(lambda: int("another"), heard.append, OSError)
