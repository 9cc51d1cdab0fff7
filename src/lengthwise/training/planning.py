"""One planner for all ranks: beside rank 0 the next step is planned while this one runs; all agree on the plan."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

from lengthwise.comm import Transport, agree, broadcast_bytes
from lengthwise.core.errors import RankError
from lengthwise.core.plan import Plan
from lengthwise.engine.batch import StepBatch
from lengthwise.program import refuse_unsupported

StepPlanner = Callable[[Sequence[int]], tuple[str, float]]
"""Makes (plan file, seconds that it took) from the lengths of a step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedStep:
    """A global batch, its plan, and how long rank 0 took to make the plan."""

    batch: StepBatch
    plan: Plan
    plan_seconds: float


class StepSource(Protocol):
    """Where a rank's steps come from, one after the other."""

    def next(self, name: str) -> PlannedStep | None:
        """Return the next step, the same on all ranks, or None at the end; `name` is the step, in words.

        Collective: called by all ranks at a step's end, before the first transfer of the next step.

        Raises:
            LengthwiseError: there is none that this version runs, or ranks differ.
        """
        ...

    def close(self) -> None:
        """End what prepares steps ahead."""
        ...


class PlanAhead:
    """A `StepSource` that plans consecutive batches, the next one while the present step runs.

    `planner` is there on rank 0 alone. A plan depends on lengths, ranks and costs only, so the plan of a step is the
    same whenever it is made. A plan that takes longer than `timeout_seconds` ends the run. `num_heads`: of the model's
    attention, which plans may split.
    """

    def __init__(
        self,
        batches: Iterator[StepBatch],
        planner: StepPlanner | None,
        transport: Transport,
        *,
        timeout_seconds: float,
        num_heads: int | None = None,
    ) -> None:
        self._batches, self._planner, self._transport = batches, planner, transport
        self._timeout_seconds, self._num_heads = timeout_seconds, num_heads
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="plan ahead")
        self._next = self._begin()

    def next(self, name: str) -> PlannedStep | None:
        """Return the next step (see `StepSource.next`); all ranks agree on the digest of plan and batch."""
        if self._next is None:
            return None
        batch, future = self._next
        self._transport.phase = f"{name}, agreeing on the plan"
        message = None if future is None else json.dumps(self._wait_for(future, name)).encode()
        text, seconds = json.loads(broadcast_bytes(self._transport, message))
        agree(self._transport, json.dumps([text, batch.ids]).encode(), "plan and sequences of the step")
        self._next = self._begin()
        plan = Plan.from_json(text, f"plan of {name}")
        refuse_unsupported(plan, num_heads=self._num_heads)
        return PlannedStep(batch=batch, plan=plan, plan_seconds=seconds)

    def close(self) -> None:
        """Stop planning ahead; the planner goes on for others."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _begin(self) -> tuple[StepBatch, Future[tuple[str, float]] | None] | None:
        batch = next(self._batches, None)
        if batch is None:
            return None
        return batch, None if self._planner is None else self._thread.submit(self._planner, batch.lengths)

    def _wait_for(self, future: Future[tuple[str, float]], name: str) -> tuple[str, float]:
        try:
            return future.result(timeout=self._timeout_seconds)
        except TimeoutError:
            where = f"rank {self._transport.rank}, {name}, planning"
            expected = f"a plan within {self._timeout_seconds:g} s"
            remedy = "Use a simpler planner, or raise {timeout_seconds}."
            raise RankError(where, expected=expected, got="none", remedy=remedy) from None
