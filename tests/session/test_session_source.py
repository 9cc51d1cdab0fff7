"""Steps that are planned ahead: the same ones in the same order on all ranks, however long each plan takes."""

import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from testing import make_batch, make_plan
from testing.strict import StrictWorld

from lengthwise.comm import SoloTransport
from lengthwise.core.errors import LengthwiseError
from lengthwise.core.plan import Piece
from lengthwise.engine.batch import StepBatch
from lengthwise.session.source import STEPS_AHEAD, PlanAhead

DATA = make_batch(range(1, 41), vocab=50).dataset


def plan_of(lengths, ranks):
    """Plan a step by hand: sequence i on rank i % ranks, one after the other; as the planner gives it."""
    plan = make_plan(ranks, lengths, [Piece(sequences=(i,), ranks=(i % ranks,)) for i in range(len(lengths))])
    return plan.to_json(), 0.0


def ahead_of(batches, planner, transport, *, timeout_seconds=20):
    steps = iter([StepBatch(DATA, ids) for ids in batches])
    of_batch = None if transport.rank else lambda batch: planner(batch.lengths)
    return PlanAhead(steps, of_batch, transport, timeout_seconds=timeout_seconds)


@given(
    batches=st.lists(st.lists(st.integers(0, 39), min_size=1, max_size=5), max_size=7),
    ranks=st.sampled_from([1, 2, 3, 5]),
    delays=st.lists(st.sampled_from([0.0, 0.0, 0.004]), min_size=7, max_size=7),
    pause=st.sampled_from([0.0, 0.006]),
)
def test_all_ranks_take_all_steps_in_order(batches, ranks, delays, pause):
    def work(transport):
        made = iter(delays)

        def planner(lengths):
            time.sleep(next(made))
            return plan_of(lengths, ranks)

        ahead, found = ahead_of(batches, planner, transport), []
        while (step := ahead.next(f"step {len(found) + 1}")) is not None:
            assert step.plan.tokens == step.batch.lengths
            found.append(step.batch.ids)
            time.sleep(pause)
        assert ahead.next("the end") is None
        ahead.close()
        return found

    for found in StrictWorld(ranks).run(work):
        assert found == [tuple(each) for each in batches]


def test_steps_are_planned_and_read_before_they_come(monkeypatch):
    """Two of them, and no more: what a run learns from its steps comes into the next plans."""
    planned, read = [], []
    monkeypatch.setattr(StepBatch, "read_ahead", lambda self, segments: read.append(self.ids[0]) if segments else None)

    def planner(lengths):
        planned.append(lengths[0] - 1)
        return plan_of(lengths, 1)

    ahead = ahead_of([[i] for i in range(5)], planner, SoloTransport())
    for step in range(5):
        end = time.monotonic() + 10
        while len(planned) < min(5, step + STEPS_AHEAD):
            assert time.monotonic() < end, "it never came to that"
            time.sleep(0.001)
        time.sleep(0.02)
        assert planned == list(range(min(5, step + STEPS_AHEAD)))
        assert ahead.next("a step").batch.ids == (step,)
        assert read == list(range(min(5, step + STEPS_AHEAD)))
    ahead.close()


def test_a_plan_that_takes_too_long_ends_the_run_but_not_the_start_of_the_planner():
    goes_on = threading.Event()
    plans = iter([lambda: time.sleep(0.2), lambda: goes_on.wait(10)])

    def planner(lengths):
        next(plans)()
        return plan_of(lengths, 1)

    ahead = ahead_of([[0], [0]], planner, SoloTransport(), timeout_seconds=0.05)
    assert ahead.next("step 1") is not None
    with pytest.raises(LengthwiseError, match=r"step 2, planning: expected a plan within 0.05 s; got none"):
        ahead.next("step 2")
    goes_on.set()
    ahead.close()
