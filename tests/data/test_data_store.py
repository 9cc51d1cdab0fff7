"""Datasets in memory, prepared and joined: the same rows as their sources, and what a store refuses to serve."""

import json
import shutil
from pathlib import Path

import datasets
import numpy as np
import pytest
from hypothesis import given

from data.stores import DOCUMENTS, FILES, content, load, prepare, save_words, write_sources
from lengthwise.config import DataSource
from lengthwise.core.errors import DataError
from lengthwise.data import NO_LOSS, load_tokenizer
from lengthwise.data.arrow import wrong_rows
from lengthwise.data.dataset import DatasetBuilder
from lengthwise.data.prepared import NAME, signed
from lengthwise.engine.batch import StepBatch
from lengthwise.program import Segment
from properties import costly

ROWS = [[{"text": "a"}, {"text": "bcd"}, {"text": ""}, {"text": "e" * 500}], [{"input_ids": [1, 255]}]]


@pytest.fixture
def store(tmp_path):
    prepare(write_sources(tmp_path, ROWS, ["x", "yz"]), tmp_path / "store")
    return tmp_path / "store"


@given(files=FILES, documents=DOCUMENTS)
@costly
def test_store_is_the_same_data_as_its_sources(tmp_path_factory, files, documents):
    folder = tmp_path_factory.mktemp("data")
    sources = write_sources(folder, [[{"text": "one that is left"}], *files], documents)
    prepare(sources, folder / "store")
    expected = load(*sources)
    found = load(folder / "store")
    assert content(found) == content(expected)
    for row in expected.ids.tolist():
        parts = [[each.tolist() for each in dataset.read(row, 1, 3)] for dataset in (found, expected)]
        assert parts[0] == parts[1], row
    middle = max(1, int(expected.lengths.max()) // 2)
    limits = {"max_tokens": middle, "too_long": "skip"}
    if any(0 < length <= middle for length in expected.lengths):
        limited = [each.model_copy(update=limits) for each in sources]
        assert content(load(folder / "store", **limits)) == content(load(*limited))


@pytest.mark.parametrize("weighed", [None, 0, 1])
def test_store_beside_other_sources_is_all_their_rows_in_order(tmp_path, weighed):
    """A row with weights is in no source, before the store, or in it."""
    row = {"input_ids": [1, 2, 3], "weights": [1, 0, 2.5]}
    rows = [[*each, row] if number == weighed else each for number, each in enumerate(ROWS)]
    sources = write_sources(tmp_path, rows, ["x", "yz"])
    prepare(sources[1:2], tmp_path / "store")
    mixed = [sources[0], DataSource(path=tmp_path / "store"), sources[2]]
    assert content(load(*mixed)) == content(load(*sources))
    last = len(load(*mixed).lengths) - 1
    assert [load(*mixed).source_key(row) for row in (0, 4 + (weighed == 0), last)] == ["data.0", "data.1", "data.2"]


def test_store_of_rows_that_are_not_asked_for_is_refused_by_their_source(tmp_path, store):
    with pytest.raises(DataError, match=r"rows-0\.jsonl:4: expected at most max_tokens 400; got 500 tokens"):
        load(store, max_tokens=400)
    with pytest.raises(DataError, match=r"below the model's 255; got id 255 in row 6 \(rows-1\.jsonl:1\)"):
        load(store, vocab_size=255)
    prepare(write_sources(tmp_path / "short", ROWS, max_tokens=3, too_long="skip"), tmp_path / "left")
    assert load(tmp_path / "left", max_tokens=3).skipped == {"empty": 1, "too long": 1}
    with pytest.raises(DataError, match="prepared data that left out 1 rows of more than 3"):
        load(tmp_path / "left", max_tokens=1000)


def arrow_of(folder):
    return next(iter(sorted(folder.glob("data-*.arrow"))))


@pytest.mark.parametrize("change", ["cut", "longer", "gone", "link", "number", "name"])
def test_store_with_a_damaged_or_missing_file_is_refused_by_name(store, change):
    part, made = arrow_of(store), store / NAME
    values, expected, raw = json.loads(made.read_text()), part.name, part.read_bytes()
    if change in ("cut", "longer"):
        part.write_bytes(raw[:-1] if change == "cut" else raw + b"\0")
    elif change == "gone":
        part.unlink()
    elif change == "link":
        part.rename(store / "elsewhere")
        part.symlink_to(store / "elsewhere")
    else:
        expected = NAME
        values |= {"rows": -1} if change == "number" else {"files": {"../rows-0.arrow": 1}}
        made.write_text(signed(values))
    with pytest.raises(DataError) as caught:
        load(store)
    assert Path(caught.value.where).name == expected


def flip(folder, values, kind="<i4", place=-1):
    """Change a byte of a value in an Arrow file, in its place; `values` are what lies there."""
    path = arrow_of(folder)
    raw, wanted = path.read_bytes(), np.array(values, dtype=kind).tobytes()
    assert raw.count(wanted) == 1
    byte = raw.index(wanted) + len(wanted) + place * np.dtype(kind).itemsize
    with path.open("r+b") as file:
        file.seek(byte)
        file.write(bytes([raw[byte] ^ 1]))
    return path


@pytest.fixture
def weighed(tmp_path):
    """Prepare rows of which the second has labels and the third weights, nine tokens in one file."""
    labels, weights = {"labels": [-100, 4, 5]}, {"weights": [0.5, 0, 2]}
    rows = [{"input_ids": [1, 2, 3], **more} for more in ({}, labels, weights)]
    prepare(write_sources(tmp_path, [rows]), tmp_path / "weighed")
    return tmp_path / "weighed"


LISTS = {"ids": [1, 2, 3, 1, 2, 3], "labels": [-100, 4, 5], "weights": [0.5, 0, 2]}


@pytest.mark.parametrize("part", LISTS)
@pytest.mark.parametrize("opened", [False, True])
def test_store_whose_tokens_changed_is_named_with_the_row_that_is_read(weighed, part, opened):
    dataset = load(weighed)
    assert list(wrong_rows(weighed, lambda _row: None)) == []
    path = flip(weighed, LISTS[part], "<f4" if part == "weights" else "<i4")
    (found,) = wrong_rows(weighed, lambda _row: None)
    assert (found.where, found.expected.count("rows-0.jsonl:")) == (str(path), 1)
    dataset, row = dataset if opened else load(weighed), 2 if part == "weights" else 1
    assert dataset.read(0, 0, 3)[0].tolist() == [1, 2, 3]
    for read in (dataset.read, dataset.read_weights):
        with pytest.raises(DataError, match=rf"expected row {row} \(rows-0\.jsonl:{row + 1}\) as") as caught:
            read(row, 0, 1)
        assert caught.value.where == str(path)


@pytest.mark.parametrize(
    ("values", "kind"), [([0, 3, 6, 9], "<i4"), ([2, 2, 1], "<i8"), ([2.0, 2.0, 2.0], "<f8")], ids=str
)
def test_store_whose_other_columns_changed_is_refused(weighed, values, kind):
    flip(weighed, values, kind)
    with pytest.raises(DataError, match=r"columns of SHA-256|an Arrow stream") as caught:
        load(weighed)
    assert Path(caught.value.where) in (weighed, arrow_of(weighed))


@pytest.mark.parametrize(
    "changed", [{"data": "0" * 64}, {"origins": []}, {"sha256": None}, {"schema": "lengthwise.prepared/0"}], ids=str
)
def test_store_whose_description_changed_is_refused_with_what_to_do(store, changed):
    made = store / NAME
    made.write_text(json.dumps(json.loads(made.read_text()) | changed))
    with pytest.raises(DataError, match="lengthwise prepare") as caught:
        load(store)
    assert caught.value.where == str(made)
    made.rename(store / "lengthwise-store.json")
    with pytest.raises(DataError, match=r"an earlier one .*lengthwise prepare SOURCES --out"):
        load(store)
    (store / "lengthwise-store.json").unlink()
    with pytest.raises(DataError, match="data that is being prepared"):
        load(store.rename(store.with_name("store.unfinished")))


def test_store_is_a_dataset_of_the_library_whose_rows_a_loop_takes(weighed):
    from lengthwise.session.row_batch import RowBatch

    ours, rows = load(weighed), datasets.load_from_disk(str(weighed))
    theirs = RowBatch(list(rows.select_columns(["input_ids", "labels", "weights"]))).dataset
    assert content(theirs)["rows"] == content(ours)["rows"]
    assert content(theirs)["weights"] == content(ours)["weights"]


def test_store_that_is_replaced_while_it_is_open_stays_what_it_was(tmp_path):
    sources = write_sources(tmp_path, ROWS, ["x", "yz"])
    prepare(sources, tmp_path / "store")
    expected, dataset = content(load(tmp_path / "store")), load(tmp_path / "store")
    sources[0].path.write_text('{"text": "other"}\n')
    prepare(sources, tmp_path / "store", overwrite=True)
    assert content(load(tmp_path / "store")) != expected
    assert content(dataset) == expected


@pytest.mark.parametrize("kind", ["text", "chat", "ids"])
def test_store_of_another_tokenizer_or_template_is_refused_by_name(tmp_path, kind):
    plain, known = "{% for m in messages %}{{ m.content }} <end> {% endfor %}", ["<unk>", "a", "b", "<end>"]
    others = {"one": (known, plain), "words": ([*known, "c"], plain), "template": (known, "b " + plain)}
    one, words, template = (save_words(tmp_path / name, each, template=of) for name, (each, of) in others.items())
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    rows = {"text": {"text": "a b"}, "chat": {"messages": messages}, "ids": {"input_ids": [1, 2]}}
    sources = write_sources(tmp_path, [[rows[kind]]])
    prepare(sources, tmp_path / "store", name=one, tokenizer=lambda: load_tokenizer(one))
    copy = str(shutil.copytree(one, tmp_path / "copy"))
    expected = content(load(*sources, tokenizer=lambda: load_tokenizer(one)))
    refused = {words: "the tokenizer of", template: "the chat template of"}
    taken = {"text": [copy, template], "chat": [copy], "ids": [copy, words, template]}[kind]
    for name in (copy, words, template):
        if name in taken:
            assert content(load(tmp_path / "store", tokenizer=lambda name=name: load_tokenizer(name))) == expected
        else:
            with pytest.raises(DataError, match=rf"{refused[name]} {name} .*prepared with that of {one}"):
                load(tmp_path / "store", tokenizer=lambda name=name: load_tokenizer(name))


def test_a_batch_asks_for_the_rows_of_its_segments_and_reads_none(tmp_path, monkeypatch):
    rows = [{"input_ids": [*range(10)]}, {"input_ids": [20, 21, 22], "labels": [-100, 21, 22]}]
    prepare(write_sources(tmp_path, [rows]), tmp_path / "store")
    batch, asked = StepBatch(load(tmp_path / "store"), [1, 0]), list[list[int]]()
    monkeypatch.setattr("lengthwise.data.arrow.read_ahead", lambda values: asked.append(values.tolist()))
    monkeypatch.setattr("lengthwise.data.arrow.row_digest", lambda *_row: pytest.fail("a row was read"))
    batch.read_ahead([Segment(sequence=0, start=1, stop=2), Segment(sequence=1, start=2, stop=4)])
    assert asked == [[20, 21, 22], [-100, 21, 22], [*range(10)]]


@pytest.fixture(params=["memory", "prepared", "joined"])
def dataset(request, tmp_path):
    rows = [[{"input_ids": [1, 2, 3]}, {"input_ids": [4, 5]}, {"input_ids": [6]}]]
    sources = write_sources(tmp_path, rows)
    if request.param == "memory":
        return load(*sources)
    prepare(sources, tmp_path / "tokens")
    return load(tmp_path / "tokens") if request.param == "prepared" else load(tmp_path / "tokens", *sources)


def test_a_row_that_there_is_none_of_is_no_other_row(dataset):
    assert dataset.num_rows == len(dataset.lengths) >= 3
    for row in (-1, dataset.num_rows):
        for ask in (lambda row=row: dataset.read(row, 0, 1), lambda row=row: dataset.name(row)):
            with pytest.raises(IndexError, match=f"row {row} of {dataset.num_rows}"):
                ask()


def test_nothing_of_it_can_be_written(dataset):
    ids, labels = dataset.read(1, 0, 2)
    assert ids.tolist() == labels.tolist() == [4, 5]
    for values in (dataset.lengths, dataset.loss_tokens, dataset.ids, ids, labels):
        with pytest.raises(ValueError, match="read-only"):
            values[0] = 0


def build(rows, *, own_labels=True):
    builder = DatasetBuilder()
    builder.start_source("data.0", "train.jsonl", None)
    for row in rows:
        tokens, labels = np.array(row, dtype=np.int32).reshape(-1, 2).T
        builder.add(tokens, labels if own_labels else None) if row else builder.skip("empty")
    return builder.finish()


def test_dataset_digest_differs_with_tokens_labels_and_borders():
    rows = [[(1, 1), (2, 2)], [(3, 3)]]
    labels, tokens, borders = [(1, 1), (2, NO_LOSS)], [(1, 1), (4, 2)], [[(1, 1)], [(2, 2), (3, 3)]]
    digests = [build(each).digest() for each in (rows, [labels, rows[1]], [tokens, rows[1]], borders, [*rows, []])]
    assert build(rows).digest() == build(rows, own_labels=False).digest() == digests[0]
    assert len(set(digests)) == len(digests)
