"""The baseline that most fine-tuning runs use: packed data parallelism, every sequence whole on one rank.

1. Sequences go to the rank that is done first, longest first, into packs up to the capacity, and are exchanged until
   ranks are level; or packs are filled in data order and dealt by time, the slowest first. The better is taken.
2. Nothing travels but gradients, so a sequence longer than a rank holds is refused.

O(n log N) for n sequences on N ranks. docs/decisions/baselines-in-their-favour.md.
"""

from __future__ import annotations

from collections.abc import Sequence

from lengthwise.core.errors import PlanError
from lengthwise.core.plan import Microbatch
from lengthwise.planner.baselines.single_degree import schedule_at
from lengthwise.planner.problem.request import PlanRequest
from lengthwise.program.ring_order import interval_microbatch

PACKED_DP = "packed-dp"


def plan_packed_dp(request: PlanRequest) -> list[Microbatch]:
    """Plan one step of whole sequences; one longer than the capacity is alone in its pack, for offload to hold."""
    packs = schedule_at(request, 1).packs
    return [interval_microbatch(rank, 1, pack) for rank, pack in packs]


def refuse_cut(tokens: Sequence[int], held_tokens: int) -> None:
    """Refuse sequences that one rank does not hold.

    Raises:
        PlanError: names the longest, how many there are, and what would hold it.
    """
    longest = max(tokens)
    if longest > held_tokens:
        count = sum(length > held_tokens for length in tokens)
        raise PlanError(
            f"sequence {tokens.index(longest)}",
            expected=f"at most {held_tokens} tokens, what one rank holds: planner {PACKED_DP} cuts no sequence",
            got=f"{longest} tokens" + (f", and {count - 1} more that are too long" if count > 1 else ""),
            remedy=f"Raise {{capacity_tokens}} to {longest} (more tensor-parallel devices a rank or {{recompute}} make "
            "room), or take a planner that cuts sequences, lengthwise for example.",
        )
