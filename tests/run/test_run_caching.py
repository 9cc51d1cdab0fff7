"""Large sources that were not prepared: prepared once, and what is trained is what the source itself would give."""

import multiprocessing
import os
import signal
import time
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from testing.small import make_rows

import lengthwise
from data.conftest import hub  # noqa: F401 - a fixture
from data.stores import content, load, prepare, write_sources
from lengthwise.config import DataSource
from lengthwise.core.errors import DataError, OutputError, RankError
from lengthwise.core.files import try_lock
from lengthwise.data import ByteTokenizer
from lengthwise.data import prepare as preparing
from lengthwise.data.prepared import NAME
from lengthwise.run import caching
from lengthwise.run.caching import VARIABLE, data_cache
from run.small_runs import read_lines, write_rows, write_run

FORK = multiprocessing.get_context("fork")
ROWS = [{"text": "x" * n} for n in (1, 2, 97, 300, 5, 60, 61, 250, 199, 240)]


def cache_in(folder, *, small_bytes=0, vocab_size=256, timeout_seconds=60.0):
    usual = data_cache("bytes", ByteTokenizer, vocab_size, timeout_seconds)
    return replace(usual, folder=folder, small_bytes=small_bytes)


def rows_file(folder, rows=ROWS, **settings):
    return DataSource(path=write_rows(folder / "rows.jsonl", rows), **settings)


def entries(folder):
    """Return the stores of a cache; nothing else may be left in it."""
    found = sorted(folder.iterdir()) if folder.exists() else []
    assert all((each / NAME).is_file() for each in found), found
    return [each.name for each in found]


@pytest.fixture(autouse=True)
def _in_this_process(monkeypatch):
    monkeypatch.delenv(VARIABLE)
    original = caching.prepare_folder
    monkeypatch.setattr(caching, "prepare_folder", lambda *args, **given: original(*args, **given | {"processes": 1}))


def test_cached_sources_are_the_sources(tmp_path):
    sources = write_sources(tmp_path, [[{"text": "one"}, {"text": ""}, *ROWS]], ["two", "", "three"])
    cached = cache_in(tmp_path / "cache").prepared(sources, "data")
    assert content(load(*cached)) == content(load(*sources))
    assert len(entries(tmp_path / "cache")) == len(sources) == 2
    for damaged in (False, True):  # which is made again
        if damaged:
            next(cached[0].path.glob("data-*.arrow")).write_bytes(b"")
        assert cache_in(tmp_path / "cache").prepared(sources, "data") == cached
    assert content(load(*cached)) == content(load(*sources))
    small = sources[0].path.stat().st_size + 1
    others = (sources[0], cached[0], DataSource(path=tmp_path / "none.jsonl"))  # small, prepared, not there
    assert cache_in(tmp_path / "none", small_bytes=small).prepared(others, "data") == others
    assert not (tmp_path / "none").exists()
    assert cache_in(tmp_path / "one", small_bytes=small - 1).prepared(sources[:1], "data") != sources[:1]


def test_a_run_trains_on_the_same_steps_from_the_cache(tmp_path, monkeypatch):
    rows = [*make_rows([30, 12, 5, 25, 1, 17, 24]), {"input_ids": [1, 2, 3], "labels": [-100, -100, 3]}]
    write_rows(tmp_path / "other.jsonl", make_rows([9, 8, 7], seed=1))
    data = [{"path": "train.jsonl", "weight": 2}, {"path": "other.jsonl", "weight": 0.5}]
    keys = {"data": data, "steps": 2, "eval": {"data": [{"path": "other.jsonl"}], "every_steps": 2}}
    write_run(tmp_path, rows, name="off.yaml", output="off", **keys)
    write_run(tmp_path, rows, name="on.yaml", output="on", **keys)
    monkeypatch.setenv(VARIABLE, "off")
    lengthwise.train(tmp_path / "off.yaml", ranks=2)
    monkeypatch.setenv(VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setattr("lengthwise.run.checks.data_cache", lambda *_args: cache_in(tmp_path / "cache", vocab_size=64))
    lengthwise.train(tmp_path / "on.yaml", ranks=2)
    assert len(entries(tmp_path / "cache")) == 2
    for name, key in (("ledger", "sequences"), ("metrics", "loss"), ("eval", "loss")):
        on, off = (read_lines(tmp_path / each / f"{name}.jsonl") for each in ("on", "off"))
        assert [row[key] for row in on] == [row[key] for row in off], name


def while_waiting(monkeypatch, act):
    """Call `act` whenever someone is about to wait for another process that prepares."""
    monkeypatch.setattr(preparing, "time", SimpleNamespace(sleep=lambda seconds: (act(), time.sleep(seconds))))


def ask(cache, source, answers, barrier):
    barrier.wait()
    (found,) = cache.prepared([source], "data")
    answers.put((str(found.path), content(load(found))))


def test_two_that_ask_at_once_share_what_one_prepares(tmp_path, monkeypatch):
    def counted(*args, **options):
        with (tmp_path / "prepared").open("a") as file:
            file.write("once\n")
        assert waits.wait(timeout=30), "the other one found it held"
        return original(*args, **options)

    original, waits = preparing._prepare, FORK.Event()
    while_waiting(monkeypatch, waits.set)
    monkeypatch.setattr(preparing, "_prepare", counted)
    source, answers, barrier = rows_file(tmp_path), FORK.Queue(), FORK.Barrier(2)
    asking = [FORK.Process(target=ask, args=(cache_in(tmp_path / "cache"), source, answers, barrier)) for _ in range(2)]
    for each in asking:
        each.start()
    first, second = answers.get(timeout=60), answers.get(timeout=60)
    for each in asking:
        each.join()
    assert first == second
    assert first[1] == content(load(source))
    assert (tmp_path / "prepared").read_text() == "once\n"
    assert len(entries(tmp_path / "cache")) == 1


def test_one_killed_while_preparing_is_followed_by_the_one_that_waits(tmp_path, monkeypatch):
    source, folder, waiting = rows_file(tmp_path), tmp_path / "cache", FORK.Event()

    def prepare_and_die():
        def die(*_args):
            waiting.wait(timeout=30)
            os.kill(os.getpid(), signal.SIGKILL)

        monkeypatch.setattr(preparing, "_checked", die)
        cache_in(folder).prepared([source], "data")

    dying = FORK.Process(target=prepare_and_die)
    dying.start()
    while not list(folder.glob("*.unfinished/work/0.arrow")):
        assert dying.is_alive()
        time.sleep(0.01)
    while_waiting(monkeypatch, waiting.set)
    (found,) = cache_in(folder).prepared([source], "data")
    dying.join()
    assert dying.exitcode == -signal.SIGKILL
    assert content(load(found)) == content(load(source))
    (store,) = folder.glob("*/" + NAME)
    assert store.parent == found.path


def test_a_changed_source_or_limit_is_another_entry_and_a_weight_is_none(tmp_path):
    cache, source = cache_in(tmp_path / "cache"), rows_file(tmp_path)
    first, weighed = cache.prepared([source, source.model_copy(update={"weight": 0.5})], "data")
    assert (first.path, first.weight, weighed.weight) == (weighed.path, 1.0, 0.5)
    assert load(weighed).weights == ((0, 0.5),)
    write_rows(source.path, [*ROWS, {"text": "more"}])
    (changed,) = cache.prepared([source], "data")
    assert changed.path != first.path
    assert content(load(changed)) == content(load(source))
    (limited,) = cache.prepared([source.model_copy(update={"max_tokens": 100, "too_long": "skip"})], "data")
    assert len(entries(cache.folder)) == 3
    assert max(content(load(limited))["lengths"]) == 97


@pytest.mark.exhaustive
def test_bad_rows_that_are_left_out_are_those_of_this_model(tmp_path):
    rows = [{"input_ids": [1, 2]}, {"input_ids": [1, 200]}, {"input_ids": [300]}]
    source = rows_file(tmp_path, rows, bad_rows="skip")
    for vocab_size, left in ((256, 1), (100, 2), (301, 0)):
        (cached,) = cache_in(tmp_path / "cache", vocab_size=vocab_size).prepared([source], "data")
        found = content(load(cached, vocab_size=vocab_size))
        assert found == content(load(source, vocab_size=vocab_size))
        assert found["skipped"] == ({"bad": left} if left else {})
    strict = source.model_copy(update={"bad_rows": "stop"})
    (cached,) = cache_in(tmp_path / "cache").prepared([strict], "data")
    with pytest.raises(DataError, match=r"below the model's 256; got id 300 in row 2 \(rows.jsonl:3\)"):
        load(cached)


@pytest.mark.usefixtures("hub")
def test_a_dataset_of_a_hub_is_prepared_once_too_and_a_hub_that_is_not_there_is_asked_once(tmp_path, monkeypatch):
    import datasets

    dataset = DataSource.model_validate({"dataset": "org/name", "split": "train", "weight": 0.5})
    cache = cache_in(tmp_path / "cache")
    cached = cache.prepared([dataset], "data")
    assert cache.prepared([dataset], "data") == cached
    assert content(load(*cached)) == content(load(dataset))
    assert load(*cached).weights == load(dataset).weights
    assert len(entries(cache.folder)) == 1

    def load_dataset(*_args, **_options):
        asked.append(1)
        raise ConnectionError("no network")

    asked = []
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(DataError, match="no network"):
        cache_in(tmp_path / "other").prepared([dataset], "data")
    assert asked == [1]


def test_a_run_whose_prepared_data_is_changed_ends_at_the_row(tmp_path):
    write_run(tmp_path, make_rows([30, 12, 5, 25, 1, 17, 24]), data=[{"path": "store"}])
    prepare([DataSource(path=tmp_path / "train.jsonl")], tmp_path / "store")
    tokens = next((tmp_path / "store").glob("data-*.arrow"))
    content, (row, *_) = bytearray(tokens.read_bytes()), make_rows([30, 12])[1].values()
    content[content.index(np.array(row, dtype="<i4").tobytes())] ^= 1
    tokens.write_bytes(content)
    with pytest.raises(DataError, match=r"row 1 \(train\.jsonl:2\)") as caught:
        lengthwise.train(tmp_path / "run.yaml", ranks=2)
    assert caught.value.where == str(tokens)


@pytest.mark.parametrize(
    ("environment", "folder"),
    [
        ({}, ".cache/lengthwise"),
        ({"XDG_CACHE_HOME": "xdg"}, "xdg/lengthwise"),
        ({"XDG_CACHE_HOME": "xdg", VARIABLE: "~/mine"}, "mine"),
        ({VARIABLE: "off"}, None),
    ],
)
def test_where_the_cache_is(tmp_path, monkeypatch, environment, folder):
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    for name, value in {"HOME": "", **environment}.items():
        monkeypatch.setenv(name, value if name == VARIABLE else str(tmp_path / value))
    cache = data_cache("bytes", ByteTokenizer, None, 1.0)
    assert (cache and cache.folder) == (folder and tmp_path / folder)


def test_a_folder_that_cannot_be_written_is_named_with_what_to_set(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    source = rows_file(tmp_path)
    with pytest.raises(OutputError, match=rf"Not a directory at .*file.*{VARIABLE}, or set it to off"):
        cache_in(tmp_path / "file/cache").prepared([source], "data")

    def full(*_args, **_options):
        raise OutputError("out", expected="a folder to write into", got="No space left on device", remedy="Make room.")

    monkeypatch.setattr(caching, "prepare_folder", full)
    with pytest.raises(OutputError, match=rf"No space left on device.*{VARIABLE}"):
        cache_in(tmp_path / "cache").prepared([source], "data")


def test_one_that_gets_on_is_waited_for_and_one_that_does_not_is_named(tmp_path, monkeypatch):
    """Whatever the clock of who writes: that of a file server, for one."""
    cache, source = cache_in(tmp_path / "cache", timeout_seconds=1.0), rows_file(tmp_path)
    (found,) = cache_in(tmp_path / "names").prepared([source], "data")
    cache.folder.mkdir()
    lock = cache.folder / f".{found.path.name}.lock"
    shard = cache.folder / f"{found.path.name}.unfinished/rows-000000.arrow"
    shard.parent.mkdir()
    looks, stamp = 0, time.time() - 10**6

    def get_on(_seconds):
        nonlocal looks
        looks += 1
        if looks <= 20:
            shard.write_bytes(bytes(looks))
        for path in (lock, shard, shard.parent):
            os.utime(path, (stamp, stamp))

    monkeypatch.setattr(preparing, "time", SimpleNamespace(sleep=get_on))
    with try_lock(lock), pytest.raises(RankError, match=rf"process {os.getpid()} on"):
        cache.prepared([source], "data")
    assert 20 < looks <= 30
    lock.unlink()
    assert content(load(*cache.prepared([source], "data"))) == content(load(source))
