"""Files written whole or not at all, and in nobody's way; the line of a step."""

import os
import stat
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from lengthwise.cli.output import refuse_unwritable_file, write_atomically
from lengthwise.cli.train import step_line
from lengthwise.core.errors import OutputError


@pytest.mark.parametrize("path", ["/dev/null", "/dev/stdout", "/dev/fd/1", "/dev/new", "/proc/self/fd/1"])
def test_devices_are_refused_and_stay(path: str) -> None:
    """To root, a file renamed to /dev/null would be the new /dev/null of the whole machine."""
    with pytest.raises(OutputError, match="a device or a pipe"):
        refuse_unwritable_file(Path(path))
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)


def test_pipes_are_refused_and_stay(tmp_path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(OutputError, match="a device or a pipe"):
        write_atomically(pipe, "text")
    assert stat.S_ISFIFO(pipe.stat().st_mode)


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


def test_step_line_says_loss_speed_imbalance_idle_and_rings():
    metrics = SimpleNamespace(
        step=7, loss=1.23456, tokens_per_second=12_345, imbalance_ratio=1.5, idle_ratio=0.25, ring_token_ratio=0.5,
        step_seconds=0.125,
    )  # fmt: skip
    text = step_line(metrics, 100)
    assert text == "step   7/100  loss 1.2346  12.3K tokens/s  imbalance 1.50  idle 25.0 %  in rings 50.0 %  125 ms"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no such device here")
def test_a_full_disk_under_the_output_is_told_without_a_traceback(tmp_path) -> None:
    command = [sys.executable, "-m", "lengthwise", "simulate", "--help"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 1
    assert (
        done.stderr == "error[output] standard output or a file: expected room for what is written; got a full disk\n"
    )
