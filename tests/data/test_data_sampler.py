"""The order of an epoch and the steps cut from it."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lengthwise.config import GlobalBatch
from lengthwise.core.errors import DataError, LengthwiseError
from lengthwise.data import Batches, check_fits, check_positions
from lengthwise.data.dataset import DatasetBuilder
from lengthwise.data.sampler import epoch_order

GOLDEN = {
    (0, 0): [4, 8, 0, 1, 7, 6, 2, 5, 3, 9],
    (0, 1): [9, 7, 0, 1, 6, 3, 4, 5, 2, 8],
    (2**63 - 1, 7): [6, 0, 8, 2, 9, 1, 5, 3, 7, 4],
}


def dataset_of(lengths):
    builder = DatasetBuilder()
    builder.start_source("data.0", "train.jsonl", None)
    for length in lengths:
        builder.add(np.zeros(length, dtype=np.int32), None) if length else builder.skip("empty")
    return builder.finish()


def weighted(sources, *, seed=0, epochs=None, steps=None, sequences=3):
    """Batches of sources, each a weight and a number of rows."""
    builder = DatasetBuilder()
    for weight, rows in sources:
        builder.start_source("data.0", "train.jsonl", None, weight)
        for row in range(rows):
            builder.add(np.zeros(row + 1, dtype=np.int32), None) if row % 5 != 4 else builder.skip("empty")
    batch = GlobalBatch(sequences=sequences)
    return Batches(builder.finish(), SimpleNamespace(seed=seed, steps=steps, epochs=epochs, global_batch=batch))


def batches_of(lengths, *, steps=None, epochs=None, seed=0, **batch):
    config = SimpleNamespace(seed=seed, steps=steps, epochs=epochs, global_batch=GlobalBatch(**batch))
    return Batches(dataset_of(lengths), config)


def test_epoch_order_golden():
    ids = np.arange(10)
    assert epoch_order(ids, seed=0, epoch=0).tolist() == GOLDEN[0, 0]
    assert epoch_order(ids, seed=0, epoch=1).tolist() == GOLDEN[0, 1]
    assert epoch_order(ids, seed=2**63 - 1, epoch=7).tolist() == GOLDEN[2**63 - 1, 7]


def test_epoch_order_of_an_id_is_that_of_the_definition():
    def mix(value):
        value = (value + 0x9E3779B97F4A7C15) % 2**64
        value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        value = (value ^ (value >> 27)) * 0x94D049BB133111EB % 2**64
        return value ^ (value >> 31)

    assert mix(0) == 0xE220A8397B1DCDAF  # the first output of the published splitmix64 from state 0
    expected = sorted(range(100), key=lambda row: mix(mix(mix(5) + 3) + row))
    assert epoch_order(np.arange(100), seed=5, epoch=3).tolist() == expected


@given(ids=st.sets(st.integers(0, 2**40), max_size=50), seed=st.integers(0, 2**63 - 1), epoch=st.integers(0, 10**9))
def test_epoch_order_is_a_permutation_whatever_order_ids_come_in(ids, seed, epoch):
    ordered = epoch_order(np.array(sorted(ids), dtype=np.int64), seed=seed, epoch=epoch)
    backwards = epoch_order(np.array(sorted(ids, reverse=True), dtype=np.int64), seed=seed, epoch=epoch)
    assert set(ordered.tolist()) == ids
    assert ordered.tolist() == backwards.tolist()


def test_epoch_order_leaving_rows_out_keeps_the_order_of_the_others():
    every = epoch_order(np.arange(100), seed=1, epoch=0)
    even = epoch_order(np.arange(0, 100, 2), seed=1, epoch=0)
    assert even.tolist() == [row for row in every.tolist() if row % 2 == 0]


def test_epoch_order_differs_between_epochs_and_seeds():
    orders = {tuple(epoch_order(np.arange(50), seed=seed, epoch=epoch)) for seed in range(5) for epoch in range(5)}
    assert len(orders) == 25


def test_epoch_order_puts_every_id_everywhere_about_equally():
    places = np.array([np.argsort(epoch_order(np.arange(8), seed=0, epoch=epoch)) for epoch in range(4000)])
    counts = np.stack([np.bincount(places[:, row], minlength=8) for row in range(8)])
    assert np.abs(counts - 500).max() < 5 * np.sqrt(500)


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


@given(
    lengths=LENGTHS, batch=BATCH, ends=st.sampled_from([{"steps": 1}, {"steps": 37}, {"epochs": 3}]), draw=st.randoms()
)
def test_steps_of_zero_are_those_that_a_walk_finds(lengths, batch, ends, draw):
    batches = batches_of(lengths, **ends, **batch)
    values = np.array([draw.choice((0, 0, 0, 5)) for _ in lengths])
    walked = [each for each in batches if not values[each.ids].sum()]
    first, number = batches.steps_of_zero(values)
    assert number == len(walked)
    assert (first is None) == (not walked)
    if first is not None:
        assert (first.step, first.epoch, first.ids.tolist()) == (
            walked[0].step, walked[0].epoch, walked[0].ids.tolist()
        )  # fmt: skip


@pytest.mark.parametrize("ends", [{"steps": 7}, {"epochs": 60}])
def test_steps_of_zero_pass_over_epochs_that_take_no_row(ends):
    batches = weighted([(0.05, 3)], **ends)
    assert not len(batches.order(0))
    values = np.array([0, 1, 0])
    walked = [each for each in batches if not values[each.ids].sum()]
    first, number = batches.steps_of_zero(values)
    assert number == len(walked) > 0
    assert (first.step, first.epoch, first.ids.tolist()) == (walked[0].step, walked[0].epoch, walked[0].ids.tolist())


def test_batches_may_be_iterated_again_and_stopped_early():
    batches = batches_of([3] * 10, steps=10**12, sequences=4)
    first = next(iter(batches))
    assert (first.step, first.epoch, first.ids.tolist()) == (1, 0, next(iter(batches)).ids.tolist())


def test_batches_token_budget_beyond_int64_takes_everything():
    assert [len(batch.ids) for batch in batches_of([3] * 10, epochs=2, tokens=10**30)] == [10, 10]


def test_batches_without_sequences_are_an_error():
    with pytest.raises(DataError, match="at least one sequence"):
        batches_of([0, 0], steps=1, sequences=1)


def test_fits_passes_up_to_the_limit():
    check_fits(dataset_of([1, 0, 12]), ranks=3, capacity_tokens=4)


def test_fits_names_the_sequence_and_what_would_hold_it():
    with pytest.raises(LengthwiseError) as caught:
        check_fits(dataset_of([1, 0, 13]), ranks=3, capacity_tokens=4)
    told = str(caught.value)
    assert "2 (train.jsonl:3, 13 tokens)" in told
    assert "at most 12 tokens" in told
    for remedy in ("at least 4 ranks", "capacity_tokens: 5", "max_tokens: 12", "too_long: skip"):
        assert remedy in told


def test_what_would_hold_a_sequence_counts_what_is_offloaded():
    check_fits(dataset_of([1, 0, 15]), ranks=3, capacity_tokens=4, held_tokens=5)
    with pytest.raises(LengthwiseError) as caught:
        check_fits(dataset_of([1, 0, 31]), ranks=3, capacity_tokens=4, held_tokens=5)
    for told in ("at most 15 tokens", "5 tokens each, with offload", "at least 7 ranks", "capacity_tokens: 9 or auto"):
        assert told in str(caught.value)


def test_positions_name_the_table_and_the_sequence():
    check_positions(dataset_of([1, 0, 12]), positions=12)
    with pytest.raises(DataError) as caught:
        check_positions(dataset_of([1, 0, 13]), positions=12)
    for part in ("2 (train.jsonl:3, 13 tokens)", "max_position_embeddings", "max_tokens: 12"):
        assert part in str(caught.value)


def test_fits_names_five_and_counts_the_others():
    with pytest.raises(DataError) as caught:
        check_fits(dataset_of(range(10, 20)), ranks=1, capacity_tokens=9)
    told = str(caught.value)
    assert "10 longer" in told
    assert "and 5 more" in told
    assert told.count("train.jsonl:") == 5


WEIGHT = st.one_of(st.sampled_from([1.0, 0.5, 2.0, 0.001]), st.floats(0.001, 4))


@given(
    sources=st.lists(st.tuples(WEIGHT, st.integers(1, 20)), min_size=1, max_size=4),
    seed=st.integers(0, 2**63 - 1),
    epochs=st.integers(1, 12),
)
def test_weights_say_how_often_epochs_take_a_row(sources, seed, epochs):
    batches = weighted(sources, seed=seed, steps=1)
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


def test_weights_of_one_are_no_weights():
    plain, one = batches_of([1, 2, 3, 4, 0, 1], epochs=2, sequences=2), weighted([(1.0, 4), (1.0, 2)], epochs=2)
    assert plain.order(1).tolist() == [row for row in one.order(1).tolist() if row != 4]
    assert one.most_copies == 1


def test_weights_give_other_rows_a_turn_in_the_next_epoch():
    batches = weighted([(0.5, 4), (1.0, 3)], epochs=2)
    orders = [set(batches.order(epoch).tolist()) for epoch in range(2)]
    assert orders[0] & orders[1] == {4, 5, 6}
    assert orders[0] | orders[1] == set(range(7))


def test_weights_count_steps_and_batches_alike():
    batches = weighted([(1.7, 13), (0.3, 9)], epochs=5)
    assert batches.num_steps == sum(1 for _ in batches)
    assert [batch.ids.tolist() for batch in batches] == [
        batch.ids.tolist() for batch in weighted([(1.7, 13), (0.3, 9)], epochs=5)
    ]


def test_weights_that_give_no_row_are_refused():
    with pytest.raises(DataError, match="none in 2, by their weights"):
        weighted([(0.001, 1)], epochs=2)
    assert next(iter(weighted([(0.001, 1)], steps=2))).ids.tolist() == [0]
