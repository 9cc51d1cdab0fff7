"""The grid of ranks x slots: every sequence once, no cell above its room, ranks level, sizes in the asked order."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lengthwise.planner.schedules.slots import Bundle, Grid, bundle_rings


@settings(max_examples=100, deadline=None)
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


@settings(max_examples=100, deadline=None)
@given(
    ranks=st.integers(1, 6),
    degrees=st.lists(st.integers(1, 6), max_size=12),
    lengths=st.lists(st.integers(1, 50), max_size=60),
    ramp=st.integers(0, 3),
)
def test_grids_place_everything_once_and_within_room(
    ranks: int, degrees: list[int], lengths: list[int], ramp: int
) -> None:
    bundles = [
        Bundle((len(lengths) + i,), min(degree, ranks), 30, 30.0) for i, degree in enumerate(degrees) if ranks > 1
    ]
    weights = np.concatenate((0.5 ** np.arange(ramp, 0, -1), np.ones(30)))
    grid = Grid(ranks, weights, bundles, 50)
    local = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    total = sum(lengths) + sum(bundle.degree * 30 for bundle in bundles)
    assert grid.fill(local, lengths, [float(length) for length in lengths], total / ranks)
    tokens = dict(enumerate(lengths))
    seen, line = [], []
    for microbatch in grid.microbatches():
        held = dict.fromkeys(microbatch.ranks, 0)
        for piece in microbatch.pieces:
            seen += piece.sequences
            line += piece.ranks
            for rank in piece.ranks:
                held[rank] += sum(tokens.get(i, 30) for i in piece.sequences)
        assert max(held.values()) <= 50
    assert sorted(seen) == list(range(len(lengths))) + [i for bundle in bundles for i in bundle.sequences]
    assert set(line) <= set(range(ranks))


def test_grids_level_ranks_beside_rings_and_keep_the_order_of_sizes() -> None:
    weights = np.array([0.25, 0.5, 1.0, 1.0, 1.0, 0.5, 0.25])
    grid = Grid(3, weights, [Bundle((0,), 2, 40, 40.0)], 1000)
    tokens = [0, *[1] * 500]
    local = list(range(1, 501))
    assert grid.fill(local, tokens, [float(n) for n in tokens], 580 / 3)
    loads = np.zeros((3, 7))
    for (rank, slot), cell in grid.cells.items():
        loads[rank, slot] = len(cell)
    loads += grid.taken
    assert np.ptp(loads.sum(axis=1)) <= 1
    assert np.all(np.abs(loads - weights * loads[2, 3]) <= 3)
    assert (grid.taken[:, 3] > 0).sum() == 2  # the ring is in the middle


def test_grids_say_when_sequences_have_no_room() -> None:
    assert not Grid(2, np.ones(1), [], 10).fill([0, 1, 2], [6, 6, 6], [1.0] * 3, 1.5)
    beside = Grid(2, np.ones(1), [Bundle((9,), 2, 30, 30.0)], 50)
    assert not beside.fill([0], [21], [1.0], 31.0)
    assert beside.fill([0], [20], [1.0], 31.0)


def test_shelves_beyond_the_full_slots_make_more_of_them() -> None:
    grid = Grid(2, np.array([0.5, 1.0]), [Bundle((i,), 2, 5, 5.0) for i in range(3)], 10)
    assert grid.weights.tolist() == [0.5, 1.0, 1.0, 1.0]
    assert [len(microbatch.ranks) for microbatch in grid.microbatches()] == [2, 2, 2]


@pytest.mark.parametrize("rank_seconds", [0.0, 7.0, 1e12])
def test_targets_come_to_what_each_rank_is_to_have(rank_seconds: float) -> None:
    grid = Grid(2, np.array([0.5, 1.0, 0.5]), [Bundle((0,), 1, 1, 3.0)], 10)
    targets = grid.targets(rank_seconds)
    assert targets.min() >= 0
    assert targets.sum(axis=1) + grid.taken.sum(axis=1) == pytest.approx(
        np.maximum(rank_seconds, grid.taken.sum(axis=1))
    )
