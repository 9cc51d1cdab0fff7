"""Preparing: a killed one is gone on with, to the same bytes; what is refused, and where."""

import json
import multiprocessing
import os
import shutil
import signal
import time
from pathlib import Path

import pytest

from data.stores import content, killed_in_one_worker, load, prepare, write_sources
from lengthwise.config import DataSource
from lengthwise.core.errors import ConfigError, DataError, OutputError, Problems, RankError
from lengthwise.core.files import try_lock
from lengthwise.data import load_tokenizer, prepared
from lengthwise.data import prepare as preparing
from lengthwise.data.digests import row_digest
from lengthwise.data.prepared import NAME
from lengthwise.run import workers
from lengthwise.run.workers import worker_processes

FORK = multiprocessing.get_context("fork")
ROWS = [[{"text": "x" * n} for n in (1, 2, 97, 300, 5, 60, 61)], [{"prompt": "ab", "completion": "cd"}] * 9]


@pytest.mark.parametrize("more", ["", '{"text": "more"}\n'])
def test_prepare_whose_process_is_killed_goes_on_to_the_same_rows(tmp_path, monkeypatch, more):
    """One that tokenizes, at its first row. With other sources it begins anew."""
    sources = write_sources(tmp_path, ROWS, ["a", "bc"])
    monkeypatch.setattr("lengthwise.data.tokens.row_digest", killed_in_one_worker(tmp_path / "killed"))
    with pytest.raises(RankError, match="tokenizing: expected processes that live"):
        prepare(sources, tmp_path / "out", processes=2)
    assert not (tmp_path / "out").exists()
    with sources[0].path.open("a") as file:
        file.write(more)
    prepare(sources, tmp_path / "out", processes=2)
    assert content(load(tmp_path / "out")) == content(load(*sources))
    assert sorted(each.name for each in (tmp_path / "out").parent.glob("out*")) == ["out"]


@pytest.mark.parametrize("number", [1, 5])
def test_prepare_killed_while_it_writes_ends_with_the_same_rows(tmp_path, number):
    """Whether files are not yet on the disk, or all of them are, only without the name of the folder."""

    def work():
        count = 0

        def sync(_path):
            nonlocal count
            count += 1
            if count == number:
                os.kill(os.getpid(), signal.SIGKILL)

        preparing.sync = prepared.sync = sync
        prepare(sources, tmp_path / "out")

    sources = write_sources(tmp_path, ROWS, ["a", "bc"])
    process = FORK.Process(target=work)
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    prepare(sources, tmp_path / "out")
    assert content(load(tmp_path / "out")) == content(load(*sources))
    assert not (tmp_path / "out.unfinished").exists()


def work(seconds):
    if seconds > 9:
        time.sleep(seconds)
    elif seconds < 0:
        raise DataError("a row", expected="one that is right", got="another", remedy="Correct it.")
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        sum(range(1000))
    return seconds


def test_an_error_ends_processes_where_they_stand_and_one_that_works_for_longer_than_the_time_out_is_waited_for():
    assert list(worker_processes(2, timeout_seconds=0.1)(work, [0.5, 0.0])) == [0.5, 0.0]
    start = time.monotonic()
    with pytest.raises(DataError, match="a row"):
        list(worker_processes(2)(work, [-1, 60, 60, 60]))
    assert time.monotonic() - start < 30, "waited for a task of 60 s that nobody needs"


def die(_task):
    os.kill(os.getpid(), signal.SIGKILL)


def test_processes_that_are_always_killed_or_stop_before_they_have_a_task_are_an_error(monkeypatch):
    with pytest.raises(RankError, match="live while task 0; got the end of 3"):
        list(worker_processes(2)(die, [f"task {number}" for number in range(5)]))
    start = workers._start

    def stopping(*arguments):
        start(*arguments)
        os.kill(os.getpid(), signal.SIGSTOP)

    monkeypatch.setattr(workers, "_start", stopping)
    monkeypatch.setattr(workers, "_LOOK_SECONDS", 0.1)
    with pytest.raises(RankError, match=r"a process that begins task 0 in 0\.3 s"):
        list(worker_processes(2, timeout_seconds=0.3)(die, ["task 0", "task 1"]))


def test_prepare_again_takes_what_is_there_and_refuses_what_is_other(tmp_path):
    sources = write_sources(tmp_path, ROWS)
    out = tmp_path / "out"
    assert prepare(sources, out)[1] is False
    before = {path: path.stat().st_mtime_ns for path in out.iterdir()}
    assert prepare(sources, out)[1] is True
    assert {path: path.stat().st_mtime_ns for path in out.iterdir()} == before
    with pytest.raises(OutputError, match="prepared data of other sources"):
        prepare(sources[:1], out)
    prepare(sources[:1], out, overwrite=True)
    assert content(load(out)) == content(load(*sources[:1]))
    next(out.glob("data-*.arrow")).unlink()
    with pytest.raises(OutputError, match=r"damaged prepared data .*data-0"):
        prepare(sources[:1], out)
    other = tmp_path / "other"
    other.mkdir()
    (other / "mine.txt").write_text("mine")
    with pytest.raises(OutputError, match="another folder or file"):
        prepare(sources, other, overwrite=True)
    assert (other / "mine.txt").read_text() == "mine"
    writing = pytest.raises(OutputError, match=rf"process {os.getpid()} on .* is writing")
    with try_lock(tmp_path / ".new.lock"), writing:
        prepare(sources, tmp_path / "new")


def test_a_folder_that_is_replaced_is_there_whole_or_not_at_all(tmp_path, monkeypatch):
    sources, out, remove, seen = write_sources(tmp_path, ROWS), tmp_path / "out", shutil.rmtree, []
    prepare(sources, out)

    def slowly(folder, **how):
        for path in [*Path(folder).glob("*")]:
            if path.is_file():
                path.unlink()
            seen.append((out / NAME).exists() or not out.exists())
        remove(folder, **how)

    monkeypatch.setattr("shutil.rmtree", slowly)
    prepare(sources[:1], out, overwrite=True)
    assert seen
    assert all(seen)
    assert content(load(out)) == content(load(*sources[:1]))
    assert sorted(each.name for each in tmp_path.iterdir()) == ["out", "rows-0.jsonl", "rows-1.jsonl"]


def test_prepare_tells_all_bad_rows_of_all_shards_by_their_lines_as_loading_does(tmp_path):
    rows = [{"text": 1}, {"text": "a" * 300}, {"input_ids": [0.5]}, {"text": "b" * 300}, {"text": 2}, {"text": ""}]
    sources = write_sources(tmp_path, [rows, [{"txt": "a"}]], empty="error")
    with sources[0].path.open("a") as file:
        file.write('{"text": "')
    with pytest.raises(Problems) as loading:
        load(*sources)
    with pytest.raises(Problems) as preparing:
        prepare(sources, tmp_path / "out")
    assert str(preparing.value) == str(loading.value)
    assert not (tmp_path / "out").exists()
    write_sources(tmp_path / "rows", [[{"text": "x"}] * 5, [{"text": "y"}, {"text": 1}], [{"text": 2}]])
    with pytest.raises(Problems) as caught:
        prepare([DataSource(path=tmp_path / "rows")], tmp_path / "out", processes=2)
    assert [Path(each.where).name for each in caught.value.problems] == ["rows-1.jsonl:2", "rows-2.jsonl:1"]


def test_prepare_without_its_tokenizer_takes_ids_and_refuses_text(tmp_path):
    missing = str(tmp_path / "missing")
    sources = write_sources(tmp_path, [[{"input_ids": [1, 2]}], [{"text": "a"}]])
    prepare(sources[:1], tmp_path / "ids", name=missing, tokenizer=lambda: load_tokenizer(missing))
    assert json.loads((tmp_path / "ids" / NAME).read_text())["tokenizer"] is None
    assert load(tmp_path / "ids").lengths.tolist() == [2]
    with pytest.raises(ConfigError, match="a tokenizer at"):
        prepare(sources, tmp_path / "out", name=missing, tokenizer=lambda: load_tokenizer(missing))


def test_sources_that_cannot_be_prepared_are_refused_and_weights_are_those_of_stores(tmp_path, monkeypatch):
    def changing(*row):
        with first.path.open("a") as file:
            file.write('{"text": "more"}\n')
        return row_digest(*row)

    first, empty = write_sources(tmp_path, [[{"text": "a"}], [{"text": ""}]])
    prepare([first], tmp_path / "store")
    heavy, gone = first.model_copy(update={"weight": 3.0}), DataSource(path=tmp_path / "gone")
    monkeypatch.setattr("lengthwise.data.tokens.row_digest", changing)
    for sources, said in (
        ([DataSource(path=tmp_path / "store")], "data to prepare; got prepared data"),
        ([empty], r"at least one sequence; got none \(left out: 1 empty\)"),
        ([gone], "a regular file"),
        ([heavy], r"data\.0\.weight: expected no weight"),
        ([first], "does not change"),
    ):
        with pytest.raises(DataError, match=said):
            prepare(sources, tmp_path / "out")
    weighed = load(DataSource(path=tmp_path / "store", weight=3.0), tmp_path / "store")
    assert weighed.weights == ((0, 3.0), (1, 1.0))
