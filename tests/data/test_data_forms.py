"""What all forms of a dataset have alike: in memory, prepared, indexed, and several as one."""

import os
from types import SimpleNamespace

import pytest

from data.stores import load, prepare, write_sources
from data.test_data_indexed import write_indexed
from lengthwise.core.errors import DataError, Problems
from lengthwise.data import shards
from lengthwise.data.refusals import Refusals

FORMS = ("memory", "prepared", "indexed", "joined")


@pytest.fixture(params=FORMS)
def dataset(request, tmp_path):
    rows = [[{"input_ids": [1, 2, 3]}, {"input_ids": [4, 5]}, {"input_ids": [6]}]]
    sources = write_sources(tmp_path, rows)
    if request.param == "memory":
        return load(*sources)
    write_indexed(tmp_path / "indexed", [[[1, 2, 3]], [[4, 5]], [[6]]])
    if request.param == "indexed":
        return load(tmp_path / "indexed.idx")
    prepare(sources, tmp_path / "tokens")
    return load(tmp_path / "tokens") if request.param == "prepared" else load(tmp_path / "tokens", *sources)


@pytest.mark.parametrize("beyond", [-1, 0])
def test_a_row_that_there_is_none_of_is_no_other_row(dataset, beyond):
    row = -1 if beyond else dataset.num_rows
    assert dataset.num_rows == len(dataset.lengths) >= 3
    for ask in (lambda: dataset.read(row, 0, 1), lambda: dataset.name(row)):
        with pytest.raises(IndexError, match=f"row {row} of {dataset.num_rows}"):
            ask()


def test_nothing_of_it_can_be_written(dataset):
    ids, labels = dataset.read(1, 0, 2)
    assert ids.tolist() == labels.tolist() == [4, 5]
    for values in (dataset.lengths, dataset.loss_tokens, dataset.ids, ids, labels):
        with pytest.raises(ValueError, match="read-only"):
            values[0] = 0


def test_refusals_of_several_shards_are_all_counted():
    def error(number):
        return DataError(f"rows.jsonl:{number}", expected="a row", got=f"kind {number}", remedy="Correct it.")

    together, later = Refusals(), Refusals()
    for number in range(30):
        later.add(error(number), times=2)
    together.merge(later)
    assert len(together) == 60
    with pytest.raises(Problems, match="60, the first 20 above"):
        together.raise_all("data")


def test_a_file_that_grows_while_it_is_read_is_refused(tmp_path, monkeypatch):
    (source,) = write_sources(tmp_path, [[{"input_ids": [1, 2]}]])
    fstat = os.fstat

    def before(number):
        found = fstat(number)
        return SimpleNamespace(st_size=found.st_size - 1, st_mtime_ns=found.st_mtime_ns)

    monkeypatch.setattr(shards, "os", SimpleNamespace(fstat=before))
    with pytest.raises(DataError, match="a file that stays as it is"):
        prepare([source], tmp_path / "tokens")
    assert not list(tmp_path.glob("tokens*"))
