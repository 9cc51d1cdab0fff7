"""Runs on streams: those of the same rows read at the start, also after a kill and where a feed ends."""

import contextlib
import json
import os
import signal
import socket
import tempfile
import time
from contextlib import ExitStack
from itertools import islice
from pathlib import Path

import pytest
from testing.small import VOCAB, make_rows

import lengthwise
from lengthwise.comm import SoloTransport, World
from lengthwise.config import DataSource, GlobalBatch
from lengthwise.core.errors import RankError, TransferError
from lengthwise.data.feed_dataset import streamed
from lengthwise.run.callbacks import Callback
from lengthwise.run.node_feed import FeedRank, node_feed, socket_path
from run.small_runs import (
    Command,
    assert_equal_runs,
    broken_off,
    call,
    count_lines,
    losses,
    read_lines,
    steps_of,
    told,
    whole,
    write_rows,
    write_run,
)

LENGTHS = [30, 12, 5, 100, 1, 2, 33, 130, 9]  # 100: more than a rank holds, a ring of both
_PLACE = (1 << 40) - 1  # of a row in its epoch


def run_of(folder, *, streaming=None, remote=None, **keys):
    fed = {name: value for name, value in (("streaming", streaming), ("remote", remote)) if value}
    data = [{"path": "train.jsonl", "max_tokens": 128, "too_long": "skip", **fed}]
    keys = {"steps": 7, "capacity_tokens": 64, "checkpoint": {"every_steps": 2, "background": False}, **keys}
    return write_run(folder, make_rows(LENGTHS), data=data, **keys)


def feeders(kind=b"node_feed_process"):
    """The processes of this test that feed ranks, or that tokenize for them: `spawn_main`."""
    mark, found = os.environ["FEEDERS"].encode(), []
    for each in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if kind in (each / "cmdline").read_bytes() and mark in (each / "environ").read_bytes():
                found.append(int(each.name))
    return found


@pytest.fixture
def named(tmp_path, monkeypatch):
    monkeypatch.setenv("FEEDERS", f"{tmp_path}")


def rows_of_steps(output):
    return [[row & _PLACE for row in step] for step in steps_of(output)]


def at_the_start(tmp_path, steps):
    """Return the output of a run on the same rows, read at the start."""
    return whole(run_of(tmp_path / "start", global_batch={"sequences": 4}, steps=steps), 2)


@pytest.mark.exhaustive
def test_two_nodes_train_on_a_stream_shuffled_as_a_whole_as_on_its_rows_read_at_the_start(tmp_path, named):
    wanted = at_the_start(tmp_path, 3)
    path = run_of(tmp_path, streaming=9, global_batch={"sequences": 4}, steps=3)
    with socket.create_server(("127.0.0.1", 0)) as free:
        world = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]), "OMP_NUM_THREADS": "1"}
    world |= {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    ranks = [Command("train", path, "--timeout-seconds", 60, RANK=f"{rank}", **world) for rank in range(2)]
    most = 0
    while not all(rank.ended() for rank in ranks):
        most = max(most, len(feeders()))
        time.sleep(0.05)
    assert [rank.finish()[0] for rank in ranks] == [0, 0]
    assert most == 2
    assert_equal_runs(path.parent / "out", wanted, rows_of=rows_of_steps)


class SignalsFeeds(Callback):
    """Sends a signal to processes of this test after a step, and notes what is said."""

    def __init__(self, step, number, kind=b"node_feed_process"):
        self._step, self._number, self._kind = step, number, kind

    def on_step(self, step):
        if step.metrics.step == self._step:
            found = feeders(self._kind)
            self.on_note(f"{len(found)} of {self._kind.decode()}")
            for each in found:
                os.kill(each, self._number)

    def on_note(self, line):
        with Path(os.environ["FEEDERS"], "notes").open("a") as file:
            file.write(line + "\n")


@pytest.mark.exhaustive
@pytest.mark.parametrize(("after", "block"), [(3, 9), (2, 4)])
def test_a_run_whose_feed_is_killed_goes_on_and_also_one_that_is_killed(tmp_path, named, monkeypatch, after, block):
    """Two processes tokenize; they are killed, then the feed that started them, then the run ends after step 9."""
    size = {"sequences": 4} if block == 9 else {"tokens": 64}
    whole_run = run_of(tmp_path / "whole", streaming=block, global_batch=size, steps=12)
    wanted = at_the_start(tmp_path, 12) if block == 9 else whole(whole_run, 2)
    assert any(row["ring_token_ratio"] > 0 for row in read_lines(wanted / "metrics.jsonl"))
    monkeypatch.setattr("lengthwise.run.node_feed.tokenizing_processes", lambda *_: 2)
    path = run_of(tmp_path / "killed", streaming=block, global_batch=size, steps=12)
    kills = [SignalsFeeds(2, signal.SIGKILL, b"spawn_main"), SignalsFeeds(4, signal.SIGKILL)]
    found = broken_off(path, 2, 9, kills)
    assert losses(found) == losses(wanted)[:9]
    notes = (tmp_path / "notes").read_text()
    assert "2 of spawn_main" in notes
    assert "the stream ended and was started again" in notes
    assert not feeders()
    assert not feeders(b"spawn_main")
    lengthwise.train(path, ranks=after, resume=True)
    assert_equal_runs(found, wanted, exactly=after == 2, rows_of=rows_of_steps)


@pytest.mark.exhaustive
def test_a_feed_that_stops_is_named_and_ended(tmp_path, named):
    path, stops = run_of(tmp_path, streaming=True), SignalsFeeds(3, signal.SIGSTOP)
    with pytest.raises(RankError, match="waiting for the feed of the stream: expected rows within 4 s; got none"):
        lengthwise.train(path, ranks=2, callbacks=[stops], timeout_seconds=4)
    assert not feeders()


_SLOW_SOCKETS = """
import socket, time
def slowly(call):
    return lambda *arguments: time.sleep(0.3) or call(*arguments)
socket.socket.listen, socket.socket.accept = map(slowly, (socket.socket.listen, socket.socket.accept))
"""


@pytest.mark.exhaustive
def test_a_feed_may_start_slowly_and_is_given_up_after_some_ends_and_ended_last(tmp_path, named, monkeypatch):
    (tmp_path / "sitecustomize.py").write_text(_SLOW_SOCKETS)
    monkeypatch.syspath_prepend(tmp_path)
    short = Path(tempfile.mkdtemp())
    monkeypatch.setattr("tempfile.tempdir", f"{short}")
    rows = DataSource(path=write_rows(tmp_path / "train.jsonl", make_rows(LENGTHS)), max_tokens=130, streaming=True)

    def read(cleanup):
        of_tokenizer = {"tokenizer_name": "bytes", "vocab_size": VOCAB, "tokenizer_digest": ""}
        dataset = streamed([rows], seed=0, **of_tokenizer)
        how = {"timeout_seconds": 60, "say": lambda _line: None, "cleanup": cleanup}
        world, transport = World(rank=0, world_size=1), SoloTransport()
        return dataset, node_feed(FeedRank(dataset=dataset, world=world, transport=transport, **how))

    why = {"expected": "rank 1", "got": "a closed connection", "remedy": "See why."}
    with ExitStack() as cleanup:
        with pytest.raises(TransferError, match="rank 1"), read(cleanup)[1]:
            raise TransferError("rank 0, step 2", **why)
        assert feeders()  # other ranks do not miss it before this one has reported its error
    assert not feeders()
    with ExitStack() as cleanup:
        dataset, block = read(cleanup)
        cleanup.enter_context(block)
        steps, ended = dataset.batches(GlobalBatch(sequences=1)), set()
        next(steps)
        deadline = time.monotonic() + 60
        while len(ended) < 3:
            assert time.monotonic() < deadline
            for each in {*feeders()} - ended:
                os.kill(each, signal.SIGKILL)
                ended.add(each)
            time.sleep(0.01)
        with pytest.raises(RankError, match="its end by signal 9, 3 times in a row"):
            [*islice(steps, 300)]
    short.rmdir()  # of which nothing is left


def test_ranks_of_a_node_meet_where_a_socket_may_be(monkeypatch):
    for folder, found in (("/scratch", "/scratch/x/socket"), ("/scratch/" + "job/" * 30, "/tmp/x/socket")):
        monkeypatch.setattr("tempfile.tempdir", folder)
        assert f"{socket_path('x')}" == found


def test_a_run_trains_on_a_stream_as_on_its_rows_read_at_the_start_and_its_feed_ends_when_it_is_killed(tmp_path, named):
    wanted, keys = at_the_start(tmp_path, 3), {"global_batch": {"sequences": 4}, "steps": 100_000}
    command = Command("train", run_of(tmp_path, streaming=9, **keys), "--ranks", 2)
    command.wait_for(lambda: feeders() and count_lines(tmp_path / "out/ledger.jsonl") > 3)
    command.send(signal.SIGKILL)
    command.finish()  # of which nothing is left
    assert rows_of_steps(tmp_path / "out")[:3] == rows_of_steps(wanted)
    assert losses(tmp_path / "out")[:3] == losses(wanted)


@pytest.mark.exhaustive
def test_the_first_rows_of_a_stream_are_verified_and_shown_and_none_prepared(tmp_path, capsys):
    path = run_of(tmp_path, streaming=True, global_batch={"sequences": 2})
    assert lengthwise.verify(path, ranks=2).passed
    assert call("plan", "--config", path, "--ranks", 2, "--out", tmp_path / "plan.json") == 0
    assert sorted(json.loads((tmp_path / "plan.json").read_text())["tokens"]) == [12, 30]
    assert "stream  its first 8 sequences" in told(capsys, "data", path)
    assert "got a stream" in told(capsys, "prepare", path, "--out", tmp_path / "tokens", status=2)
