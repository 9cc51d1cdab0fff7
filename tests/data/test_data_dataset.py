"""What a dataset promises to those who read it, and that they ask for nothing else."""

from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lengthwise.config import GlobalBatch
from lengthwise.core.errors import DataError
from lengthwise.data import NO_LOSS, Batches, check_fits, check_positions
from lengthwise.data.dataset import DatasetBuilder

ROWS = st.lists(
    st.lists(st.tuples(st.integers(0, 99), st.sampled_from([NO_LOSS, 5])), max_size=7), min_size=1, max_size=8
)


def build(rows, *, own_labels=True):
    builder = DatasetBuilder()
    builder.start_source("data.0", "train.jsonl", None)
    for row in rows:
        tokens, labels = np.array(row, dtype=np.int32).reshape(-1, 2).T
        builder.add(tokens, labels if own_labels else None) if row else builder.skip("empty")
    return builder.finish()


class ListedDataset:
    """The protocol and no more, over plain lists."""

    def __init__(self, rows):
        self._rows = rows
        self.lengths = np.array([len(row) for row in rows], dtype=np.int64)
        self.loss_tokens = np.array([sum(label != NO_LOSS for _, label in row[1:]) for row in rows], dtype=np.int64)
        self.loss_weights = self.loss_tokens
        self.ids = np.flatnonzero(self.lengths)
        self.weights = ((0, 1.0),)

    def read_weights(self, row, start, stop):
        return None

    def read(self, row, start, stop):
        return tuple(np.array(self._rows[row], dtype=np.int32).reshape(-1, 2).T[:, start:stop])

    def digest(self):
        return repr(self._rows).encode()

    def name(self, row):
        return f"row {row}"

    def source_key(self, _row):
        return "data.0"


@given(rows=ROWS, own_labels=st.booleans())
def test_dataset_counts_and_reads_what_was_added(rows, own_labels):
    dataset = build(rows, own_labels=own_labels)
    written = rows if own_labels else [[(token, token) for token, _ in row] for row in rows]
    expected = ListedDataset(written)
    for name in ("lengths", "loss_tokens", "ids"):
        assert getattr(dataset, name).tolist() == getattr(expected, name).tolist(), name
    for row, length in enumerate(dataset.lengths):
        for start in range(length + 1):
            for stop in range(start, length + 1):
                got, asked = dataset.read(row, start, stop), expected.read(row, start, stop)
                assert [each.tolist() for each in got] == [each.tolist() for each in asked]


def test_dataset_digest_differs_with_tokens_labels_and_borders():
    rows = [[(1, 1), (2, 2)], [(3, 3)]]
    digests = [
        build(rows).digest(),
        build([[(1, 1), (2, NO_LOSS)], [(3, 3)]]).digest(),
        build([[(1, 1), (4, 2)], [(3, 3)]]).digest(),
        build([[(1, 1)], [(2, 2), (3, 3)]]).digest(),
        build([*rows, []]).digest(),
    ]
    assert build(rows).digest() == build(rows, own_labels=False).digest() == digests[0]
    assert len(set(digests)) == len(digests)
    assert {len(digest) for digest in digests} == {32}


def test_dataset_of_another_kind_serves_batches_checks_and_steps():
    rows = [[(i, i) for i in range(length)] for length in (3, 0, 5, 1, 8)]
    plain, listed = build(rows), ListedDataset(rows)
    config = SimpleNamespace(seed=3, steps=None, epochs=2, global_batch=GlobalBatch(sequences=2))
    orders = [[batch.ids.tolist() for batch in Batches(dataset, config)] for dataset in (plain, listed)]
    assert orders[0] == orders[1]
    for check in (lambda d: check_fits(d, ranks=1, capacity_tokens=5), lambda d: check_positions(d, positions=7)):
        with pytest.raises(DataError, match=r"4 \(row 4, 8 tokens\)"):
            check(listed)
    assert step_tensors(plain) == step_tensors(listed)


def step_tensors(dataset):
    from lengthwise.engine.batch import StepBatch
    from lengthwise.program import Segment

    batch = StepBatch(dataset, [4, 0])
    cuts = (0, 1, 1, 5, 8)
    segments = [Segment(sequence=0, start=start, stop=stop) for start, stop in pairwise(cuts)]
    whole = Segment(sequence=1, start=0, stop=3)
    return batch.loss_tokens, [tensor.tolist() for tensor in batch.tensors([*segments, whole])]
