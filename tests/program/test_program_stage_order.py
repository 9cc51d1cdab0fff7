"""Interleaved 1F1B as data: one order for all pipelines, whatever rings they share, and no message out of turn."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from testing.stage_actions import check_stage_actions, device_actions

from lengthwise.core.errors import PlanError
from lengthwise.core.plan import Microbatch, Piece
from lengthwise.program.stage_order import stage_order

RANKS = 5
STAGES = st.sampled_from([1, 2, 3, 5, 8])


def _microbatches(*ranks_of: tuple[int, ...]) -> list[Microbatch]:
    return [Microbatch(pieces=(Piece(ranks=ranks, sequences=(i,)),)) for i, ranks in enumerate(ranks_of)]


def _order(microbatches: list[Microbatch], stages: int, virtual: int):
    return stage_order([microbatch.ranks for microbatch in microbatches], stages, virtual)


intervals = st.integers(0, RANKS - 1).flatmap(
    lambda first: st.integers(first + 1, RANKS).map(lambda end: tuple(range(first, end)))
)


@given(ranks_of=st.lists(intervals, min_size=1, max_size=14), stages=STAGES, virtual=st.sampled_from([1, 2, 3]))
def test_any_rings_run_through_all_stages_and_every_message_is_received(
    ranks_of: list[tuple[int, ...]], stages: int, virtual: int
) -> None:
    microbatches = _microbatches(*ranks_of)
    order = _order(microbatches, stages, virtual)
    actions = device_actions(microbatches, order)
    assert sum(map(len, actions.values())) == sum(map(len, ranks_of)) * 2 * stages * virtual
    sent = check_stage_actions(actions, microbatches, stages, virtual)
    turns = 1 if stages > 1 else 2 * stages * virtual - 1  # between these no message is needed
    assert sent == sum(map(len, ranks_of)) * (2 * stages * virtual - 1 - turns)


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


def test_orders_made_rank_by_rank_wait_for_each_other_for_ever() -> None:
    """Rings 0 and 2 of ranks 0 and 1, with a pack of rank 1 between them: alone each rank's 1F1B is right."""
    microbatches = _microbatches((0, 1), (1,), (0, 1))
    actions = device_actions(microbatches, _order(microbatches, 2, 1))
    check_stage_actions(actions, microbatches, 2, 1)
    own = device_actions(_microbatches((0,), (0,)), _order(_microbatches((0,), (0,)), 2, 1))
    for stage in (0, 1):
        actions[0, stage] = [((0, 2)[number], step) for number, step in own[0, stage]]
    with pytest.raises(PlanError, match="waiting for ever"):
        check_stage_actions(actions, microbatches, 2, 1)


def test_messages_that_overtake_each_other_are_found() -> None:
    microbatches = _microbatches((0,), (0,))
    actions = device_actions(microbatches, _order(microbatches, 2, 1))
    actions[0, 0] = [(1, 0), (0, 0), *actions[0, 0][2:]]
    actions[0, 1] = [(0, 1), (1, 1), (0, 2), (1, 2)]
    with pytest.raises(PlanError, match="rank 0, stage 1: expected the message of the forward pass of microbatch 0"):
        check_stage_actions(actions, microbatches, 2, 1)


def test_messages_that_nobody_receives_are_found() -> None:
    microbatches = _microbatches((0,))
    actions = device_actions(microbatches, _order(microbatches, 2, 1))
    with pytest.raises(PlanError, match="rank 0, stage 1: expected every message to be received"):
        check_stage_actions({(0, 0): actions[0, 0][:1], (0, 1): []}, microbatches, 2, 1)
