"""One planner for all ranks: rank 0 plans a step ahead while the present one runs, sends the plan, and all agree."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from lengthwise.comm import Transport, agree, broadcast_bytes
from lengthwise.core.plan import Plan
from lengthwise.train.batch import StepBatch

MakePlan = Callable[[Sequence[int]], Plan]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedStep:
    """A global batch, its plan, and how long rank 0 took to make the plan."""

    batch: StepBatch
    plan: Plan
    plan_seconds: float


class PlanAhead:
    """Plans of consecutive batches. On rank 0 a thread makes the next plan while the present step runs.

    `make_plan` maps lengths to a plan and depends on nothing else, so the plan of a step is the same whenever it is
    made.
    """

    def __init__(self, batches: Iterator[StepBatch], make_plan: MakePlan, transport: Transport) -> None:
        self._batches, self._make_plan, self._transport = batches, make_plan, transport
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="planner")
        self._next = self._begin()

    def take(self, name: str) -> PlannedStep | None:
        """Return the next step, or None at the end; `name` is the step, in words.

        Collective: called by all ranks at a step's end, before the first transfer of the next step, and it is there
        that all ranks agree on the digest of plan and batch.
        """
        if self._next is None:
            return None
        batch, future = self._next
        self._transport.phase = f"{name}, agreeing on the plan"
        message = None
        if future is not None:
            plan, seconds = future.result()
            message = json.dumps([plan.to_json(), seconds]).encode()
        text, seconds = json.loads(broadcast_bytes(self._transport, message))
        agree(self._transport, json.dumps([text, batch.ids]).encode(), "plan and sequences of the step")
        self._next = self._begin()
        return PlannedStep(batch=batch, plan=Plan.from_json(text, f"plan of {name}"), plan_seconds=seconds)

    def close(self) -> None:
        """Stop planning."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _begin(self) -> tuple[StepBatch, Future[tuple[Plan, float]] | None] | None:
        batch = next(self._batches, None)
        if batch is None:
            return None
        return batch, self._thread.submit(self._timed, batch) if self._transport.rank == 0 else None

    def _timed(self, batch: StepBatch) -> tuple[Plan, float]:
        start = time.perf_counter()
        plan = self._make_plan(batch.lengths)
        return plan, time.perf_counter() - start
