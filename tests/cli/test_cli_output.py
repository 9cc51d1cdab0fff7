"""Files written whole or not at all, and in nobody's way; the lines of a step."""

import contextlib
import fcntl
import os
import pty
import stat
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest
from testing.small import make_rows

from lengthwise.cli.output import refuse_unwritable_file, write_atomically
from lengthwise.core.errors import OutputError
from run.small_runs import Command, read_lines, write_run


@pytest.mark.parametrize("path", ["/dev/null", "/dev/stdout", "/dev/new", "/proc/self/fd/1"])
def test_devices_and_pipes_are_refused_and_stay(tmp_path, path: str) -> None:
    """To root, a file renamed to /dev/null would be the new /dev/null of the whole machine."""
    with pytest.raises(OutputError, match="a device or a pipe"):
        refuse_unwritable_file(Path(path))
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OutputError, match="a device or a pipe"):
        write_atomically(tmp_path / "pipe", "text")
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)


def test_links_stay_links_and_what_they_name_is_written(tmp_path) -> None:
    (tmp_path / "there").mkdir()
    link, named = tmp_path / "link.json", tmp_path / "there" / "file.json"
    link.symlink_to(named)
    for text in ("new", "newer"):
        write_atomically(link, text)
        assert link.is_symlink()
        assert named.read_text() == text
    assert [each.name for each in (tmp_path / "there").iterdir()] == ["file.json"]


def test_a_write_that_is_interrupted_leaves_nothing(tmp_path, monkeypatch) -> None:
    def interrupted(self: Path, target: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_atomically(tmp_path / "file.json", "text")
    assert not list(tmp_path.iterdir())


@pytest.mark.exhaustive
def test_train_shows_every_step_whole_on_a_terminal(tmp_path):
    screen, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 60, 0, 0))
    path = write_run(tmp_path, make_rows([30, 12, 5, 40]), capacity_tokens=40, steps=4)
    run = Command("train", path, "--ranks", 2, stdout=terminal, prepare=lambda: os.environ.pop("COLUMNS", None))
    os.close(terminal)
    shown = ""
    with contextlib.suppress(OSError):  # the last one that writes to the terminal has ended
        while found := os.read(screen, 4096):
            shown += found.decode()
    os.close(screen)
    assert run.finish()[0] == 0
    lines = shown.replace("\r\n", "\n").replace("\r\x1b[K", "").split("\n")
    assert "\r" not in "".join(lines), "a line went over another"
    for row in read_lines(tmp_path / "out/metrics.jsonl"):
        (first,) = [n for n, line in enumerate(lines) if line.startswith(f"step {row['step']}/4")]
        said = lines[first : first + 2]
        assert f"{row['loss']:.4f}" in " ".join(said)
        assert max(map(len, said)) <= 60


@pytest.mark.exhaustive
def test_a_full_disk_under_the_output_is_told_without_a_traceback(tmp_path) -> None:
    command = [sys.executable, "-m", "lengthwise", "simulate", "--help"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr == "error[output] standard output or a file: expected room on the disk; got a full disk\n"
