"""Steps that are planned ahead: how many, and how long a plan may take (test_session.py has their order)."""

import threading
import time

import pytest
from testing import make_batch, make_plan

from lengthwise.comm import SoloTransport
from lengthwise.core.errors import LengthwiseError
from lengthwise.core.plan import Piece
from lengthwise.engine.batch import StepBatch
from lengthwise.session.source import STEPS_AHEAD, PlanAhead

DATA = make_batch(range(1, 41), vocab=50).dataset


def ahead_of(numbers, begins, *, timeout_seconds=20):
    """Plan steps of one sequence each by hand; tell `begins` the length of each before its plan is made."""

    def planner(batch):
        begins(batch.lengths[0])
        return make_plan(1, batch.lengths, [Piece(sequences=(0,), ranks=(0,))]).to_json(), 0.0

    steps = iter([StepBatch(DATA, (number,)) for number in numbers])
    return PlanAhead(steps, planner, SoloTransport(), timeout_seconds=timeout_seconds)


def test_steps_are_planned_and_read_before_they_come(monkeypatch):
    """Two of them, and no more: what a run learns from its steps comes into the next plans."""
    planned, read = [], []
    monkeypatch.setattr(StepBatch, "read_ahead", lambda self, segments: read.append(self.ids[0]) if segments else None)
    ahead = ahead_of(range(5), lambda length: planned.append(length - 1))
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
    ahead = ahead_of([0, 0], lambda _: next(plans)(), timeout_seconds=0.05)
    assert ahead.next("step 1") is not None
    with pytest.raises(LengthwiseError, match=r"step 2, planning: expected a plan within 0.05 s; got none"):
        ahead.next("step 2")
    goes_on.set()
    ahead.close()
