"""Stacks only help: where there is no room for them a rank runs, and ends with its own error."""

import os
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
from io import FileIO
from pathlib import Path

import pytest

from lengthwise.config import build_config
from lengthwise.core.errors import TransferError, WriteError
from lengthwise.run.folder import CONFIG, RunFolder
from lengthwise.run.launch import launch
from lengthwise.run.stacks import keep_stacks, with_own_stacks
from run.small_runs import resume_after


def fails():
    raise TransferError("rank 1, step 3", expected="an answer", got="none", remedy="Look at rank 0.")


@pytest.mark.parametrize("is_free", [True, False])
def test_a_rank_under_torchrun_ends_with_its_own_error_and_keeps_its_stacks_where_it_can(tmp_path, is_free):
    folder = tmp_path / "out"
    if not is_free:
        folder.write_text("")
    assert with_own_stacks(lambda: 5, folder / "hang", 3) == 5
    assert not folder.is_dir()
    with pytest.raises(TransferError, match="rank 1, step 3") as caught:
        with_own_stacks(fails, folder / "hang", 3)
    assert str(caught.value).endswith(f"The stacks of the ranks are in {folder}/hang.") == is_free
    assert not is_free or "in fails" in (folder / "hang/rank-00003.txt").read_text()


def test_a_launched_rank_with_a_full_disk_ends_with_its_own_error(monkeypatch):
    monkeypatch.setattr(tempfile, "TemporaryFile", lambda **_: FileIO("/dev/full", "r+"))
    with pytest.raises(TransferError, match="rank 1, step 3"):
        launch(lambda _world, _note: fails(), 2, stacks=Path("/dev/full"))


def test_a_rank_under_torchrun_says_where_it_hangs_when_asked(tmp_path, capfd):
    with_own_stacks(lambda: os.kill(os.getpid(), signal.SIGUSR1), tmp_path / "hang", 0)
    assert "in with_own_stacks" in capfd.readouterr().err


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


def test_stacks_are_kept_whole_of_a_rank_that_writes_slowly(tmp_path):
    def write():
        for line in range(8):
            file.write(f"line {line}\n".encode())
            time.sleep(0.03)

    with tempfile.TemporaryFile(buffering=0) as file:
        writer = threading.Thread(target=write)
        writer.start()
        keep_stacks([file], ["step 1"], {0: 2**22 + 1}, tmp_path)  # no process has this pid
        writer.join()
    assert (tmp_path / "rank-00000.txt").read_text().endswith("line 7\n")


def test_a_rank_that_was_stopped_is_continued_to_write_its_stacks(tmp_path):
    with tempfile.TemporaryFile(buffering=0) as file:
        work = "import faulthandler, signal, time\n"
        work += f"faulthandler.register(signal.SIGUSR1, file={file.fileno()})\nprint(flush=True)\ntime.sleep(60)"
        rank = subprocess.Popen([sys.executable, "-c", work], pass_fds=[file.fileno()], stdout=subprocess.PIPE)
        try:
            rank.stdout.readline()
            rank.send_signal(signal.SIGSTOP)
            os.waitid(os.P_PID, rank.pid, os.WSTOPPED | os.WNOWAIT)
            assert keep_stacks([file], ["step 1"], {0: rank.pid}, tmp_path)
        finally:
            rank.kill()
            rank.communicate()
    assert "most recent call first" in (tmp_path / "rank-00000.txt").read_text()
