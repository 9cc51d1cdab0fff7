"""Batches of a stream are those of the same rows read at once: in file order, or shuffled block by block."""

import json
import time
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data.stores import DOCUMENTS, FILES, load, prepare, weights_of, write_sources
from data.test_data_tables import write
from lengthwise.config import DataSource, GlobalBatch, build_config
from lengthwise.core.errors import DataError, LengthwiseError
from lengthwise.data import stream_rows
from lengthwise.data.reader import Reader, StreamSpec
from lengthwise.data.sampler import epoch_order
from lengthwise.data.stream import StreamDataset
from lengthwise.engine.batch import StepBatch
from lengthwise.program import Segment
from properties import costly

SKIPS = {"max_tokens": 90, "too_long": "skip", "empty": "skip", "bad_rows": "skip"}
SIZES = st.one_of(
    st.integers(1, 9).map(lambda number: GlobalBatch(sequences=number)),
    st.sampled_from([1, 40, 200]).map(lambda number: GlobalBatch(tokens=number)),
)


class LocalClient:
    """Asks a reader that is here, as a rank of this number."""

    def __init__(self, reader, number=0):
        self.reader, self.number = reader, number

    def ask(self, method, *arguments):
        answer = getattr(self.reader, method)(*arguments)
        return lambda: answer


@contextmanager
def streams(sources, *, ranks=1, seed=0, block=True, **changes):
    """Give a dataset of each of some ranks that have one reader, and the reader."""
    sources = tuple(each.model_copy(update={"streaming": block}) for each in sources)
    spec = StreamSpec(sources=sources, tokenizer_name="bytes", vocab_size=256, clients=ranks, **changes)
    reader = Reader(spec)
    try:
        found = [StreamDataset(spec, tokenizer_digest="", seed=seed) for _ in range(ranks)]
        for number, each in enumerate(found):
            each.attach(LocalClient(reader, number))
        yield found, reader
    finally:
        reader.close()


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


def expected(sources, size, steps, *, block=1, seed=0):
    """The same steps of rows read at once, cut plainly."""
    dataset, found, epoch = load(*sources), [], 0
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
    block=st.sampled_from([1, 1, 3, 16, 1000]),
    ahead_bytes=st.sampled_from([0, 4000, 1 << 20]),
    marks=st.sampled_from([1, 2, 7, 256]),
    done=st.integers(0, 8),
    mark=st.sampled_from(["own", "none", "beyond"]),
)
@costly
def test_batches_are_those_of_the_rows_read_at_once_also_after_a_resume(
    tmp_path_factory, files, documents, size, seed, block, ahead_bytes, marks, done, mark
):
    sources = write_sources(tmp_path_factory.mktemp("rows"), [*files, [{"text": "a"}]], documents, **SKIPS)
    wanted, ends = expected(sources, size, 12, block=block, seed=seed), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lengthwise.data.reader._MARK_ROWS", marks)
        patch.setattr(stream_rows, "PART_BYTES", 200)
        reads = {"block": block, "seed": seed, "ahead_bytes": ahead_bytes}
        with streams(sources, ranks=3, **reads) as (datasets, _):
            for batch, *same in zip(*(taken(each, size, 12) for each in datasets), strict=True):
                assert batch[0] == wanted[len(ends)]
                assert all(each == batch for each in same)
                ends.append(batch[1])
        with streams(sources, **reads) as ([dataset], _):
            start = json.loads(json.dumps(ends[done]))
            if mark != "own":  # that of a run which was none on a stream, or of one of smaller blocks
                start[2:] = [json.dumps([start[1] + 1, None])] * (mark == "beyond")
            rest = taken(dataset, size, 11 - done, start)
            assert [found for found, _ in rest] == wanted[done + 1 :]


@pytest.mark.parametrize("kind", ["jsonl", "gzip", "zstd", "parquet", "arrow file", "saved"])
def test_files_of_every_kind_are_read_in_order(tmp_path, monkeypatch, kind):
    rows = [{"input_ids": [*range(length)], "labels": [-100] + [7] * (length - 1)} for length in (5, 1, 9)]
    sources = [DataSource(path=write(rows * 3, tmp_path / "rows", kind), max_tokens=9)]
    size = GlobalBatch(sequences=4)
    monkeypatch.setattr("lengthwise.data.reader._MARK_ROWS", 2)
    with streams(sources) as ([dataset], _):
        found = [*taken(dataset, size, 5)]
        assert [each for each, _ in found] == expected(sources, size, 5)
    with streams(sources) as ([dataset], _):
        assert [*taken(dataset, size, 4, found[0][1])] == found[1:]


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """Rows of a dataset by name, as `datasets` finds it without a network, and the same file's path."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "kept"))
    monkeypatch.setattr("lengthwise.data.hub.hub_answers", lambda address: False)
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "org/name"
    folder.mkdir(parents=True)
    rows = [{"input_ids": [number] * 3, "labels": [-100, number, number % 3]} for number in range(40)]
    path = folder / "train.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.mark.parametrize("how", ["name", "url"])
@pytest.mark.parametrize("block", [1, 16])
def test_the_library_streams_what_the_file_has_also_after_a_resume(hub, monkeypatch, how, block):
    monkeypatch.setattr("lengthwise.data.reader._MARK_ROWS", 4)
    asked = {"dataset": "org/name", "split": "train"} if how == "name" else {"path": f"file://{hub}", "streaming": True}
    sources, size = [DataSource.model_validate({**asked, "max_tokens": 9})], GlobalBatch(sequences=3)
    wanted = [each[1:] for each in expected([DataSource(path=hub)], size, 20, block=block)]
    with streams(sources, block=block) as ([dataset], _):
        found = [*taken(dataset, size, 20)]
        assert [each[1:] for each, _ in found] == wanted
        shown = "org/name:train" if how == "name" else f"file://{hub}"
        assert found[0][0][0][0][0].startswith(f"{shown}:")
    for done in (6, 15):  # in the first epoch, and the second
        with streams(sources, block=block) as ([dataset], _):
            again = taken(dataset, size, 19 - done, json.loads(json.dumps(found[done][1])))
            assert [each[1:] for each, _ in again] == wanted[done + 1 :]


def lines(folder, rows, **settings):
    path = folder / "train.jsonl"
    path.write_text("".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return [DataSource(path=path, **{"max_tokens": 9, **settings})]


@pytest.mark.parametrize("place", [0, 2000])  # which a run without a mark reads up to
def test_no_more_rows_are_held_than_those_of_some_steps_and_what_is_read_ahead(tmp_path, place):
    sources, size = lines(tmp_path, [{"text": f"{row:09}"} for row in range(3000)]), GlobalBatch(sequences=4)
    with streams(sources, ranks=2, ahead_bytes=40_000) as (datasets, reader):
        for _ in zip(*(taken(each, size, 400, (0, place)) for each in datasets), strict=True):
            assert reader.held_bytes <= 40_000 + 600 * 4 * 8
            assert max(each.num_rows for each in datasets) <= 4 * 8
        deadline = time.monotonic() + 20
        while reader.held_bytes < 40_000 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert reader.held_bytes >= 40_000


@pytest.mark.parametrize("block", [1, 16])
def test_a_place_that_the_rows_do_not_reach_any_more_is_the_begin_of_the_next_epoch(tmp_path, block):
    sources, size = lines(tmp_path, [{"text": text} for text in ("ab", "cde", "f")]), GlobalBatch(sequences=2)
    with streams(sources, block=block) as ([dataset], _):
        assert [found for found, _ in taken(dataset, size, 2, (0, 50))] == expected(sources, size, 4, block=block)[2:]


@pytest.mark.parametrize(("bad", "said"), [("{\n", "broken JSON"), ({"text": "x" * 10}, "10 tokens"), ("\n", "blank")])
def test_a_refused_row_is_named_by_file_and_line_when_its_step_comes(tmp_path, monkeypatch, bad, said):
    monkeypatch.setattr(stream_rows, "PART_BYTES", 20)
    sources = lines(tmp_path, [*[{"text": "abc"}] * 4, bad, *[{"text": "abc"}] * 4])
    with streams(sources) as ([dataset], _):
        steps = taken(dataset, GlobalBatch(sequences=2), 9)
        next(steps), next(steps)
        with pytest.raises(DataError, match=said) as caught:
            next(steps)
        assert caught.value.where == f"{tmp_path}/train.jsonl:5"


def test_a_file_that_breaks_off_and_a_stream_of_nothing_are_refused(tmp_path, hub):
    import gzip

    packed = tmp_path / "cut.jsonl.gz"
    packed.write_bytes(gzip.compress(b'{"text": "abc"}\n' * 5000)[:-9])
    hub.write_text('{"text": "a"}\n{"text"')
    for source, said in (
        ({"path": packed}, "a whole file of gzip"),
        ({"path": f"file://{hub}"}, "row 1 of the stream: expected rows that can be read; got .*JSON"),
        ({"path": lines(tmp_path, [{"text": "a" * 10}] * 3)[0].path, "too_long": "skip"}, "left out: 3 too long"),
    ):
        sources = [DataSource(**source, max_tokens=9, streaming=True)]
        with pytest.raises(DataError, match=said), streams(sources) as ([dataset], _):
            [*taken(dataset, GlobalBatch(sequences=100), 99)]


def test_what_is_no_stream_is_refused_by_name(tmp_path, hub):
    [source] = lines(tmp_path, [{"text": "abc"}])
    prepare([source], tmp_path / "prepared")
    for asked, said in (
        ({"path": tmp_path / "prepared"}, "prepared data"),
        ({"path": "https://x.org/rows.csv"}, "another ending"),
        ({"dataset": "nobody/nothing", "split": "train"}, "nobody/nothing:train"),
        ({"path": f"file://{tmp_path}/none.jsonl"}, "none.jsonl: expected a dataset that `datasets` can load"),
    ):
        with pytest.raises(DataError, match=said), streams([DataSource(**asked, max_tokens=9, streaming=True)]):
            pass


@pytest.mark.parametrize(
    ("data", "keys", "said"),
    [
        ({"max_tokens": None}, {}, "data.0.max_tokens: .*`streaming`"),
        ({"weight": 2}, {}, "data.0.weight: expected no weight beside `streaming`"),
        ({"remote": True}, {}, "data.0.streaming: .*got both"),
        ({}, {"steps": None, "epochs": 1}, "epochs: expected `steps` beside `streaming`"),
        ({}, {"eval": {"data": [{"path": "train.jsonl", "streaming": True}]}}, "eval.data.0.streaming"),
        ({"streaming": 0}, {}, "data.0.streaming"),
    ],
)
def test_settings_that_a_stream_cannot_have_are_refused(tmp_path, data, keys, said):
    lines(tmp_path, [{"text": "abc"}])
    source = {"path": "train.jsonl", "streaming": True, "max_tokens": 9, **data}
    with pytest.raises(LengthwiseError, match=said):
        build_config({"model": "tiny", "data": [source], "steps": 1, "output": "out", **keys}, tmp_path)


def test_files_that_change_have_another_digest_and_so_have_their_steps(tmp_path):
    digests, steps = set(), set()
    for rows in (["abc", "d"], ["abd", "d"], ["abc", "d", "e"]):
        with streams(lines(tmp_path, [{"text": each} for each in rows])) as ([dataset], reader):
            digests.add(dataset.digest())
            steps.add(next(dataset.batches(GlobalBatch(sequences=2))).digest)
            spec = replace(reader._spec, vocab_size=9)
            other = StreamDataset(spec, tokenizer_digest="", seed=0)
            other.attach(LocalClient(reader))
            digests.add(other.digest())
    assert len(digests) == 6
    assert len(steps) == 2  # the third has the rows of the first in its first step
