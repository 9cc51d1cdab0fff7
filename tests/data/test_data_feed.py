"""Batches that feeds bring are those of the same rows read at once: in file order, in shuffled blocks, or as `remote`.

Whatever is read ahead, lost or started again, and in however many processes rows are tokenized.
"""

import gzip
import json
import time
from itertools import islice
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data.local_feeds import local_feeds
from data.stores import DOCUMENTS, FILES, killed_in_one_worker, load, prepare, weights_of, write_sources
from data.test_data_sources import write
from lengthwise.config import DataSource, GlobalBatch
from lengthwise.core.errors import DataError
from lengthwise.data import Batches
from lengthwise.data.sampler import epoch_order
from lengthwise.engine.batch import StepBatch
from lengthwise.program import Segment
from lengthwise.run.workers import worker_processes
from properties import costliest

SKIPS = {"max_tokens": 90, "too_long": "skip", "empty": "skip", "bad_rows": "skip"}
SIZES = st.one_of(
    st.integers(1, 9).map(lambda number: GlobalBatch(sequences=number)),
    st.sampled_from([1, 40, 200]).map(lambda number: GlobalBatch(tokens=number)),
)
ORDERS = [{"streaming": 1}, {"streaming": 16}, {"remote": 2}]


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch):
    monkeypatch.setattr("lengthwise.data.blocks.ROWS", 2)


def seen(batch):
    """All that a step takes of a batch: its numbers, and each sequence's tokens, labels and weights."""
    whole = [Segment(sequence=number, start=0, stop=length) for number, length in enumerate(batch.lengths)]
    batch.read_ahead(whole)
    ids, positions, labels = (each.tolist() for each in batch.tensors(whole))
    data = batch.dataset
    rows = [weights_of(data, row, 0, length) for row, length in zip(batch.ids, batch.lengths, strict=True)]
    names = [(data.name(row), data.source_key(row)) for row in batch.ids]
    return names, batch.lengths, batch.loss_tokens, batch.loss_weight, ids, positions, labels, rows


def taken(dataset, size, steps, start=(0, 0)):
    """Yield what steps take, and where the next one begins."""
    dataset._check_losses = lambda ids: None
    for each in islice(dataset.batches(size, start), steps):
        yield seen(StepBatch(dataset, each.ids)), each.end


def expected(sources, size, steps, how, *, seed=0):
    """The same steps of rows read at once, cut plainly."""
    dataset, found, epoch = load(*sources), [], 0
    if "remote" in how:
        config = SimpleNamespace(seed=seed, steps=steps, epochs=None, global_batch=size)
        return [seen(StepBatch(dataset, each.ids)) for each in Batches(dataset, config)]
    block = how["streaming"]
    while len(found) < steps:
        rows = []
        for first in range(0, dataset.num_rows, block):
            order = np.arange(first, min(first + block, dataset.num_rows))
            order = epoch_order(order, seed=seed, epoch=epoch) if block > 1 else order
            rows += [row for row in order.tolist() if dataset.lengths[row]]
        while rows:
            last = size.sequences or 1
            if size.tokens:
                while last < len(rows) and sum(dataset.lengths[rows[: last + 1]]) <= size.tokens:
                    last += 1
            found.append(seen(StepBatch(dataset, rows[:last])))
            rows = rows[last:]
        epoch += 1
    return found[:steps]


@given(
    files=FILES,
    documents=DOCUMENTS,
    size=SIZES,
    seed=st.integers(0, 9),
    how=st.sampled_from([*ORDERS, {"streaming": 3}, {"streaming": 1000}, {"remote": 1}]),
    ahead_bytes=st.sampled_from([0, 4000, 1 << 20]),
    block_rows=st.sampled_from([1, 3, 64]),
    ends_after=st.sampled_from([None, 1, 5]),
    done=st.integers(0, 8),
    mark=st.sampled_from(["own", "none", "beyond", "of before"]),
)
@costliest
def test_batches_are_those_of_the_rows_read_at_once_also_after_a_resume(
    tmp_path_factory, files, documents, size, seed, how, ahead_bytes, block_rows, ends_after, done, mark
):
    sources = write_sources(tmp_path_factory.mktemp("rows"), [*files, [{"text": "a"}]], documents, **SKIPS)
    wanted, ends = expected(sources, size, 12, how, seed=seed), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lengthwise.data.blocks.ROWS", block_rows)
        of_feed = {"seed": seed, "ahead_bytes": ahead_bytes, "ends_after": ends_after}
        with local_feeds(sources, how, ranks=3, **of_feed) as (datasets, _):
            for batch, *same in zip(*(taken(each, size, 12) for each in datasets), strict=True):
                assert batch[0] == wanted[len(ends)]
                assert all(each == batch for each in same)
                ends.append(batch[1])
        with local_feeds(sources, how, **of_feed) as ([dataset], _):
            start = json.loads(json.dumps(ends[done]))
            if mark != "own" and "streaming" in how:  # of a run that was no stream, of smaller blocks, or older
                beyond = json.dumps({"place": start[1] + 1, "state": None})
                before = '{"place": 1, "mark": [0, [0, [9, 1]]]}'
                start[2:] = {"none": [], "beyond": [beyond], "of before": [before]}[mark]
            rest = taken(dataset, size, 11 - done, start)
            assert [found for found, _ in rest] == wanted[done + 1 :]


@pytest.mark.parametrize(("kind", "how"), [*zip(["gzip", "parquet", "saved"], ORDERS, strict=True)])
def test_files_of_every_kind_are_read(tmp_path, monkeypatch, kind, how):
    rows = [{"input_ids": [*range(length)], "labels": [-100] + [7] * (length - 1)} for length in (5, 1, 9)]
    sources = [DataSource(path=write(rows * 3, tmp_path / "rows", kind), max_tokens=9)]
    size = GlobalBatch(sequences=4)
    with local_feeds(sources, how) as ([dataset], _):
        found = [*taken(dataset, size, 5)]
        assert [each for each, _ in found] == expected(sources, size, 5, how)
    with local_feeds(sources, how) as ([dataset], _):
        assert [each for each, _ in taken(dataset, size, 4, found[0][1])] == [each for each, _ in found[1:]]


@pytest.mark.parametrize("how", [{"streaming": 16}, {"remote": 2}])
def test_batches_do_not_depend_on_the_number_of_processes_and_the_end_of_one_costs_nothing(tmp_path, monkeypatch, how):
    sources = lines(tmp_path, [{"text": f"{row:03}" * (row % 3 + 1)} for row in range(90)])
    size = GlobalBatch(tokens=40)
    wanted = expected(sources, size, 30, how)
    monkeypatch.setattr("lengthwise.data.tokens.row_digest", killed_in_one_worker(tmp_path / "killed"))
    for number in (1, 3):
        with local_feeds(sources, how, run=worker_processes(number), ahead_bytes=2000) as ([dataset], _):
            assert [found for found, _ in taken(dataset, size, 30)] == wanted
    assert (tmp_path / "killed").exists()


@pytest.fixture
def file(hub, monkeypatch):
    """The file of a dataset by name."""
    monkeypatch.setattr("lengthwise.data.library.hub_answers", lambda address: False)
    rows = [{"input_ids": [number] * 3, "labels": [-100, number, number % 3]} for number in range(40)]
    return lines(hub, rows)[0].path


@pytest.mark.parametrize(("how", "block"), [("name", 1), ("url", 16)])
def test_the_library_streams_what_the_file_has_also_after_a_resume(file, how, block):
    by_name, by_url = {"dataset": "org/name", "split": "train"}, {"path": f"file://{file}", "streaming": True}
    asked, shown = (by_name, "org/name:train") if how == "name" else (by_url, f"file://{file}")
    sources, size = [DataSource.model_validate({**asked, "max_tokens": 9})], GlobalBatch(sequences=3)
    how_read = {"streaming": block}
    wanted = [each[1:] for each in expected([DataSource(path=file)], size, 20, how_read)]
    with local_feeds(sources, how_read) as ([dataset], _):
        found = [*taken(dataset, size, 20)]
        assert [each[1:] for each, _ in found] == wanted
        assert found[0][0][0][0][0].startswith(f"{shown}:")
    for done in (6, 15):  # in the first epoch, and the second
        with local_feeds(sources, how_read, ends_after=3) as ([dataset], _):
            again = taken(dataset, size, 19 - done, json.loads(json.dumps(found[done][1])))
            assert [each[1:] for each, _ in again] == wanted[done + 1 :]


def lines(folder, rows, **settings):
    path = folder / "train.jsonl"
    path.write_text("".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return [DataSource(path=path, **{"max_tokens": 9, **settings})]


@pytest.mark.parametrize(("place", "how"), [(600, {"streaming": 1}), (0, {"remote": 1})])
def test_no_more_rows_are_held_than_those_of_some_steps_and_what_is_read_ahead(tmp_path, monkeypatch, place, how):
    """place: of an epoch, which a run without a mark reads up to."""
    sources, size = lines(tmp_path, [{"text": f"{row:09}"} for row in range(1000)]), GlobalBatch(sequences=4)
    most = 40_000 + 600 * 4 * 8
    with local_feeds(sources, how, ranks=2, ahead_bytes=40_000) as (datasets, (client,)):
        for _ in zip(*(taken(each, size, 90, (0, place)) for each in datasets), strict=True):
            assert client.feed.held_bytes <= most
            assert max(len(each.ids) for each in datasets) <= 4 * 8
        deadline = time.monotonic() + 20
        while client.feed.held_bytes < 40_000 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert client.feed.held_bytes >= 40_000


@pytest.mark.parametrize("block", [1, 16])
def test_a_place_that_the_rows_do_not_reach_any_more_is_the_begin_of_the_next_epoch(tmp_path, block):
    sources, size = lines(tmp_path, [{"text": text} for text in ("ab", "cde", "f")]), GlobalBatch(sequences=2)
    how = {"streaming": block}
    with local_feeds(sources, how) as ([dataset], _):
        assert [found for found, _ in taken(dataset, size, 2, (0, 50))] == expected(sources, size, 4, how)[2:]


@pytest.mark.parametrize(
    ("how", "size", "bad", "said"),
    [
        ({"streaming": 1}, GlobalBatch(sequences=2), "{\n", "broken JSON"),
        ({"streaming": 1}, GlobalBatch(tokens=6), {"text": "x" * 10}, "10 tokens"),
        ({"remote": 2}, GlobalBatch(tokens=6), "\n", "blank"),
    ],
)
def test_a_refused_row_is_named_by_file_and_line_when_its_step_comes(tmp_path, monkeypatch, size, how, bad, said):
    good, found = [{"text": "abc"}] * 4, []
    order = Batches(load(*lines(tmp_path, good * 2 + good[:1])), SimpleNamespace(seed=0)).order(0).tolist()
    before = 4 if "streaming" in how else order.index(4)
    with local_feeds(lines(tmp_path, [*good, bad, *good]), how) as ([dataset], _):
        with pytest.raises(DataError, match=said) as caught:
            found.extend(map(found.append, taken(dataset, size, 9)))
        assert caught.value.where == f"{tmp_path}/train.jsonl:5"
    assert len([each for each in found if each]) == before // 2


def test_a_feed_that_ends_is_named_once_whatever_is_answered_late_and_files_that_change_are_refused(tmp_path):
    """Slices that were asked for before it are read after rows that the new start answered."""
    sources, said = lines(tmp_path, [{"text": "abc"}] * 99), []
    with local_feeds(sources, {"remote": 1}) as ([dataset], (client,)):
        dataset.on_restart = said.append
        steps = dataset.batches(GlobalBatch(sequences=1))
        row = int(next(steps).ids[0])
        dataset.read_ahead([(row, 0, 3)])
        for _ in range(2):
            client.end()
            next(steps)
            dataset.read(row, 0, 3)
            dataset.read_ahead([(row, 0, 3)])
        assert said == ["data.0, actor 1 of 1 ended and was started again; it reads on from where it was"] * 2
        lines(tmp_path, [{"text": "abd"}] * 99)
        client.end()
        dataset.read_ahead([(row, 0, 3)])
        with pytest.raises(DataError, match="do not change"):
            dataset.read(row, 0, 3)


@pytest.mark.parametrize(("kind", "how"), [("rows", {"streaming": 1}), ("documents", {"remote": 1})])
def test_files_that_change_under_a_feed_are_refused_in_the_next_epoch(tmp_path, how, kind):
    rows = {"rows": ([[{"text": "abc"}] * 4], []), "documents": ([], ["abc"] * 4)}[kind]
    [source] = write_sources(tmp_path, *rows, max_tokens=9)
    path = source.path if kind == "rows" else min(source.path.iterdir())
    with local_feeds([source], how, ahead_bytes=0) as ([dataset], _):
        steps = dataset.batches(GlobalBatch(sequences=4))
        next(steps)
        changed = path.read_text().replace("abc", "abd")
        with path.open("r+") as file:  # never empty: the feed's process may read it at any time
            file.write(changed)
        with pytest.raises(DataError, match="expected a file that does not change") as caught:
            [*islice(steps, 3)]
        assert caught.value.where.startswith(f"{path}")


def test_rows_stay_for_a_rank_that_is_behind_also_in_a_feed_that_is_started_again(tmp_path, monkeypatch):
    sources, size = lines(tmp_path, [{"text": f"{row:03}"} for row in range(60)]), GlobalBatch(tokens=3)
    with local_feeds(sources, {"streaming": 1}, ranks=2) as ((ahead, behind), (client,)):
        first, second = ahead.batches(size), behind.batches(size)
        list(islice(second, 12))
        list(islice(first, 40))
        row = int(behind.ids.min())
        assert 0 < row < 12
        for _ in range(2):
            behind.read_ahead([(row, 0, 3)])
            assert bytes(behind.read(row, 0, 3)[0].tolist()) == f"{row:03}".encode()
            client.end()


class Panic(BaseException):
    """As PyO3 raises for a panic of Rust."""


def test_a_tokenizer_that_panics_is_named_with_the_row(tmp_path, monkeypatch):
    def encode(_self, text):
        if text == "bad":
            raise Panic("index out of bounds")
        return np.frombuffer(text.encode(), dtype=np.uint8).astype(np.int32)

    monkeypatch.setattr("lengthwise.data.tokenizer.ByteTokenizer.encode", encode)
    sources = lines(tmp_path, [{"text": text} for text in ("good", "bad", "good")])
    with local_feeds(sources, {"streaming": 1}, run=worker_processes(2)) as ([dataset], (client,)):
        condition, wait_for = client.feed._condition, client.feed._condition.wait_for
        monkeypatch.setattr(condition, "wait_for", lambda until: wait_for(until, 20) or pytest.fail("no answer"))
        with pytest.raises(DataError, match="the stream, row 1: expected tokens; got Panic: index out of bounds"):
            next(dataset.batches(GlobalBatch(sequences=1)))


def test_sources_that_cannot_be_read_while_a_run_trains_are_refused_by_name(tmp_path, file):
    (tmp_path / "cut.jsonl.gz").write_bytes(gzip.compress(b'{"text": "abc"}\n' * 5000)[:-9])
    for name, text in {
        "empty": "",
        "list": "[1]",
        "silent": '{"text": "a"}\n',
        "long": '{"text": "0123456789"}\n',
    }.items():
        (tmp_path / name).write_text(text)
    prepare([DataSource(path=tmp_path / "long")], tmp_path / "prepared")
    file.write_text('{"text": "a"}\n{"text"')
    for kind, asked, said in (
        ("streaming", {"path": "cut.jsonl.gz"}, "cut.jsonl.gz, from row 1 on: expected a whole file"),
        ("streaming", {"path": f"file://{file}"}, "train.jsonl:2: expected JSON; got broken"),
        ("streaming", {"path": "long", "too_long": "skip"}, "left out: 1 too long"),
        ("streaming", {"path": "prepared"}, "prepared data"),
        ("streaming", {"path": "https://x.org/rows.xyz"}, "another ending"),
        ("streaming", {"dataset": "nobody/nothing", "split": "train"}, "nobody/nothing:train"),
        ("streaming", {"path": "file:///none.jsonl"}, "none.jsonl: expected a dataset that `datasets` can load"),
        ("remote", {"path": "empty"}, "empty file"),
        ("remote", {"path": "list"}, "begins with"),
        ("remote", {"path": "silent"}, "with a label"),
    ):
        source = DataSource(**asked, max_tokens=9, **{kind: True})
        with pytest.raises(DataError, match=said), local_feeds([source], {kind: 1}) as ([dataset], _):
            [*islice(dataset.batches(GlobalBatch(sequences=100)), 99)]


def test_files_that_change_have_another_digest_and_so_have_their_steps(tmp_path):
    digests, steps = set(), set()
    for rows in (["abc", "d"], ["abd", "d"], ["abc", "d", "e"]):
        for vocab_size in (256, 255):
            sources = lines(tmp_path, [{"text": each} for each in rows])
            with local_feeds(sources, {"streaming": 1}, vocab_size=vocab_size) as ([dataset], _):
                digests.add(dataset.digest())
                steps.add(next(dataset.batches(GlobalBatch(sequences=2))).digest)
    assert len(digests) == 6
    assert len(steps) == 2  # the third has the rows of the first in its first step
