"""Files written whole or not at all, and in nobody's way."""

import os
import stat
from pathlib import Path

import pytest

from lengthwise.cli.output import refuse_unwritable_file, write_atomically
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
