"""Steps planned ahead: a process beside rank 0 plans the next steps while one runs; all ranks agree on the plans."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

from lengthwise.comm import Transport, agree, broadcast_bytes
from lengthwise.core.errors import LengthwiseError, PlanError, Problems, RankError, raise_problems
from lengthwise.core.plan import Plan
from lengthwise.core.shape import UNCUT, LayerCut
from lengthwise.engine.batch import StepBatch
from lengthwise.program import lower_plan, refuse_unsupported

STEPS_AHEAD = 2  # steps planned and read while one runs; a plan's costs are that much older
_ITERATORS = 8  # iterators kept that a loop has left and may continue
_START_SECONDS = 60.0  # added to the first plan's timeout: a new planner process imports first

_SAME_ROWS = (
    "Give every rank the rows of the whole global batch, in the same order: no DistributedSampler, the same seed for "
    "shuffling on all ranks, and the same version of lengthwise."
)

StepPlanner = Callable[[StepBatch], tuple[str, float]]
"""Returns the plan file of a batch, and the seconds that planning took."""

_Made = tuple[StepBatch | None, tuple[str, float] | None]  # a batch, None after the last; its plan, on rank 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedStep:
    """A global batch, its plan, and the seconds that rank 0 planned."""

    batch: StepBatch
    plan: Plan
    plan_seconds: float


class PlanAhead:
    """Plans consecutive batches ahead, and begins to read this rank's part of them.

    Only rank 0 has a `planner`. A plan depends on lengths, ranks and costs only, so the plan of a step is the same
    whenever it is made and sent. A plan that takes longer than `timeout_seconds` ends the run; the first may take
    `start_seconds` more, for the planner's own start. num_heads: number of attention heads, which plans may split. cut:
    the pipelines' cut of the layers, with which plans are over replicas; None without stages.
    """

    def __init__(
        self,
        batches: Iterator[StepBatch],
        planner: StepPlanner | None,
        transport: Transport,
        *,
        timeout_seconds: float,
        start_seconds: float = _START_SECONDS,
        num_heads: int | None = None,
        cut: LayerCut = UNCUT,
    ) -> None:
        self._batches, self._planner, self._transport = batches, planner, transport
        self._timeout_seconds, self._num_heads, self._cut = timeout_seconds, num_heads, cut
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="plan ahead")
        self._making: deque[Future[_Made]] = deque()
        self._known: deque[PlannedStep] = deque()
        self._ended = False
        self._start_seconds = start_seconds  # 0 after the first plan
        self._go_on()

    def next(self, name: str) -> PlannedStep | None:
        """Return the next step, the same on all ranks, or None at the end. name: the step's name in messages.

        Collective: at a step's end, before the first transfer of the next step. Ranks agree on the digest of plans and
        batches.

        Raises:
            LengthwiseError: planning failed, this version does not run the plan, or ranks differ.
        """
        if not self._ended:
            self._transport.phase = f"{name}, agreeing on the plan"
            plans = self._exchanged(name)
            batches = [self._wait_for(self._making.popleft(), name)[0] for _ in plans]
            found = [None if batch is None else batch.identity for batch in batches]
            made = json.dumps([plans, found]).encode()
            agree(self._transport, made, f"plans and sequences from {name} on", _SAME_ROWS)
            for plan, batch in zip(plans, batches, strict=True):
                if plan is None or batch is None:
                    self._ended = True
                else:
                    self._known.append(self._planned(batch, *plan, name))
        step = self._known.popleft() if self._known else None
        self._go_on()
        return step

    def _exchanged(self, name: str) -> list[tuple[str, float] | None]:
        """Send the plans that rank 0 has made to all ranks."""
        made, error = [], None
        if not self._transport.rank:
            try:
                made = self._made(name)
            except Exception as raised:  # noqa: BLE001 - the iterator is the loop's; others would wait
                error = raised
        problems = [(each.where, each.expected, each.got, each.remedy) for each in _problems_of(error, name)]
        plans, wrong = json.loads(broadcast_bytes(self._transport, json.dumps([made, problems]).encode()))
        if wrong:
            self._making.popleft()  # a loop that goes on gets the next one
        if error is not None:
            raise error
        raise_problems([PlanError(where, expected=one, got=got, remedy=do) for where, one, got, do in wrong])
        return plans

    def close(self) -> None:
        """Stop planning ahead; the planner stays usable."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _go_on(self) -> None:
        while not self._ended and len(self._making) + len(self._known) < STEPS_AHEAD:
            self._making.append(self._thread.submit(self._make))

    def _make(self) -> _Made:
        batch = next(self._batches, None)
        if batch is None:
            return None, None
        return batch, None if self._planner is None else self._planner(batch)

    def _made(self, name: str) -> list[tuple[str, float] | None]:
        """Return the finished plans not sent yet, on rank 0; wait for the plan of `name`."""
        plans: list[tuple[str, float] | None] = []
        for number, future in enumerate(self._making):
            if number + len(self._known) == 0:
                plans.append(self._wait_for(future, name)[1])
            elif future.done() and future.exception() is None:  # an error is raised at its own step
                plans.append(future.result()[1])
            else:
                break
            if plans[-1] is None:
                break
        return plans

    def _planned(self, batch: StepBatch, text: str, seconds: float, name: str) -> PlannedStep:
        plan = Plan.from_json(text, f"plan of {name}" if not self._known else f"plan of a step after {name}")
        refuse_unsupported(plan, num_heads=self._num_heads, cut=self._cut)
        rank = self._transport.rank // self._cut.stages  # in the plan
        batch = batch.planned_by(plan)
        batch.read_ahead([each for program in lower_plan(plan, rank) for each in program.segments(rank)])
        return PlannedStep(batch=batch, plan=plan, plan_seconds=seconds)

    def _wait_for(self, future: Future[_Made], name: str) -> _Made:
        seconds = self._timeout_seconds + self._start_seconds
        try:
            made = future.result(timeout=seconds)
            self._start_seconds = 0.0
            return made
        except TimeoutError:
            where = f"rank {self._transport.rank}, {name}, planning"
            expected = f"a plan within {seconds:g} s"
            remedy = "Use a simpler planner, or raise {timeout_seconds}."
            raise RankError(where, expected=expected, got="none", remedy=remedy) from None


@dataclass
class _Steps:
    batches: object
    ahead: PlanAhead
    users: int = 0


class StepsOfIterators:
    """Steps planned ahead from iterators that a loop may leave and later continue where it left them.

    The last few that were left are kept, with the batches already read from them.
    """

    def __init__(self) -> None:
        self._kept: dict[int, _Steps] = {}

    @contextmanager
    def of(self, batches: object, start: Callable[[], PlanAhead]) -> Iterator[PlanAhead]:
        """Yield the steps of an iterator; if the block ends without an exception, the iterator has ended."""
        steps = self._kept.get(id(batches)) or _Steps(batches, start())
        self._kept[id(batches)] = steps
        steps.users += 1
        try:
            yield steps.ahead
            self._end(id(batches))
        finally:
            steps.users -= 1
            for key in [key for key, each in self._kept.items() if not each.users][:-_ITERATORS]:
                self._end(key)

    def close(self) -> None:
        """Stop planning for all iterators."""
        for key in list(self._kept):
            self._end(key)

    def _end(self, key: int) -> None:
        if key in self._kept:
            self._kept.pop(key).ahead.close()


def _problems_of(error: Exception | None, name: str) -> Sequence[LengthwiseError]:
    """Return the errors that the other ranks raise for an error of rank 0."""
    if error is None:
        return ()
    if isinstance(error, LengthwiseError):
        return error.problems if isinstance(error, Problems) else (error,)
    got, remedy = f"{type(error).__name__}: {error}", "Look at the error of rank 0."
    return (PlanError(f"rank 0, {name}", expected="a batch of the loop's iterator", got=got, remedy=remedy),)
