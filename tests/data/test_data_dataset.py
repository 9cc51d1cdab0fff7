"""What a dataset promises to those who read it, and that they ask for nothing else."""

import numpy as np

from lengthwise.data import NO_LOSS
from lengthwise.data.dataset import DatasetBuilder


def build(rows, *, own_labels=True):
    builder = DatasetBuilder()
    builder.start_source("data.0", "train.jsonl", None)
    for row in rows:
        tokens, labels = np.array(row, dtype=np.int32).reshape(-1, 2).T
        builder.add(tokens, labels if own_labels else None) if row else builder.skip("empty")
    return builder.finish()


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
