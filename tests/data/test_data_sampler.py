"""The order of an epoch and the steps cut from it."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lengthwise.config import GlobalBatch
from lengthwise.core.errors import DataError, LengthwiseError
from lengthwise.data import Batches, check_fits, check_positions
from lengthwise.data.dataset import DatasetBuilder
from lengthwise.data.sampler import epoch_order


def dataset_of(*sources):
    """Rows of these lengths, of sources (weight, lengths); a row of no token is left out."""
    builder = DatasetBuilder()
    for weight, lengths in sources:
        builder.start_source("data.0", "train.jsonl", None, weight)
        for length in lengths:
            builder.add(np.zeros(length, dtype=np.int32), None) if length else builder.skip("empty")
    return builder.finish()


def batches_of(lengths, *others, steps=None, epochs=None, seed=0, weight=1.0, **batch):
    config = SimpleNamespace(seed=seed, steps=steps, epochs=epochs, global_batch=GlobalBatch(**batch))
    return Batches(dataset_of((weight, lengths), *others), config)


def weighted(sources, **keys):
    """Batches of three from sources, each a weight and a number of rows."""
    (weight, first), *others = (
        (weight, [0 if row % 5 == 4 else row + 1 for row in range(rows)]) for weight, rows in sources
    )
    return batches_of(first, *others, weight=weight, sequences=3, **keys)


@given(ids=st.sets(st.integers(0, 2**40), max_size=50), seed=st.integers(0, 2**63 - 1), epoch=st.integers(0, 10**9))
@example(ids=range(100), seed=2**63 - 1, epoch=7)
def test_epoch_order_is_that_of_the_definition(ids, seed, epoch):
    """The order of two rows depends on no other row, nor on the order in which they come."""

    def mix(value):
        value = (value + 0x9E3779B97F4A7C15) % 2**64
        value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        value = (value ^ (value >> 27)) * 0x94D049BB133111EB % 2**64
        return value ^ (value >> 31)

    assert mix(0) == 0xE220A8397B1DCDAF  # the first output of the published splitmix64 from state 0
    expected = sorted(ids, key=lambda row: mix(mix(mix(seed) + epoch) + row))
    for reverse in (False, True):
        listed = np.array(sorted(ids, reverse=reverse), dtype=np.int64)
        assert epoch_order(listed, seed=seed, epoch=epoch).tolist() == expected


LENGTHS = st.lists(st.integers(0, 30), min_size=1, max_size=40).filter(any)
BATCH = st.one_of(
    st.fixed_dictionaries({"sequences": st.integers(1, 50)}), st.fixed_dictionaries({"tokens": st.integers(1, 200)})
)


@given(lengths=LENGTHS, batch=BATCH, epochs=st.integers(1, 3), seed=st.integers(0, 2**63 - 1))
def test_batches_of_each_epoch_are_one_permutation_cut_in_steps(lengths, batch, epochs, seed):
    batches = batches_of(lengths, epochs=epochs, seed=seed, **batch)
    steps = list(batches)
    trainable = {row for row, length in enumerate(lengths) if length}
    assert [step.step for step in steps] == list(range(1, batches.num_steps + 1))
    for epoch in range(epochs):
        own = [step.ids.tolist() for step in steps if step.epoch == epoch]
        flat = [row for taken in own for row in taken]
        assert sorted(flat) == sorted(trainable)
        assert flat == batches.order(epoch).tolist()
        for taken, following in zip(own, [*own[1:], None], strict=True):
            assert taken
            assert len(taken) == len(set(taken))
            if "sequences" in batch:
                assert len(taken) == batch["sequences"] or (following is None and len(taken) < batch["sequences"])
                continue
            tokens = sum(lengths[row] for row in taken)
            assert tokens <= batch["tokens"] or len(taken) == 1
            assert following is None or tokens + lengths[following[0]] > batch["tokens"]


@given(lengths=LENGTHS, batch=BATCH, steps=st.integers(1, 60))
def test_batches_of_steps_start_like_those_of_epochs(lengths, batch, steps):
    counted = batches_of(lengths, steps=steps, **batch)
    taken = [(batch.step, batch.epoch, batch.ids.tolist()) for batch in counted]
    assert len(taken) == counted.num_steps == steps
    epochs = taken[-1][1] + 1
    whole = [(batch.step, batch.epoch, batch.ids.tolist()) for batch in batches_of(lengths, epochs=epochs, **batch)]
    assert taken == whole[:steps]


def assert_steps_of_zero(batches, values):
    """Those that a walk finds: their number and the first."""
    walked = [(each.step, each.epoch, each.ids.tolist()) for each in batches if not values[each.ids].sum()]
    first, number = batches.steps_of_zero(values)
    assert number == len(walked)
    assert (first and (first.step, first.epoch, first.ids.tolist())) == (walked[0] if walked else None)


@given(
    lengths=LENGTHS, batch=BATCH, ends=st.sampled_from([{"steps": 1}, {"steps": 37}, {"epochs": 3}]), draw=st.randoms()
)
def test_steps_of_zero_are_those_that_a_walk_finds(lengths, batch, ends, draw):
    assert_steps_of_zero(batches_of(lengths, **ends, **batch), np.array([draw.choice((0, 0, 0, 5)) for _ in lengths]))


@pytest.mark.parametrize("ends", [{"steps": 7}, {"epochs": 60}])
def test_steps_of_zero_pass_over_epochs_that_take_no_row(ends):
    batches = weighted([(0.05, 3)], **ends)
    assert not len(batches.order(0))
    assert_steps_of_zero(batches, np.array([0, 1, 0]))


def test_batches_may_be_iterated_again_and_stopped_early():
    batches = batches_of([3] * 10, steps=10**12, sequences=4)
    first = next(iter(batches))
    assert (first.step, first.epoch, first.ids.tolist()) == (1, 0, next(iter(batches)).ids.tolist())
    assert [len(batch.ids) for batch in batches_of([3] * 10, epochs=2, tokens=10**30)] == [10, 10]
    with pytest.raises(DataError, match="at least one sequence"):
        batches_of([0, 0], steps=1, sequences=1)


@pytest.mark.parametrize(
    ("lengths", "named", "said"),
    [
        ([1, 13], 1, "1 (train.jsonl:2, 13 tokens)|at most 12 tokens|at least 4 ranks|capacity_tokens: 5"),
        (range(13, 23), 5, "10 longer|and 5 more|max_tokens: 12|too_long: skip"),
    ],
)
def test_fits_names_five_sequences_and_says_what_would_hold_them(lengths, named, said):
    limits = {"ranks": 3, "capacity_tokens": 4}
    check_fits(dataset_of((1, [1, 0, 12])), **limits)
    with pytest.raises(LengthwiseError) as caught:
        check_fits(dataset_of((1, lengths)), **limits)
    assert all(part in str(caught.value) for part in said.split("|")), str(caught.value)
    assert str(caught.value).count("train.jsonl:") == named


def test_positions_name_the_table_and_the_sequence():
    check_positions(dataset_of((1, [1, 0, 12])), positions=12)
    with pytest.raises(DataError) as caught:
        check_positions(dataset_of((1, [1, 0, 13])), positions=12)
    for part in ("2 (train.jsonl:3, 13 tokens)", "max_position_embeddings", "max_tokens: 12"):
        assert part in str(caught.value)


WEIGHT = st.one_of(st.sampled_from([1.0, 0.5, 2.0, 0.001]), st.floats(0.001, 4))


@given(
    sources=st.lists(st.tuples(WEIGHT, st.integers(1, 20)), min_size=1, max_size=4),
    seed=st.integers(0, 2**63 - 1),
    epochs=st.integers(1, 12),
)
def test_weights_say_how_often_epochs_take_a_row(sources, seed, epochs):
    batches = weighted(sources, seed=seed, steps=1)
    if batches.order(0).size:
        assert (whole := weighted(sources, seed=seed, epochs=1)).num_steps == sum(1 for _ in whole)
    orders = [batches.order(epoch).tolist() for epoch in range(epochs)]
    first = 0
    for weight, rows in sources:
        ids = [first + row for row in range(rows) if row % 5 != 4]
        for order in orders:
            times = [order.count(row) for row in ids]
            assert {math.floor(weight), math.ceil(weight)} >= set(times)
            assert abs(sum(times) - weight * len(ids)) < 1 + 1e-6
        for row in ids:
            assert abs(sum(order.count(row) for order in orders) - weight * epochs) < 1 + 1e-6
        first += rows
    assert max((order.count(row) for order in orders for row in order), default=0) <= batches.most_copies
    assert sum(map(len, orders)) == sum(1 for order in orders for row in order if 0 <= row < first)


def test_weights_that_give_no_row_are_refused():
    with pytest.raises(DataError, match="none in 2, by their weights"):
        weighted([(0.001, 1)], epochs=2)
    assert next(iter(weighted([(0.001, 1)], steps=2))).ids.tolist() == [0]
    assert weighted([(1.0, 4), (1.0, 2)], epochs=2).most_copies == 1
