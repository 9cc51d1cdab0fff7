"""A run's decisions at a step's end, by numbers that all ranks have: whether to update, and whether to save.

A loss or gradient that is not finite makes no update: the run skips the step, or stops. The parameters after an update
are checked with the numbers of the next step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import NoReturn

from torch import Tensor

from lengthwise.core.errors import NumericError
from lengthwise.core.faults import fault
from lengthwise.engine.parameters import Parameters, largest_magnitude
from lengthwise.engine.shortage import PeakMemory
from lengthwise.engine.step import RankResult
from lengthwise.run.callbacks import Callback, NotFinite, StepMetrics, call_back
from lengthwise.run.checkpoints import Checkpoints
from lengthwise.session.runner import StepEnd, StepResult

MOST_IN_A_ROW = 10  # consecutive steps without an update


@dataclass(frozen=True, slots=True, kw_only=True)
class RunNumbers(RankResult):
    """A rank's numbers of a step, with those of `PeakMemory`, `FinitePolicy` and `Checkpoints`."""

    peak_bytes: float
    largest: float
    asks_for_checkpoint: float


@dataclass(slots=True, kw_only=True)
class FinitePolicy:
    """Skips steps, or ends the run, if values are not finite.

    skips: True skips a step whose loss or gradient is not finite, False ends the run. largest_allowed: largest finite
    magnitude of a parameter's dtype. skipped: number of steps skipped so far.
    """

    skips: bool
    parameters: Parameters
    callbacks: Sequence[Callback]
    largest_allowed: float
    skipped: int = 0
    _in_a_row: int = 0
    _largest: Tensor | None = None
    _sequences: Sequence[int] = ()

    @property
    def largest(self) -> float:
        """Largest magnitude of the parameters that this rank updates, for `check_parameters`. Waits for the device."""
        return 0.0 if self._largest is None else self._largest.item()

    def updated(self, sequences: Sequence[int]) -> None:
        """Note an update and its sequences."""
        self._largest, self._sequences, self._in_a_row = largest_magnitude(self.parameters), sequences, 0

    def check_parameters(self, step: int, largest: Sequence[float]) -> None:
        """Raise NumericError if a parameter is not finite after `step`, by the `largest` of each rank."""
        wrong = [each for each in largest if not each <= self.largest_allowed]  # NaN too
        if wrong:
            value = next(filter(math.isnan, wrong), max(wrong))
            found = NotFinite(step=step, what="parameter", value=str(value), sequences=tuple(self._sequences))
            self._stop(found, "Lower optimizer.lr or optimizer.weight_decay. The model is not saved.")

    def accepts(self, step: int, what: str, value: float, sequences: Sequence[int]) -> bool:
        """Return whether a value of this step is finite; if not, skip the step or raise NumericError. Collective."""
        if math.isfinite(value):
            return True
        found = NotFinite(step=step, what=what, value=str(value), sequences=tuple(sequences))
        if not self.skips:
            remedy = "Lower optimizer.lr, look at these sequences, or set `not_finite: skip`. No update was made."
            self._stop(found, remedy)
        self._in_a_row += 1
        if self._in_a_row > MOST_IN_A_ROW:
            self._stop(found, f"The {MOST_IN_A_ROW} steps before it made no update either: lower optimizer.lr.")
        self.parameters.clear_gradients()
        self.skipped += 1
        call_back(self.callbacks, "on_not_finite", found)
        call_back(self.callbacks, "on_note", f"step {step}: {what} is {_said(found)}: no update")
        return False

    def _stop(self, found: NotFinite, remedy: str) -> NoReturn:
        call_back(self.callbacks, "on_not_finite", found)
        where, expected = f"step {found.step}", f"a finite {found.what}"
        raise NumericError(where, expected=expected, got=_said(found), remedy=remedy)


@dataclass(kw_only=True)
class RunStepEnd(StepEnd):
    """The end of a run's steps on one rank. ranks: all ranks' numbers of the last step."""

    rank: int
    finite: FinitePolicy
    checkpoints: Checkpoints
    memory: PeakMemory = field(default_factory=PeakMemory)
    ranks: Sequence[RunNumbers] = ()

    def numbers(self, step: int, own: RankResult) -> RunNumbers:
        """Add peak memory, largest parameter and whether a checkpoint is due."""
        fault("step-end", self.rank, step)
        return RunNumbers(
            **asdict(own),
            peak_bytes=self.memory.peak_bytes(),
            largest=self.finite.largest,
            asks_for_checkpoint=self.checkpoints.asks,
        )

    def receive(self, step: int, ranks: Sequence[RunNumbers]) -> None:
        """Check the parameters after the previous step."""
        self.ranks = ranks
        self.memory.start()
        self.finite.check_parameters(step - 1, [rank.largest for rank in ranks])

    def accepts(self, step: int, what: str, value: float, sequences: Sequence[int]) -> bool:
        """Apply the run's policy for values that are not finite."""
        return self.finite.accepts(step, what, value, sequences)

    @property
    def asks_for_checkpoint(self) -> bool:
        """Whether a checkpoint is due by rank 0's clock."""
        return bool(self.ranks[0].asks_for_checkpoint)

    def metrics(self, result: StepResult, *, step: int, lr: float, predicted_seconds: float) -> StepMetrics:
        """Return the metrics of a step that made its update."""
        assert result.grad_norm is not None, "the step made its update"
        return StepMetrics(
            plan=result.plan,
            step=step,
            loss=result.loss,
            router_loss=result.router_loss,
            grad_norm=result.grad_norm,
            lr=lr,
            num_loss_tokens=result.num_loss_tokens,
            busy_seconds=result.busy_seconds,
            step_seconds=result.step_seconds,
            plan_seconds=result.plan_seconds,
            predicted_step_seconds=predicted_seconds,
            exposed_ring_seconds=max(result.wait_seconds),
            offload_wait_seconds=max(rank.offload_wait_seconds for rank in self.ranks),
            offloaded_bytes=int(sum(rank.offloaded_bytes for rank in self.ranks)),
            peak_memory_bytes=int(max(rank.peak_bytes for rank in self.ranks)),
        )


def _said(found: NotFinite) -> str:
    more = " ..." * (len(found.sequences) > 20)
    return f"{found.value} over sequences {', '.join(map(str, found.sequences[:20]))}{more}"
