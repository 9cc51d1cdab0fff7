"""Sequences of random tokens as a step's batch, with no file and no tokenizer."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lengthwise.data import NO_LOSS
from lengthwise.data.dataset import DatasetBuilder
from lengthwise.engine.batch import StepBatch


def make_batch(lengths: Sequence[int], *, vocab: int, seed: int = 0, masked: float = 0.0) -> StepBatch:
    """Draw one sequence a length; a share `masked` of the labels carries no loss."""
    random, builder = np.random.default_rng(seed), DatasetBuilder()
    builder.start_source("data.0", "random", None)
    for length in lengths:
        tokens = random.integers(0, vocab, length, dtype=np.int32)
        labels = np.where(random.random(length) < masked, NO_LOSS, tokens).astype(np.int32)
        builder.add(tokens, labels if masked else None)
    return StepBatch(builder.finish(), range(len(lengths)))
