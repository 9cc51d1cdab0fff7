"""What all forms of a dataset have alike: in memory, prepared, and several as one."""

import pytest

from data.stores import load, prepare, write_sources

FORMS = ("memory", "prepared", "joined")


@pytest.fixture(params=FORMS)
def dataset(request, tmp_path):
    rows = [[{"input_ids": [1, 2, 3]}, {"input_ids": [4, 5]}, {"input_ids": [6]}]]
    sources = write_sources(tmp_path, rows)
    if request.param == "memory":
        return load(*sources)
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
