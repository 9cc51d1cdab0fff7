"""Runs on remote rows: those of the same rows read at the start, to the bit, also where an actor dies.

Feeds are in the ranks' own processes, but in the last test, whose Ray takes seconds to start.
"""

import contextlib
import os
import re
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import lengthwise
from data.local_feeds import LocalClient
from lengthwise.core.errors import ConfigError, DataError
from lengthwise.run import main, ray_feed
from lengthwise.run.launch import StopRequest
from run.small_runs import assert_equal_runs, read_lines
from run.test_run_streaming import SignalsFeeds, run_of


@pytest.fixture
def in_process(monkeypatch):
    @contextlib.contextmanager
    def rows_of(job, *_, **__):
        if not hasattr(job.dataset, "attach"):
            yield
            return
        clients = [LocalClient(spec) for spec in job.dataset.specs]  # of each rank its own
        try:
            job.dataset.attach(clients)
            yield
        finally:
            for each in clients:
                each.feed.close()

    monkeypatch.setattr(main, "_serving_rows", rows_of)


def test_remote_rows_train_as_rows_read_at_the_start(tmp_path, in_process):
    keys = {"global_batch": {"tokens": 64}, "steps": 3}
    paths = [run_of(tmp_path / f"{remote}", remote=remote, **keys) for remote in (False, 2)]
    for path in paths:
        lengthwise.train(path, ranks=2)
    assert_equal_runs(tmp_path / "2" / "out", tmp_path / "False" / "out")


def test_what_remote_rows_cannot_have_is_refused(tmp_path, in_process, monkeypatch):
    path = run_of(tmp_path, remote=True)
    with pytest.raises(DataError, match="at most 32 tokens"):
        lengthwise.train(path, overrides=["capacity_tokens=32"])
    monkeypatch.setattr("lengthwise.core.packages.is_installed", lambda package: False)
    with pytest.raises(ConfigError, match=r"pip install 'lengthwise\[ray\]'"):
        lengthwise.train(path, ranks=2)


@pytest.mark.exhaustive
def test_memory_is_checked_by_the_longest_row(tmp_path, in_process):
    path = run_of(tmp_path, remote=True, capacity_tokens="auto", steps=1)
    assert lengthwise.train(path, ranks=2).steps == 1
    assert lengthwise.verify(path, ranks=2).passed


class NotesListeners(SignalsFeeds):
    """Notes at which addresses processes of this test's Ray listen, in the first step; kills actors after the third."""

    def on_step(self, step):
        super().on_step(step)
        if step.metrics.step > 1:
            return
        ours, sockets = os.environ["RAY_TMPDIR"].encode(), set()
        for process in Path("/proc").glob("[0-9]*"):
            if ours in _content(process / "environ"):
                with contextlib.suppress(OSError):
                    sockets |= {each.readlink().name for each in (process / "fd").iterdir()}
        for table in ("tcp", "tcp6"):
            for line in Path("/proc/net", table).read_text().splitlines()[1:]:
                _, address, _, state, *_, inode = line.split()[:10]
                if state == "0A" and f"socket:[{inode}]" in sockets:  # 0A: it listens
                    self.on_note(f"listens at {address.partition(':')[0]}")


def _content(path):
    with contextlib.suppress(OSError):
        return path.read_bytes()
    return b""


def test_a_signal_while_ray_starts_ends_the_step_not_the_process(monkeypatch):
    """Ray sets a handler of its own that raises SystemExit wherever the start is."""

    def init(**_):
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(15))
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(init=init))
    with StopRequest().listening() as stop:
        ray_feed._connect("local", "name")
        assert stop.signal == signal.SIGTERM
        os.kill(os.getpid(), signal.SIGTERM)
    assert stop.times == 2


@pytest.mark.exhaustive
def test_actors_of_ray_that_are_killed_lose_and_repeat_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("FEEDERS", str(tmp_path))
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.setenv("RAY_TMPDIR", f"/tmp/lw-{os.getpid()}")
    paths = [run_of(tmp_path / f"{remote}", remote=remote, steps=20) for remote in (False, 2)]
    lengthwise.train(paths[0], ranks=2)
    lengthwise.train(paths[1], ranks=2, callbacks=[NotesListeners(3, signal.SIGKILL, b"ray::Feed")])
    notes = (tmp_path / "notes").read_text()
    assert re.search(r"data\.0, actor \d of \d ended and was started again", notes), notes
    listeners = [line.split()[-1] for line in notes.splitlines() if line.startswith("listens at")]
    assert {"0100007F", "0000000000000000FFFF00000100007F"} >= {*listeners} > set(), "others reach this Ray"
    assert_equal_runs(tmp_path / "2" / "out", tmp_path / "False" / "out")
    assert len(read_lines(tmp_path / "2" / "out" / "metrics.jsonl")) == 20
