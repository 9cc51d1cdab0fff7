"""The slots of ranks x slots: every sequence once, no slot above its room, ranks level, sizes in the asked order."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lengthwise.planner.schedules.microbatch_slots import Bundle, MicrobatchSlots, bundle_rings


@given(
    rows=st.lists(st.tuples(st.integers(1, 200), st.integers(2, 5)), max_size=20),
    most_seconds=st.floats(1, 100),
)
def test_bundles_hold_each_ring_once_within_room_and_time(rows: list[tuple[int, int]], most_seconds: float) -> None:
    rows = sorted(rows, key=lambda row: (-row[1], -row[0]))
    rings = [(i, tokens, degree, tokens / degree) for i, (tokens, degree) in enumerate(rows)]
    bundles = bundle_rings(rings, capacity_tokens=100, most_seconds=most_seconds)
    assert sorted(i for bundle in bundles for i in bundle.sequences) == list(range(len(rows)))
    for bundle in bundles:
        assert {rows[i][1] for i in bundle.sequences} == {bundle.degree}
        assert bundle.held_tokens == sum(2 * -(-rows[i][0] // (2 * bundle.degree)) for i in bundle.sequences)
        assert len(bundle.sequences) == 1 or (bundle.held_tokens <= 100 and bundle.seconds <= most_seconds * 1.02)


def test_slots_level_ranks_beside_rings_and_keep_the_order_of_sizes() -> None:
    weights = np.array([0.25, 0.5, 1.0, 1.0, 1.0, 0.5, 0.25])
    slots = MicrobatchSlots(3, weights, [Bundle((0,), 2, 40, 40.0)], 1000)
    assert slots.fill(np.ones(500, dtype=np.int64), np.ones(500), slots.targets(580 / 3))
    loads = slots.local + slots.taken
    assert np.ptp(loads.sum(axis=1)) <= 1
    assert np.all(np.abs(loads - weights * loads[2, 3]) <= 3)
    assert (slots.taken[:, 3] > 0).sum() == 2  # the ring is in the middle


def test_slots_say_when_sequences_have_no_room() -> None:
    full = MicrobatchSlots(2, np.ones(1), [], 10)
    assert not full.fill(np.array([6, 6, 6]), np.ones(3), full.targets(1.5))
    beside = MicrobatchSlots(2, np.ones(1), [Bundle((9,), 2, 30, 30.0)], 50)
    assert not beside.fill(np.array([21]), np.ones(1), beside.targets(31.0))
    assert beside.fill(np.array([20]), np.ones(1), beside.targets(31.0))


def test_rows_beyond_the_full_slots_make_more_of_them() -> None:
    slots = MicrobatchSlots(2, np.array([0.5, 1.0]), [Bundle((i,), 2, 5, 5.0) for i in range(3)], 10)
    assert slots.weights.tolist() == [0.5, 1.0, 1.0, 1.0]
    assert [len(microbatch.ranks) for microbatch in slots.microbatches(np.zeros(0, dtype=np.int64))] == [2, 2, 2]


@pytest.mark.parametrize("rank_seconds", [0.0, 7.0, 1e12])
def test_targets_come_to_what_each_rank_is_to_have(rank_seconds: float) -> None:
    slots = MicrobatchSlots(2, np.array([0.5, 1.0, 0.5]), [Bundle((0,), 1, 1, 3.0)], 10)
    targets = slots.targets(rank_seconds)
    assert targets.min() >= 0
    assert targets.sum(axis=1) + slots.taken.sum(axis=1) == pytest.approx(
        np.maximum(rank_seconds, slots.taken.sum(axis=1))
    )
