"""Stages on the clock: the formula of equal microbatches, and what devices do with the calls that the engine posts."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from testing import make_plan
from testing.fake_nccl import FakeNccl
from testing.pipelines import as_pipeline
from testing.stage_actions import stage_items

from lengthwise.core.plan import Piece
from lengthwise.core.shape import LayerCut
from lengthwise.program.stage_clocks import stage_clocks
from properties import costly


@pytest.mark.parametrize("stages", [1, 2, 3, 5])
@pytest.mark.parametrize("virtual", [1, 2, 3])
def test_equal_microbatches_end_after_w_m_v_plus_p_minus_1(stages: int, virtual: int) -> None:
    for count in (stages, 2 * stages, 5 * stages):
        seconds = np.full(count, 6.0)
        cut = LayerCut(stages=stages, virtual=virtual)
        clocks = stage_clocks([(0,)] * count, seconds / 3, seconds * 2 / 3, cut)
        chunk_seconds = 6.0 / virtual
        assert clocks.end.max() == pytest.approx(chunk_seconds * (count * virtual + stages - 1), rel=1e-12)


def test_uninterleaved_pipelines_follow_the_formula_for_any_count() -> None:
    for count in (1, 2, 3, 7):
        clocks = stage_clocks([(0,)] * count, np.full(count, 1.0), np.full(count, 2.0), LayerCut(stages=5))
        assert clocks.end.max() == pytest.approx(3 * (count + 4))


def test_one_microbatch_takes_its_time_once_a_stage() -> None:
    for virtual in (1, 2):
        clocks = stage_clocks([(0,)], np.array([1.0]), np.array([2.0]), LayerCut(stages=4, virtual=virtual))
        assert clocks.end.max() == pytest.approx(4 * 3)


@costly
@given(
    rows=st.lists(
        st.tuples(st.integers(0, 3), st.integers(1, 3), st.integers(1, 50), st.integers(1, 50), st.integers(0, 20)),
        min_size=1,
        max_size=10,
    ),
    stages=st.sampled_from([1, 2, 3, 5]),
    virtual=st.sampled_from([1, 2]),
)
def test_clocks_are_those_of_devices_that_run_what_the_engine_posts(
    rows: list[tuple[int, int, int, int, int]], stages: int, virtual: int
) -> None:
    """Nothing waits for ever, whichever rings pipelines share."""
    ranks_of = [tuple(range(first, first + width)) for first, width, *_ in rows]
    pieces = [Piece(ranks=ranks, sequences=(number,)) for number, ranks in enumerate(ranks_of)]
    plan = as_pipeline(make_plan(6, [9] * len(rows), pieces), stages, virtual)

    def forward(number: int, rank: int) -> float:
        return (rows[number][2] + rank % 3) / virtual  # ranks of a ring need not take equally long

    def backward(number: int, rank: int) -> float:
        return rows[number][3] / virtual

    def send(number: int, rank: int) -> float:
        return rows[number][4] + rank % 2

    per_row = [
        np.array([each(number, rank) for number, ranks in enumerate(ranks_of) for rank in ranks], dtype=float)
        for each in (forward, backward, send)
    ]
    passes = [virtual * each for each in per_row[:2]]
    clocks = stage_clocks(ranks_of, *passes, LayerCut(stages=stages, virtual=virtual), send_seconds=per_row[2])
    ends, chunks = FakeNccl(stage_items(plan, forward, backward, send)).ends, [*range(stages * virtual)]
    assert len(ends) == clocks.end.size
    row = 0
    for number, ranks in enumerate(ranks_of):
        for rank in ranks:
            actions = [*((each, True) for each in chunks), *((each, False) for each in chunks[::-1])]
            found = [ends[rank * stages + chunk % stages, (number, chunk, way)] for chunk, way in actions]
            assert clocks.end[:, row].tolist() == pytest.approx(found)
            row += 1


def _fill(seconds: np.ndarray, stages: int) -> float:
    """Tell what one pipeline takes beyond its work, in parts of its longest microbatch; forward is a third."""
    clocks = stage_clocks([(0,)] * len(seconds), seconds / 3, seconds * 2 / 3, LayerCut(stages=stages))
    return float((clocks.end.max() - seconds.sum()) / seconds.max())


def test_bubbles_of_unequal_microbatches_depend_on_their_order() -> None:
    """What docs/simulate.md says of 64 microbatches on 4 stages, where the formula has 3."""
    rng = np.random.default_rng(0)
    lengths = np.sort(rng.random(64))
    assert _fill(rng.permutation(lengths), 4) > 15
    assert 2.0 < _fill(lengths[::-1], 4) < 2.3
    assert 1.0 < _fill(np.concatenate((lengths[::2], lengths[1::2][::-1])), 4) < 1.3


def test_slots_that_grow_from_the_ends_lose_less_to_bubbles() -> None:
    """32 full packs in 8 stages: 1.22 of their work, 1.09 with ramps."""
    assert _fill(np.ones(32), 8) == pytest.approx(7)
    ramp = 1.1 ** np.arange(-59, 0.0)
    full = 32 - 2 * ramp.sum()
    hill = np.concatenate((ramp, np.full(int(np.ceil(full)), full / np.ceil(full)), ramp[::-1]))
    assert _fill(hill, 8) * hill.max() / 32 < 0.09
