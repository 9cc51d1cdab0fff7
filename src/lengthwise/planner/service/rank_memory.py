"""Which microbatches fit into the memory of a rank, by measurements of small passes; no torch.

The plan file counts tokens, but what backward needs beside saved activations is not offloaded: `with_offload` gives
each microbatch the ratio that it needs, or the step is planned again with a capacity for which the plan file's rule
suffices.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from lengthwise.core.held import fullest_tokens, kept_ratio, largest
from lengthwise.core.plan import Microbatch, Plan
from lengthwise.cost import STEP_TOKENS, StepBytes

_RATIOS = (0.0, 0.25, 0.5, 0.75, 1.0)
_DIGITS = 4  # of a ratio


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """The memory of a rank.

    budget_bytes: bytes for microbatches, beside those kept from step to step. leaving_bytes: bytes of host copies in
    flight. layouts: bytes of microbatches on one rank, and in all other layouts of plans, by kind of recomputation.
    """

    budget_bytes: float
    layouts: Mapping[str, tuple[StepBytes, ...]]
    leaving_bytes: int = 0

    def peak_bytes(self, kind: str, tokens: int, offload: float = 0.0) -> int:
        """Return the most bytes that microbatches of this many tokens take."""
        return max(each.peak(tokens, offload, leaving_bytes=self.leaving_bytes) for each in self.layouts[kind])

    def most_tokens(self, kind: str, most: int, *, offload: float | None = 0.0) -> int:
        """Return the capacity in multiples of 128 tokens, up to the first one >= `most`; 0 if 128 do not fit.

        offload: ratio of every microbatch, None for any ratio, by the plan file's rule.
        """
        layers = self.layouts[kind][0].layers
        held = [(ratio, kept_ratio(ratio, layers)) for ratio in (_RATIOS if offload is None else (offload,))]

        def fits(steps: int) -> bool:
            tokens = steps * STEP_TOKENS
            return all(self.peak_bytes(kind, int(tokens / kept), ratio) <= self.budget_bytes for ratio, kept in held)

        return STEP_TOKENS * largest(fits, -(-most // STEP_TOKENS))

    def most_held(self, kind: str, ratio: float, most: int) -> int:
        """Return the most tokens that a rank holds, up to about `most`, with this ratio offloaded."""
        kept = kept_ratio(ratio, self.layouts[kind][0].layers)
        return int(self.most_tokens(kind, math.ceil(most * kept), offload=ratio) / kept)

    def with_offload(self, plan: Plan) -> Plan | None:
        """Return a plan whose microbatches offload as much as they need, or None if one does not fit at all."""
        microbatches = [self._offloaded(plan, microbatch) for microbatch in plan.microbatches]
        if None in microbatches:
            return None
        return replace(plan, microbatches=tuple(filter(None, microbatches)))

    def _offloaded(self, plan: Plan, microbatch: Microbatch) -> Microbatch | None:
        if not microbatch.offload:
            return microbatch
        tokens, units = fullest_tokens(plan, microbatch), 10**_DIGITS

        def fits(unit: int) -> bool:
            return self.peak_bytes(microbatch.recompute, tokens, unit / units) <= self.budget_bytes

        least = math.ceil(microbatch.offload * units)
        if not fits(units):
            return None
        spared = largest(lambda less: fits(units - less), units - least)
        return replace(microbatch, offload=max(microbatch.offload, (units - spared) / units))


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacities:
    """Measured capacities of a rank in tokens, by kind of recomputation.

    plain: capacities without offload, or with the run's own ratio. offloading: capacities by the plan file's rule.
    """

    plain: Mapping[str, int]
    offloading: Mapping[str, int]
    memory: RankMemory
