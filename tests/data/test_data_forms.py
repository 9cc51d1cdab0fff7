"""What all forms of a dataset promise to who reads them: in memory, prepared, and several as one."""

import numpy as np
import pytest

from data.stores import load, prepare, write_sources
from lengthwise.data import NO_LOSS
from lengthwise.data.dataset import DatasetBuilder


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
