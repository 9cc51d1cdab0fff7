"""What follows a loss, gradient or parameter that is NaN or infinite: the run stops, or leaves the step out.

Everything is decided by numbers that all ranks share, so that all decide alike.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

from torch import Tensor

from lengthwise.core.errors import NumericError
from lengthwise.engine.parameters import Parameters, largest_magnitude
from lengthwise.run.callbacks import Callback, NotFinite, call_back

MOST_IN_A_ROW = 10  # steps without an update


@dataclass(slots=True, kw_only=True)
class FinitePolicy:
    """What a rank does about values that are not finite.

    skips: whether a step whose loss or gradient is not finite makes no update; else the run ends. largest_allowed:
    magnitude of a parameter, in its dtype. skipped: steps so far whose sequences changed nothing.
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
        """The largest magnitude of any parameter that this rank updates, for `check_parameters`; waits for it."""
        return 0.0 if self._largest is None else self._largest.item()

    def updated(self, sequences: Sequence[int]) -> None:
        """Note an update and the sequences it was made of."""
        self._largest, self._sequences, self._in_a_row = largest_magnitude(self.parameters), sequences, 0

    def check_parameters(self, step: int, largest: Sequence[float]) -> None:
        """Check that `step` left finite parameters, by the `largest` of each rank.

        Raises:
            NumericError: it did not: the step before cannot be skipped any more.
        """
        wrong = [each for each in largest if not each <= self.largest_allowed]  # NaN too
        if wrong:
            value = next(filter(math.isnan, wrong), max(wrong))
            found = NotFinite(step=step, what="parameter", value=str(value), sequences=tuple(self._sequences))
            self._stop(found, "Lower optimizer.lr or optimizer.weight_decay. The model is not saved.")

    def holds(self, step: int, what: str, value: float, sequences: Sequence[int]) -> bool:
        """Whether a value of the step that is under way is finite; else leave the step out. Collective.

        Raises:
            NumericError: the run ends.
        """
        if math.isfinite(value):
            return True
        found = NotFinite(step=step, what=what, value=str(value), sequences=tuple(sequences))
        if not self.skips:
            remedy = "Lower optimizer.lr, look at these sequences, or set `not_finite: skip`. No update was made."
            self._stop(found, remedy)
        self._in_a_row += 1
        if self._in_a_row > MOST_IN_A_ROW:
            self._stop(found, f"The {MOST_IN_A_ROW} steps before it made no update either: lower optimizer.lr.")
        self.parameters.reduce_gradients()  # some may be on their way
        self.parameters.clear_gradients()
        self.skipped += 1
        call_back(self.callbacks, "on_not_finite", found)
        call_back(self.callbacks, "on_note", f"step {step}: {_said(found)}: no update")
        return False

    def _stop(self, found: NotFinite, remedy: str) -> NoReturn:
        call_back(self.callbacks, "on_not_finite", found)
        where, expected = f"step {found.step}", f"a finite {found.what}"
        raise NumericError(where, expected=expected, got=_said(found), remedy=remedy)


def _said(found: NotFinite) -> str:
    more = " ..." * (len(found.sequences) > 20)
    return f"{found.value} over sequences {', '.join(map(str, found.sequences[:20]))}{more}"
