"""Callbacks of a run: files, the line on the terminal, and whatever a user adds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from lengthwise.core.errors import CallbackError, LengthwiseError
from lengthwise.run.metrics import EvalMetrics, FinishedStep, NotFinite, TrainResult

if TYPE_CHECKING:
    from lengthwise.run.job import Job


class Callback(Protocol):
    """Called while a run goes on; a subclass overrides the methods that it needs.

    `on_start` and `on_end` run in the process that called `train`, the others in that of rank 0: with several local
    ranks that is a fork, and what they change there is not seen outside.
    """

    def on_start(self, job: Job) -> None:
        """Called once, when the run is checked and before its ranks start."""

    def on_phase(self, phase: str) -> None:
        """Take what rank 0 does from now on, `step 3, microbatch 2 of 8 forward`; "" at the end. Called very often."""

    def on_note(self, line: str) -> None:
        """Called with each decision of the run and its reason: kernel, transport, memory check."""

    def on_step(self, step: FinishedStep) -> None:
        """Called after each step."""

    def on_not_finite(self, found: NotFinite) -> None:
        """Called where a loss, gradient or parameter is NaN or infinite; a note or an error says what follows."""

    def on_eval(self, metrics: EvalMetrics) -> None:
        """Called after each evaluation."""

    def on_end(self, result: TrainResult) -> None:
        """Called once, at the end of a run whose model is saved."""


def call_back(callbacks: Sequence[Callback], method: str, what: object) -> None:
    """Call one method of each.

    Raises:
        CallbackError: one raised; it is named.
    """
    for each in callbacks:
        try:
            getattr(each, method)(what)
        except LengthwiseError:
            raise
        except Exception as error:
            name = f"callback {type(each).__name__}.{method}"
            got = f"{type(error).__name__}: {error}"
            remedy = "Correct the callback, or leave it out; the traceback says where."
            raise CallbackError(name, expected="a return", got=got, remedy=remedy) from error
