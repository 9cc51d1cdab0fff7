"""What a session adds to the numbers that ranks share at a step's end: which parameters a loss has reached."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from lengthwise.comm import Transport, share_numbers
from lengthwise.engine.step import RankResult
from lengthwise.session.loop_optimizer import LoopOptimizer
from lengthwise.session.runner import StepEnd

_BITS = 48  # of a number


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionNumbers(RankResult):
    """The numbers of a rank. missing: parameters that no loss of this rank has reached."""

    missing: float


@dataclass(kw_only=True)
class SessionStepEnd(StepEnd):
    """The end of a session's steps. stages: of the pipelines that the ranks make."""

    updates: LoopOptimizer
    transport: Transport
    stages: int

    def numbers(self, step: int, own: RankResult) -> SessionNumbers:
        """Return the numbers of this rank."""
        del step
        return SessionNumbers(**asdict(own), missing=self.updates.num_missing)

    def takes(self, step: int, ranks: Sequence[Any]) -> None:
        """Give the parameters gradients that a loss has reached on any rank, as in a plain loop. Collective.

        In nearly all steps one rank has reached all, which the numbers say.
        """
        missing = [rank.missing for rank in ranks]
        if all(min(missing[stage :: self.stages]) == 0 for stage in range(self.stages)):
            self.updates.reach(self.updates.numbers)
            return
        names = list(self.updates.numbers)
        bits = "".join("01"[name in self.updates.withheld.reached] for name in names)
        numbers = [float(int(bits[first : first + _BITS], 2)) for first in range(0, len(bits), _BITS)]
        self.transport.phase = f"step {step}, sharing which parameters the losses reached"
        for row in share_numbers(self.transport, numbers).tolist():
            of_rank = "".join(
                f"{int(number):0{min(_BITS, len(bits) - first)}b}"
                for number, first in zip(row, range(0, len(bits), _BITS), strict=True)
            )
            self.updates.reach(name for name, bit in zip(names, of_rank, strict=True) if bit == "1")
