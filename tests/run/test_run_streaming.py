"""Runs on streams: those of the same rows read at the start, also after a kill and where the reading process ends."""

import contextlib
import os
import re
import signal
import socket
from pathlib import Path

import pytest

import lengthwise
from lengthwise.core.errors import RankError
from lengthwise.run.callbacks import Callback
from run.small_runs import (
    VOCAB,
    Command,
    assert_equal_runs,
    broken_off,
    call,
    losses,
    make_rows,
    model_of,
    read_lines,
    steps_of,
    write_run,
)
from session.loops import small_model
from tiers import more

LENGTHS = [30, 12, 5, 100, 1, 2, 33, 130, 9]  # 100: more than a rank holds, a ring of both
_PLACE = (1 << 40) - 1  # of a row in its epoch


def run_of(folder, *, streaming, **keys):
    source = {"path": "train.jsonl", "max_tokens": 128, "too_long": "skip"}
    data = [{**source, **({"streaming": streaming} if streaming else {})}]
    checkpoint = {"every_steps": 2, "background": False}
    return write_run(
        folder, make_rows(LENGTHS), data=data, **{"steps": 7, "capacity_tokens": 64, "checkpoint": checkpoint, **keys}
    )


def readers():
    """The processes of this test that read streams."""
    mark, found = os.environ["READERS"].encode(), []
    for each in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if b"reader_process" in (each / "cmdline").read_bytes() and mark in (each / "environ").read_bytes():
                found.append(int(each.name))
    return found


@pytest.fixture
def named(tmp_path, monkeypatch):
    monkeypatch.setenv("READERS", f"{tmp_path}")


@pytest.mark.parametrize("size", [{"sequences": 4}, more({"tokens": 64})])
def test_two_nodes_train_on_a_stream_shuffled_as_a_whole_as_on_its_rows_read_at_the_start(tmp_path, named, size):
    paths = [run_of(tmp_path / f"{block}", streaming=block, global_batch=size) for block in (False, 9)]
    lengthwise.train(paths[0], ranks=2)
    with socket.create_server(("127.0.0.1", 0)) as free:
        world = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]), "OMP_NUM_THREADS": "1"}
    world |= {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    ranks = [Command("train", paths[1], "--timeout-seconds", 60, RANK=f"{rank}", **world) for rank in range(2)]
    most = 0
    while not all(rank.ended() for rank in ranks):
        most = max(most, len(readers()))
    assert [rank.finish()[0] for rank in ranks] == [0, 0]
    assert most == 2
    wanted, found = (path.parent / "out" for path in paths)
    assert [[row & _PLACE for row in step] for step in steps_of(found)] == steps_of(wanted)
    assert losses(found) == losses(wanted)
    ours, theirs = model_of(found), model_of(wanted)
    assert all(ours[name].equal(theirs[name]) for name in theirs)


@pytest.mark.parametrize(("before", "after"), [(2, 3), more(2, 2), more(3, 2)])
def test_a_run_on_a_stream_goes_on_where_it_was(tmp_path, before, after):
    keys = {"streaming": 4, "global_batch": {"tokens": 64}}
    wanted = run_of(tmp_path / "whole", **keys)
    lengthwise.train(wanted, ranks=before)
    assert any(row["ring_token_ratio"] > 0 for row in read_lines(wanted.parent / "out" / "metrics.jsonl"))
    path = run_of(tmp_path / "broken", **keys)
    found = broken_off(path, before, after=5)
    lengthwise.train(path, ranks=after, resume=True)
    assert_equal_runs(found, wanted.parent / "out", exactly=before == after)


def test_rows_of_a_stream_that_goes_on_are_those_of_before(tmp_path):
    path = run_of(tmp_path, streaming=True, capacity_tokens=128)
    broken_off(path, 1, after=5)
    rows = path.parent / "train.jsonl"
    rows.write_text(rows.read_text().replace("1", "2", 1))
    assert call("train", path, "--resume") == 2
    assert lengthwise.train(path, resume=True, accept_changes=True).steps == 7


class SignalsReaders(Callback):
    """Sends a signal to the readers of this test after a step."""

    def __init__(self, step, number):
        self._step, self._number = step, number

    def on_step(self, step):
        if step.metrics.step == self._step:
            for each in readers():
                os.kill(each, self._number)


@pytest.mark.parametrize(
    ("number", "said"),
    [(signal.SIGKILL, "waiting for the reader of the stream: expected rows; got its end by signal 9"),
     (signal.SIGSTOP, "waiting for the reader of the stream: expected rows within 4 s; got none")],
)  # fmt: skip
def test_a_reader_that_ends_or_stops_is_named_and_the_run_goes_on_from_there(tmp_path, named, number, said):
    path = run_of(tmp_path, streaming=True, steps=12)
    with pytest.raises(RankError, match=re.escape(said)):
        lengthwise.train(path, ranks=2, callbacks=[SignalsReaders(5, number)], timeout_seconds=4)
    assert not readers()
    lengthwise.train(path, ranks=2, resume=True)
    steps = [[row & _PLACE for row in step] for step in steps_of(tmp_path / "out")]
    assert steps == [[0, 1, 2, 3], [4, 5, 6, 8]] * 6


def test_a_reader_ends_with_a_run_that_is_killed(tmp_path, named):
    command = Command("train", run_of(tmp_path, streaming=True, steps=100_000), "--ranks", 2)
    command.wait_for(lambda: readers() and (tmp_path / "out/metrics.jsonl").exists())
    command.send(signal.SIGKILL)
    command.finish()  # of which nothing is left


def test_a_session_takes_a_stream_of_rows():
    from datasets import IterableDataset
    from torch.utils.data import DataLoader

    rows, losses_of = make_rows(LENGTHS), list[list[float]]()
    stream = IterableDataset.from_generator(lambda: iter(rows))
    for batches in ([rows[:4], rows[4:8], rows[8:]], DataLoader(stream, batch_size=4, collate_fn=list)):
        with lengthwise.Session(small_model(vocab_size=VOCAB), capacity_tokens=256) as session:
            losses_of.append([session.evaluate(step).loss for step in batches])
    assert losses_of[0] == losses_of[1]
    assert len(losses_of[0]) == 3


def test_the_first_rows_of_a_stream_are_verified_and_shown_and_none_prepared(tmp_path, capsys):
    path = run_of(tmp_path, streaming=True, global_batch={"sequences": 2})
    assert lengthwise.verify(path, ranks=2).passed
    assert call("data", path) == 0
    assert "stream  its first 8 sequences" in capsys.readouterr().out
    assert call("prepare", path, "--out", tmp_path / "tokens") == 2
    assert "got a stream" in capsys.readouterr().err
