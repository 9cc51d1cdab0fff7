"""What follows a loss, gradient or parameter that is NaN or infinite: the run stops, leaves steps out, or goes back.

Everything is decided by numbers that all ranks share, so that all decide alike.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

from torch import Tensor

from lengthwise.comm import Transport
from lengthwise.config import RunConfig
from lengthwise.core.errors import LengthwiseError, NumericError
from lengthwise.engine.parameters import Parameters, largest_magnitude
from lengthwise.run.callbacks import Callback, NotFinite, call_back
from lengthwise.run.checkpoints import Checkpoints
from lengthwise.run.resume import Resume, find_resume, shared_resume

MOST_IN_A_ROW = 10  # steps without an update
MOST_TIMES_BACK = 3  # to one checkpoint


@dataclass(slots=True, kw_only=True)
class FinitePolicy:
    """What a rank does about values that are not finite, as `not_finite` of the run says.

    largest_allowed: magnitude of a parameter, in its dtype. skipped: steps so far whose sequences changed nothing.
    """

    config: RunConfig
    transport: Transport
    parameters: Parameters
    checkpoints: Checkpoints
    callbacks: Sequence[Callback]
    largest_allowed: float
    skipped: int = 0
    _in_a_row: int = 0
    _back_at: int = 0  # the checkpoint that was gone back to last, and how often
    _times_back: int = 0
    _largest: Tensor | None = None
    _sequences: Sequence[int] = ()

    @property
    def largest(self) -> float:
        """The largest magnitude of any parameter that this rank updates, for `holds_parameters`; waits for it."""
        return 0.0 if self._largest is None else self._largest.item()

    def updated(self, sequences: Sequence[int]) -> None:
        """Note an update and the sequences it was made of."""
        self._largest, self._sequences, self._in_a_row = largest_magnitude(self.parameters), sequences, 0

    def holds_parameters(self, step: int, largest: Sequence[float], *, within: int | None = None) -> bool:
        """Whether `step` left finite parameters, by the `largest` of each rank; else do as the policy says. Collective.

        `within`: the step that is under way, whose gradients are then worth nothing; None: there is none.

        Raises:
            NumericError: the run ends.
        """
        wrong = [each for each in largest if not each <= self.largest_allowed]  # NaN too
        if not wrong:
            return True
        value, now = next(filter(math.isnan, wrong), max(wrong)), step if within is None else within
        self._do(NotFinite(step=step, what="parameter", value=str(value), sequences=tuple(self._sequences)), now)
        return False

    def holds(self, step: int, what: str, value: float, sequences: Sequence[int]) -> bool:
        """Whether a value of the step that is under way is finite; else do what the policy says. Collective.

        Raises:
            NumericError: the run ends.
        """
        if math.isfinite(value):
            return True
        self._do(NotFinite(step=step, what=what, value=str(value), sequences=tuple(sequences)), step)
        return False

    def _do(self, found: NotFinite, now: int) -> None:
        asked, is_parameter = self.config.not_finite, found.what == "parameter"
        if asked == "stop" or (asked == "skip" and is_parameter):
            remedy = "Lower optimizer.lr or optimizer.weight_decay. The model is not saved."
            if not is_parameter:
                remedy = "Lower optimizer.lr, look at these sequences, or set `not_finite`. No update was made."
            self._stop(found, remedy)
        self._in_a_row += 1
        if self._in_a_row > MOST_IN_A_ROW:
            self._stop(found, f"The {MOST_IN_A_ROW} steps before it made no update either: lower optimizer.lr.")
        self.parameters.clear_gradients()
        if asked == "skip":
            self.skipped += 1
            self._tell(found, "no update")
        else:
            self._go_back(found, now)

    def _go_back(self, found: NotFinite, now: int) -> None:
        """Take parameters and moments from the newest checkpoint; steps since, and `now`, are not made again."""
        self.checkpoints.finish()
        resume = shared_resume(self._newest(), self.config, self.transport)
        if resume is None:
            self._stop(found, "There is no checkpoint yet to return to: lower optimizer.lr, or save one earlier.")
        self._times_back = self._times_back + 1 if resume.step == self._back_at else 1
        self._back_at = resume.step
        if self._times_back > MOST_TIMES_BACK:
            remedy = f"Returning to {resume.folder} did not help {MOST_TIMES_BACK} times: lower optimizer.lr."
            self._stop(found, remedy)
        self.checkpoints.restore(resume)
        self.skipped = now - (resume.step - resume.manifest.skipped)
        self._largest = None
        self._tell(found, f"back to the parameters after step {resume.step}, without the steps since")

    def _newest(self) -> Resume | None:
        if self.transport.rank:
            return None
        try:
            return find_resume(self.config, accept_changes=True)  # it may be of before they changed
        except LengthwiseError:
            return None

    def _tell(self, found: NotFinite, then: str) -> None:
        call_back(self.callbacks, "on_not_finite", found)
        call_back(self.callbacks, "on_note", f"step {found.step}: {_said(found)}: {then}")

    def _stop(self, found: NotFinite, remedy: str) -> NoReturn:
        call_back(self.callbacks, "on_not_finite", found)
        where, expected = f"step {found.step}", f"a finite {found.what}"
        raise NumericError(where, expected=expected, got=_said(found), remedy=remedy)


def _said(found: NotFinite) -> str:
    more = " ..." * (len(found.sequences) > 20)
    return f"{found.value} over sequences {', '.join(map(str, found.sequences[:20]))}{more}"
