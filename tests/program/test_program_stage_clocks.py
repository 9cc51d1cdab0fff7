"""Stages as data: where layers are cut, one 1F1B order for all, what a rank does in a step, and its clocks."""

from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from testing import make_plan
from testing.fake_nccl import FakeNccl
from testing.pipelines import as_pipeline
from testing.stage_actions import device_actions, stage_items

from lengthwise.core.plan import Microbatch, Piece
from lengthwise.core.shape import LayerCut
from lengthwise.program.stage_clocks import stage_clocks
from lengthwise.program.stage_order import stage_order
from lengthwise.program.stage_program import cut_layers
from properties import costly

RANKS = 5
STAGES = st.sampled_from([1, 2, 3, 5, 8])


def _microbatches(*ranks_of: tuple[int, ...]) -> list[Microbatch]:
    return [Microbatch(pieces=(Piece(ranks=ranks, sequences=(i,)),)) for i, ranks in enumerate(ranks_of)]


def _order(microbatches: list[Microbatch], stages: int, virtual: int):
    cut = LayerCut(stages=stages, virtual=virtual)
    return stage_order([microbatch.ranks for microbatch in microbatches], cut)


intervals = st.integers(0, RANKS - 1).flatmap(
    lambda first: st.integers(first + 1, RANKS).map(lambda end: tuple(range(first, end)))
)


@given(ranks_of=st.lists(intervals, min_size=1, max_size=14), stages=STAGES, virtual=st.sampled_from([1, 2, 3]))
def test_ticks_rise_along_every_chain_and_never_meet_on_a_stage(ranks_of, stages, virtual) -> None:
    microbatches = _microbatches(*ranks_of)
    order = _order(microbatches, stages, virtual)
    assert (order.ticks[:, 1:] > order.ticks[:, :-1]).all()
    for (_, stage), listed in device_actions(microbatches, order).items():
        ticks = [int(order.ticks[action]) for action in listed]
        assert ticks == sorted(set(ticks))
        assert all(order.action_stages[step] == stage for _, step in listed)
        kept = [sum(1 if step < stages else -1 for _, step in listed[: end + 1]) for end in range(len(listed))]
        assert virtual > 1 or max(kept) <= stages - stage


def test_one_pipeline_has_the_order_of_1f1b() -> None:
    actions = device_actions(_microbatches(*[(0,)] * 4), _order(_microbatches(*[(0,)] * 4), 2, 1))
    assert actions[0, 0] == [(0, 0), (1, 0), (0, 3), (2, 0), (1, 3), (3, 0), (2, 3), (3, 3)]
    assert actions[0, 1] == [(0, 1), (0, 2), (1, 1), (1, 2), (2, 1), (2, 2), (3, 1), (3, 2)]


ENDS = st.integers(0, 12)


@given(seconds=st.lists(st.integers(1, 9), min_size=1, max_size=8), first=ENDS, last=ENDS, chunks=st.integers(1, 4))
def test_no_other_cut_of_the_layers_has_a_quicker_slowest_chunk(seconds, first, last, chunks):
    chunks = min(chunks, len(seconds))

    def slowest(borders):
        edges = [0, *borders, len(seconds)]
        took = [sum(seconds[a:b]) for a, b in pairwise(edges)]
        took[0] += first
        took[-1] += last
        return max(took)

    found = cut_layers(seconds, chunks, first_seconds=first, last_seconds=last)
    assert [layer for each in found for layer in each] == list(range(len(seconds)))
    assert all(found)
    best = min(slowest(each) for each in combinations(range(1, len(seconds)), chunks - 1))
    assert slowest([each.stop for each in found[:-1]]) == best


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
def test_clocks_are_those_of_devices_that_run_what_the_engine_posts(rows, stages, virtual) -> None:
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
