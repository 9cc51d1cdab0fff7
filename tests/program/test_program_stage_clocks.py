"""Stages on the clock: the formula of equal microbatches, and a second executor that knows no ticks."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from testing.stage_actions import device_actions

from lengthwise.core.plan import Microbatch, Piece
from lengthwise.program.stage_clocks import stage_clocks
from lengthwise.program.stage_order import stage_order
from tiers import more


@pytest.mark.parametrize("stages", [1, 2, 3, more(4), 5, more(8)])
@pytest.mark.parametrize("virtual", [1, 2, 3])
@pytest.mark.parametrize("forward", [1 / 3, more(1 / 4), more(1 / 2)])
def test_equal_microbatches_end_after_w_m_v_plus_p_minus_1(stages: int, virtual: int, forward: float) -> None:
    for count in (stages, 2 * stages, 5 * stages):
        seconds = np.full(count, 6.0)
        clocks = stage_clocks(
            [(0,)] * count, forward * seconds, (1 - forward) * seconds, stages=stages, virtual=virtual
        )
        chunk_seconds = 6.0 / virtual
        assert clocks.end.max() == pytest.approx(chunk_seconds * (count * virtual + stages - 1), rel=1e-12)


def test_uninterleaved_pipelines_follow_the_formula_for_any_count() -> None:
    for count in (1, 2, 3, 7):
        clocks = stage_clocks([(0,)] * count, np.full(count, 1.0), np.full(count, 2.0), stages=5, virtual=1)
        assert clocks.end.max() == pytest.approx(3 * (count + 4))


def test_one_microbatch_takes_its_time_once_a_stage() -> None:
    for virtual in (1, 2):
        clocks = stage_clocks([(0,)], np.array([1.0]), np.array([2.0]), stages=4, virtual=virtual)
        assert clocks.end.max() == pytest.approx(4 * 3)


@given(
    rows=st.lists(
        st.tuples(st.integers(0, 3), st.integers(1, 3), st.integers(1, 50), st.integers(1, 50), st.integers(0, 20)),
        min_size=1,
        max_size=10,
    ),
    stages=st.sampled_from([1, 2, 3, 5]),
    virtual=st.sampled_from([1, 2]),
)
def test_clocks_are_those_of_an_executor_that_follows_each_stages_list(
    rows: list[tuple[int, int, int, int, int]], stages: int, virtual: int
) -> None:
    ranks_of = [tuple(range(first, first + width)) for first, width, *_ in rows]
    counts = [len(ranks) for ranks in ranks_of]
    per_row = [np.repeat([float(row[column]) for row in rows], counts) for column in (2, 3, 4)]
    per_row[0] = per_row[0] + np.arange(sum(counts)) % 3  # ranks of a ring need not take equally long
    clocks = stage_clocks(ranks_of, *per_row[:2], stages=stages, virtual=virtual, send_seconds=per_row[2])
    ends = _followed(ranks_of, *per_row, stages, virtual)
    row = 0
    for number, ranks in enumerate(ranks_of):
        for rank in ranks:
            assert clocks.end[:, row].tolist() == pytest.approx([ends[rank, number, j] for j in range(len(clocks.end))])
            row += 1


def _followed(ranks_of, forward, backward, send, stages, virtual) -> dict[tuple[int, int, int], float]:
    """Run each stage's own list, head by head; ends by (rank, microbatch, action)."""
    microbatches = [Microbatch(pieces=(Piece(ranks=ranks, sequences=(i,)),)) for i, ranks in enumerate(ranks_of)]
    order = stage_order(ranks_of, stages, virtual)
    actions, stage_of = device_actions(microbatches, order), order.action_stages.tolist()
    row_of = {}
    for number, ranks in enumerate(ranks_of):
        for rank in ranks:
            row_of[rank, number] = len(row_of)
    place, free, link = dict.fromkeys(actions, 0), dict.fromkeys(actions, 0.0), dict.fromkeys(actions, 0.0)
    ends, come = {}, {}
    moved = True
    while moved:
        moved = False
        for device, listed in actions.items():
            if place[device] == len(listed):
                continue
            number, j = listed[place[device]]
            stage, ranks = stage_of[j], ranks_of[number]
            heads = [actions[r, stage][place[r, stage]] for r in ranks if place[r, stage] < len(actions[r, stage])]
            if heads != [(number, j)] * len(ranks) or (j and any((r, number, j) not in come for r in ranks)):
                continue
            moved = True
            start = max(max(free[r, stage], come.get((r, number, j), 0.0)) for r in ranks)
            for r in ranks:
                row = row_of[r, number]
                end = start + (forward if j < stages * virtual else backward)[row] / virtual
                ends[r, number, j] = free[r, stage] = end
                place[r, stage] += 1
                if j + 1 < len(stage_of) and stage_of[j + 1] != stage:
                    end = link[r, stage] = max(end, link[r, stage]) + send[row]
                come[r, number, j + 1] = end
    assert all(place[device] == len(listed) for device, listed in actions.items())
    return ends


def _fill(seconds: np.ndarray, stages: int) -> float:
    """Tell what one pipeline takes beyond its work, in parts of its longest microbatch; forward is a third."""
    clocks = stage_clocks([(0,)] * len(seconds), seconds / 3, seconds * 2 / 3, stages=stages, virtual=1)
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
