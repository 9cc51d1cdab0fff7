"""Steps that are planned ahead: the same ones in the same order on all ranks, however long each plan takes."""

import threading
import time
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from testing.strict import StrictWorld

from lengthwise.comm import Transport
from lengthwise.core.errors import LengthwiseError, PlanError
from lengthwise.core.plan import Microbatch, Piece, Plan
from lengthwise.data.dataset import DatasetBuilder
from lengthwise.engine.batch import StepBatch
from lengthwise.session.source import STEPS_AHEAD, PlanAhead


def data_of(rows: int):
    builder = DatasetBuilder()
    builder.start_source("data.0", "rows", None)
    for length in range(1, rows + 1):
        builder.add(np.arange(length, dtype=np.int32), None)
    return builder.finish()


DATA = data_of(40)


def plan_of(lengths: Sequence[int], ranks: int) -> Plan:
    """Plan a step by hand: sequence i on rank i % ranks, one after the other."""
    pieces = tuple(Piece(sequences=(i,), ranks=(i % ranks,)) for i in range(len(lengths)))
    microbatches = tuple(Microbatch(pieces=(piece,)) for piece in pieces)
    return Plan(ranks=ranks, capacity=64, layers=1, tokens=tuple(lengths), microbatches=microbatches)


def stream(batches: Sequence[Sequence[int]]):
    return iter([StepBatch(DATA, ids) for ids in batches])


@given(
    batches=st.lists(st.lists(st.integers(0, 39), min_size=1, max_size=5), max_size=7),
    ranks=st.sampled_from([1, 2, 3, 5]),
    delays=st.lists(st.sampled_from([0.0, 0.0, 0.004]), min_size=7, max_size=7),
    pause=st.sampled_from([0.0, 0.006]),
)
def test_all_ranks_take_all_steps_in_order(
    batches: list[list[int]], ranks: int, delays: list[float], pause: float
) -> None:
    def work(transport: Transport) -> list[tuple[int, ...]]:
        made = iter(delays)

        def planner(lengths: Sequence[int]) -> tuple[str, float]:
            time.sleep(next(made))
            return plan_of(lengths, ranks).to_json(), 0.0

        planned = planner if transport.rank == 0 else None
        ahead = PlanAhead(stream(batches), planned, transport, timeout_seconds=20)
        found = []
        while (step := ahead.next(f"step {len(found) + 1}")) is not None:
            assert step.plan.tokens == step.batch.lengths
            found.append(step.batch.ids)
            time.sleep(pause)
        assert ahead.next("the end") is None
        ahead.close()
        return found

    for found in StrictWorld(ranks).run(work):
        assert found == [tuple(each) for each in batches]


def test_steps_are_planned_and_read_before_they_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of them, and no more: what a run learns from its steps comes into the next plans."""
    planned, read = list[int](), list[int]()
    monkeypatch.setattr(StepBatch, "read_ahead", lambda self, segments: read.append(self.ids[0]) if segments else None)

    def planner(lengths: Sequence[int]) -> tuple[str, float]:
        planned.append(lengths[0] - 1)
        return plan_of(lengths, 1).to_json(), 0.0

    def work(transport: Transport) -> None:
        ahead = PlanAhead(stream([[i] for i in range(9)]), planner, transport, timeout_seconds=20)
        for step in range(9):
            _wait_until(lambda step=step: len(planned) == min(9, step + STEPS_AHEAD))
            time.sleep(0.02)
            assert planned == list(range(min(9, step + STEPS_AHEAD)))
            assert ahead.next("a step").batch.ids == (step,)
            assert read == list(range(min(9, step + STEPS_AHEAD)))
        ahead.close()

    StrictWorld(1).run(work)


def _wait_until(condition) -> None:
    end = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end, "it never came to that"
        time.sleep(0.001)


def test_a_step_that_cannot_be_planned_is_told_when_it_comes() -> None:
    def planner(lengths: Sequence[int]) -> tuple[str, float]:
        if lengths == (3,):
            raise PlanError("step", expected="a plan", got="none", remedy="Wait.")
        return plan_of(lengths, 1).to_json(), 0.0

    def work(transport: Transport) -> None:
        ahead = PlanAhead(stream([[0], [1], [2], [3]]), planner, transport, timeout_seconds=20)
        time.sleep(0.05)
        assert [ahead.next("a step").batch.ids for _ in range(2)] == [(0,), (1,)]
        with pytest.raises(PlanError):
            ahead.next("step 3")
        ahead.close()

    StrictWorld(1).run(work)


def test_ranks_whose_batches_differ_are_named() -> None:
    def work(transport: Transport) -> None:
        batches = [[0, 1], [2, 3]] if transport.rank != 1 else [[0, 1], [3, 2]]
        planner = (lambda lengths: (plan_of(lengths, 3).to_json(), 0.0)) if transport.rank == 0 else None
        ahead = PlanAhead(stream(batches), planner, transport, timeout_seconds=20)
        try:
            for number in range(1, 3):
                ahead.next(f"step {number}")
        finally:
            ahead.close()

    with pytest.raises(LengthwiseError, match=r"rank.*1") as caught:
        StrictWorld(3).run(work)
    assert "plans and sequences from step" in str(caught.value)


def test_a_plan_that_takes_too_long_ends_the_run_but_not_the_start_of_the_planner() -> None:
    goes_on = threading.Event()
    plans = iter([lambda: time.sleep(0.2), lambda: goes_on.wait(10)])

    def planner(lengths: Sequence[int]) -> tuple[str, float]:
        next(plans)()
        return plan_of(lengths, 1).to_json(), 0.0

    def work(transport: Transport) -> None:
        ahead = PlanAhead(stream([[0], [0]]), planner, transport, timeout_seconds=0.05)
        assert ahead.next("step 1") is not None
        with pytest.raises(LengthwiseError, match=r"step 2, planning: expected a plan within 0.05 s; got none"):
            ahead.next("step 2")
        goes_on.set()
        ahead.close()

    StrictWorld(1).run(work)
