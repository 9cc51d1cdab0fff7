"""Callbacks of a run (its files, the line on the terminal, a user's own) and the records they get."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import InitVar, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from lengthwise.core.errors import CallbackError, LengthwiseError
from lengthwise.core.plan import Plan

if TYPE_CHECKING:
    from lengthwise.run.job import Job


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMetrics:
    """One line of metrics.jsonl, made from the step's plan and the `busy_seconds` of its ranks.

    `loss` is the mean over the loss tokens of the global batch before the update; `router_loss` the balance loss over
    it, without its coefficient, or None without routers. A rank is busy in microbatches, except while it waits for a
    transfer; on a GPU its clock counts. `imbalance_ratio` is the largest over the mean busy time, `idle_ratio` 1 - mean
    busy time / step time, `ring_token_ratio` the share of tokens in cut sequences. `predicted_step_seconds` follows
    from the plan's costs. The rank with the largest value counts for `peak_memory_bytes` (on its GPU, or resident;
    including the previous update), `exposed_ring_seconds` (transfers that no work hid) and `offload_wait_seconds`
    (copies). `offloaded_bytes` is the sum over all ranks.
    """

    plan: InitVar[Plan]
    busy_seconds: InitVar[Sequence[float]]
    step: int
    loss: float
    grad_norm: float
    lr: float
    num_sequences: int = field(init=False)
    num_tokens: int = field(init=False)
    num_loss_tokens: int
    num_microbatches: int = field(init=False)
    step_seconds: float
    tokens_per_second: float = field(init=False)
    imbalance_ratio: float = field(init=False)
    idle_ratio: float = field(init=False)
    ring_token_ratio: float = field(init=False)
    plan_seconds: float
    predicted_step_seconds: float
    peak_memory_bytes: int
    offloaded_bytes: int
    offload_wait_seconds: float
    exposed_ring_seconds: float
    router_loss: float | None = None

    def __post_init__(self, plan: Plan, busy_seconds: Sequence[float]) -> None:
        num_tokens, mean_busy = sum(plan.tokens), sum(busy_seconds) / len(busy_seconds)
        derived = {
            "num_sequences": len(plan.tokens),
            "num_tokens": num_tokens,
            "num_microbatches": len(plan.microbatches),
            "tokens_per_second": num_tokens / self.step_seconds,
            "imbalance_ratio": max(busy_seconds) / mean_busy if mean_busy else 1.0,
            "idle_ratio": max(0.0, 1 - mean_busy / self.step_seconds),
            "ring_token_ratio": plan.ring_tokens / num_tokens,
        }
        for name, value in derived.items():
            object.__setattr__(self, name, value)


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedStep:
    """A step that made its update.

    sequences: numbers of its sequences in the data, in the order of the plan. is_measured: True if measured costs
    predict its seconds.
    """

    metrics: StepMetrics
    num_steps: int
    sequences: tuple[int, ...]
    plan: Plan
    is_measured: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class NotFinite:
    """One line of not_finite.jsonl: a value of `step` that is NaN or infinite, and the sequences of the step.

    what: loss, router loss, norm of the gradient, or parameter; for a parameter `step` is the step that updated it.
    """

    step: int
    what: str
    value: str
    sequences: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalMetrics:
    """One line of eval.jsonl. `loss` is the mean over the loss tokens of the eval data after `step`."""

    step: int
    loss: float
    num_sequences: int
    num_tokens: int
    num_loss_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainResult:
    """The end of a run.

    steps: number of steps of the whole run, also those before a resumed checkpoint. num_tokens, seconds: tokens and
    seconds of this process alone. has_trained: True if a step of this process had a learning rate and a gradient above
    0. metrics: metrics of the last step, or None if the run was finished before. stopped_by: signal that ended it
    early, or None. skipped: number of steps without an update because a value was not finite. parameters: number of the
    model's parameters; of the trained ones if the run was finished before.
    """

    steps: int
    num_tokens: int = 0
    seconds: float = 0.0
    first_loss: float
    last_loss: float
    metrics: StepMetrics | None = None
    parameters: int
    stopped_by: int | None = None
    folder: Path
    skipped: int = 0
    has_trained: bool = True


class Callback(Protocol):
    """Methods that are called during a run; a subclass overrides the ones it needs.

    All run in rank 0's process. With several local ranks that is a fork, so changes of objects stay inside. Restarted
    ranks call `on_start` again.
    """

    def on_start(self, job: Job) -> None:
        """Receive the checked run, once all ranks have joined."""

    def on_phase(self, phase: str) -> None:
        """Receive rank 0's current work, as `step 3, microbatch 2 of 8 forward`, very often, and "" at the end."""

    def on_note(self, line: str) -> None:
        """Receive a decision of the run and its reason: kernel, transport, capacity."""

    def on_step(self, step: FinishedStep) -> None:
        """Receive a step that made its update."""

    def on_not_finite(self, found: NotFinite) -> None:
        """Receive a loss, gradient or parameter that is NaN or infinite; a note or an error follows."""

    def on_eval(self, metrics: EvalMetrics) -> None:
        """Receive the result of an evaluation."""

    def on_end(self, result: TrainResult) -> None:
        """Receive the result, once, at the end of a run whose model is saved."""


def call_back(callbacks: Sequence[Callback], method: str, what: object) -> None:
    """Call a method of every callback; raise CallbackError that names a callback that fails."""
    for callback in callbacks:
        try:
            getattr(callback, method)(what)
        except LengthwiseError:
            raise
        except Exception as error:
            name = f"callback {type(callback).__name__}.{method}"
            got = f"{type(error).__name__}: {error}"
            remedy = "Correct or remove the callback; the traceback shows where it raised."
            raise CallbackError(name, expected="a return", got=got, remedy=remedy) from error
