"""What a run decides at a step's end, by numbers that its ranks share: whether to update, and to save.

Loss and gradient are refused before an update when they are not finite, the parameters that an update left with the
numbers of the next step (`run/not_finite.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

from lengthwise.core.faults import fault
from lengthwise.engine.memory import PeakMemory
from lengthwise.engine.step import RankResult
from lengthwise.run.callbacks import StepMetrics
from lengthwise.run.checkpoints import Checkpoints
from lengthwise.run.not_finite import FinitePolicy
from lengthwise.session.runner import StepEnd, StepResult


@dataclass(frozen=True, slots=True, kw_only=True)
class RunNumbers(RankResult):
    """What a rank shares of a step and of what goes on beside it; see `FinitePolicy`, `Checkpoints`."""

    peak_bytes: float
    largest: float
    checkpoint_progress: float
    asks_for_checkpoint: float


@dataclass(kw_only=True)
class RunStepEnd(StepEnd):
    """The end of a run's steps on one rank. ranks: the numbers of the last step."""

    rank: int
    finite: FinitePolicy
    checkpoints: Checkpoints
    memory: PeakMemory = field(default_factory=PeakMemory)
    ranks: Sequence[RunNumbers] = ()

    def numbers(self, step: int, own: RankResult) -> RunNumbers:
        """Return the numbers of this rank."""
        fault("step-end", self.rank, step)
        return RunNumbers(
            **asdict(own),
            peak_bytes=self.memory.peak_bytes(),
            largest=self.finite.largest,
            checkpoint_progress=self.checkpoints.progress,
            asks_for_checkpoint=self.checkpoints.asks,
        )

    def takes(self, step: int, ranks: Sequence[RunNumbers]) -> None:
        """Commit a checkpoint that is written, and check what the step before left of the parameters."""
        self.ranks = ranks
        self.memory.start()
        self.checkpoints.settle([rank.checkpoint_progress for rank in ranks])
        self.finite.check_parameters(step - 1, [rank.largest for rank in ranks])

    def holds(self, step: int, what: str, value: float, sequences: Sequence[int]) -> bool:
        """Do as the run's policy says where a value is not finite."""
        return self.finite.holds(step, what, value, sequences)

    @property
    def asks_for_checkpoint(self) -> bool:
        """Whether the time since the last checkpoint asks for one."""
        return bool(self.ranks[0].asks_for_checkpoint)

    def metrics(
        self, result: StepResult, *, step: int, lr: float, step_seconds: float, predicted_seconds: float
    ) -> StepMetrics:
        """Return what is reported of a step that made its update."""
        assert result.grad_norm is not None, "of a step that made one"
        return StepMetrics(
            plan=result.plan,
            step=step,
            loss=result.loss,
            router_loss=result.router_loss,
            grad_norm=result.grad_norm,
            lr=lr,
            num_loss_tokens=result.num_loss_tokens,
            busy_seconds=result.busy_seconds,
            step_seconds=step_seconds,
            plan_seconds=result.plan_seconds,
            predicted_step_seconds=predicted_seconds,
            exposed_ring_seconds=max(result.wait_seconds),
            offload_wait_seconds=max(rank.offload_wait_seconds for rank in self.ranks),
            offloaded_bytes=int(sum(rank.offloaded_bytes for rank in self.ranks)),
            peak_memory_bytes=int(max(rank.peak_bytes for rank in self.ranks)),
        )
