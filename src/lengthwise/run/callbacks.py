"""Who hears of a run: files, the line on the terminal, and whatever a user adds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from lengthwise.core.errors import CallbackError, LengthwiseError
from lengthwise.run.metrics import EvalMetrics, FinishedStep, NotFinite, TrainResult

if TYPE_CHECKING:
    from lengthwise.run.job import Job


class Callback(Protocol):
    """What is called while a run goes on; a subclass overrides what it wants to hear of.

    `on_start` and `on_end` are called in the process that called `train`, the others in that of rank 0: with several
    local ranks that is a fork of it, and what they change there is not seen outside.
    """

    def on_start(self, job: Job) -> None:
        """Hear of a run that is checked and about to start its ranks."""

    def on_phase(self, phase: str) -> None:
        """Take what rank 0 does from now on, `step 3, microbatch 2 of 8 forward`; "" at the end. Called very often."""

    def on_note(self, line: str) -> None:
        """Hear what was decided, and why: kernel, transport, what the memory check found."""

    def on_step(self, step: FinishedStep) -> None:
        """Hear of a finished step."""

    def on_not_finite(self, found: NotFinite) -> None:
        """Hear of a loss, gradient or parameter that is NaN or infinite; what follows is told as a note or an error."""

    def on_eval(self, metrics: EvalMetrics) -> None:
        """Hear of a finished evaluation."""

    def on_end(self, result: TrainResult) -> None:
        """Hear of the end of a run whose model is saved."""


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
