"""Global batches of random tokens: of published lengths, of one length, and of one long document among short ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lengthwise.core.plan import Plan
from lengthwise.core.shape import Cluster
from lengthwise.cost import Cost
from lengthwise.data.recipes import draw_lengths
from lengthwise.planner import PlanOptions, plan_step

SHORT_SHARE = 16  # of the long document's tokens the short ones beside it have at most


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchKind:
    """What a batch is drawn from: a recipe's name, `uniform` or `one long`; no document is over `longest_tokens`.

    recompute: how its microbatches run, as in a plan.
    """

    name: str
    tokens: int
    longest_tokens: int
    recompute: str = "none"

    def lengths(self, seed: int = 0) -> list[int]:
        """Return the lengths of a batch, always the same ones for a seed."""
        if self.name == "uniform":
            return [self.longest_tokens] * max(1, self.tokens // self.longest_tokens)
        if self.name == "one long":
            most, left = max(1, self.longest_tokens // SHORT_SHARE), max(1, self.tokens - self.longest_tokens)
            return [self.longest_tokens, *draw_lengths("github", left, seed, longest_tokens=most)]
        return draw_lengths(self.name, self.tokens, seed, longest_tokens=self.longest_tokens)


def packs_of(lengths: Sequence[int], pack_tokens: int) -> list[tuple[int, ...]]:
    """Pack documents, longest first, where they fit first; one over `pack_tokens` is alone."""
    packs, left = list[list[int]](), list[int]()
    for index in sorted(range(len(lengths)), key=lambda each: -lengths[each]):
        place = next((number for number, room in enumerate(left) if room >= lengths[index]), len(packs))
        if place == len(packs):
            packs.append([])
            left.append(max(pack_tokens, lengths[index]))
        packs[place].append(index)
        left[place] -= lengths[index]
    return [tuple(pack) for pack in packs]


def plan_for(
    lengths: Sequence[int],
    cost: Cost,
    cluster: Cluster,
    *,
    planner: str = "lengthwise",
    layers: int,
    recompute: str = "none",
) -> Plan:
    """Plan a batch; `static` gets a mesh for its longest sequence."""
    context = max(lengths) if planner == "static" else None
    options = PlanOptions(planner=planner, layers=layers, context_tokens=context, recompute=recompute)
    return plan_step(lengths, cluster, cost, options)
