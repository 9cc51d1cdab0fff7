"""Interleaved 1F1B as data: one order for all pipelines, whatever rings they share, and no message out of turn."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from testing import make_plan
from testing.fake_nccl import FakeNccl, Item
from testing.pipelines import as_pipeline
from testing.stage_actions import device_actions, stage_items

from lengthwise.core.errors import TransferError
from lengthwise.core.plan import Microbatch, Piece
from lengthwise.core.shape import LayerCut
from lengthwise.program.stage_order import stage_order

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
def test_ticks_rise_along_every_chain_and_never_meet_on_a_stage(
    ranks_of: list[tuple[int, ...]], stages: int, virtual: int
) -> None:
    microbatches = _microbatches(*ranks_of)
    order = _order(microbatches, stages, virtual)
    assert (order.ticks[:, 1:] > order.ticks[:, :-1]).all()
    for (_, stage), listed in device_actions(microbatches, order).items():
        ticks = [int(order.ticks[action]) for action in listed]
        assert ticks == sorted(set(ticks))
        assert all(order.action_stages[step] == stage for _, step in listed)


@pytest.mark.parametrize("stages", [1, 2, 3, 5, 8])
def test_a_stage_keeps_no_more_microbatches_than_stages_behind_it(stages: int) -> None:
    microbatches = _microbatches((0,), (0, 1), (1,), (1,), (0, 1), (0,), (0,), (0, 1), (1,), (0,), (1,))
    for (_, stage), listed in device_actions(microbatches, _order(microbatches, stages, 1)).items():
        kept = most = 0
        for _, step in listed:
            kept += 1 if step < stages else -1
            most = max(most, kept)
        assert most <= stages - stage


def test_one_pipeline_has_the_order_of_1f1b() -> None:
    actions = device_actions(_microbatches(*[(0,)] * 4), _order(_microbatches(*[(0,)] * 4), 2, 1))
    assert actions[0, 0] == [(0, 0), (1, 0), (0, 3), (2, 0), (1, 3), (3, 0), (2, 3), (3, 3)]
    assert actions[0, 1] == [(0, 1), (0, 2), (1, 1), (1, 2), (2, 1), (2, 2), (3, 1), (3, 2)]


def test_orders_made_rank_by_rank_pair_other_rings() -> None:
    """Rings 0 and 2 of ranks 0 and 1, with a pack of rank 1 between them: alone each rank's 1F1B is right."""

    def given(packs_rank: int) -> list[list[Item]]:
        ranks_of = [(0, 1), (packs_rank,), (0, 1)]
        plan = make_plan(3, [9] * 3, [Piece(ranks=ranks, sequences=(i,)) for i, ranks in enumerate(ranks_of)])
        return stage_items(as_pipeline(plan, 2), *[lambda *_: 1.0] * 3)

    both, alone = given(1), given(2)
    assert FakeNccl(both).seconds > 0
    with pytest.raises(TransferError, match=r"expected \(2, 0, True\); got \(0, 0, False\) .* in one order"):
        FakeNccl([*alone[:2], *both[2:]])
