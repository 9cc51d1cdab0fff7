"""Stacks only help: where there is no room for them a rank runs, and ends with its own error."""

import resource
import signal
import tempfile
from pathlib import Path

import pytest

from lengthwise.config import build_config
from lengthwise.core.errors import TransferError, WriteError
from lengthwise.run.folder import CONFIG, RunFolder
from lengthwise.run.stacks import with_own_stacks, writing_stacks
from run.small_runs import resume_after


def fails():
    raise TransferError("rank 1, step 3", expected="an answer", got="none", remedy="Look at rank 0.")


@pytest.mark.parametrize("path", [Path("/dev/full"), Path("/nowhere/rank-00000.txt")])
def test_a_transfer_error_is_told_though_its_stacks_cannot_be_written(path):
    with pytest.raises(TransferError, match="rank 1, step 3"), writing_stacks(path):
        fails()
    with writing_stacks(path):
        pass


@pytest.mark.parametrize("there_is_a_temporary_folder", [True, False])
@pytest.mark.parametrize("is_free", [True, False])
def test_a_rank_runs_without_a_temporary_folder(tmp_path, monkeypatch, there_is_a_temporary_folder, is_free):
    """Its stacks are kept where they can be; what is raised is its own error in any case."""
    if not there_is_a_temporary_folder:
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "none"))
    folder = tmp_path / "out"
    if not is_free:
        folder.write_text("")
    assert with_own_stacks(lambda: 5, folder / "hang", 0) == 5
    with pytest.raises(TransferError, match="rank 1, step 3") as caught:
        with_own_stacks(fails, folder / "hang", 3)
    stacks = folder / "hang/rank-00003.txt"
    assert str(caught.value).endswith(f"Where each rank stood: {folder}/hang.") == stacks.is_file()
    assert not (is_free and there_is_a_temporary_folder) or "in fails" in stacks.read_text()


def test_going_on_with_a_full_disk_leaves_the_config_as_it_was(tmp_path):
    values = {"model": "tiny", "data": [{"python_stdlib": True}], "global_batch": {"sequences": 1}, "steps": 2}
    config = build_config({**values, "output": "out"}, folder=tmp_path)
    folder = RunFolder(tmp_path / "out", lambda _line: None, most_log_bytes=1e9)
    folder.start(config)
    before = (tmp_path / "out" / CONFIG).read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (16, hard))
    try:
        with pytest.raises(WriteError):
            folder.go_on(config, resume_after(1))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)
    assert (tmp_path / "out" / CONFIG).read_bytes() == before
    assert not list((tmp_path / "out").glob("*.unfinished"))
