"""Step times with each layout of parameters, by which `shard: auto` chooses, beside memory.

A batch is planned and simulated as in training, once for each layout that fits, which takes a second or less. If there
are more than `MOST_RANKS` ranks, that many are planned, with their share of the batch and the costs of all: planning
thousands of waves for 512 ranks takes minutes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import inf

from lengthwise.core.errors import LengthwiseError
from lengthwise.core.plan import RECOMPUTE_KINDS
from lengthwise.cost import RESERVED, Choice, Cost, StepMemory
from lengthwise.cost.capacity import tokens_within
from lengthwise.cost.shard_choice import LEAST_TOKENS, LayoutSeconds
from lengthwise.data.recipes import draw_lengths
from lengthwise.planner.service.step_planning import step_planning
from lengthwise.simulator.clocks import simulate_plan

MOST_RANKS = 64
_RANK_TOKENS, _LONGEST, _SEED = 16_384, 32_768, 0


def usual_lengths(ranks: int, capacity_tokens: int | None = None) -> list[int]:
    """Return lengths for unknown data: those of github up to 32K, 16K tokens a rank.

    No sequence is longer than the ranks hold together, at 2,048 tokens each if `capacity_tokens` is not given.
    """
    longest = min(_LONGEST, ranks * (capacity_tokens or LEAST_TOKENS))
    return draw_lengths("github", ranks * _RANK_TOKENS, _SEED, longest_tokens=longest)


def layout_seconds(
    lengths: Sequence[int],
    cost: Cost,
    device_bytes: float,
    *,
    kinds: Sequence[str] = RECOMPUTE_KINDS,
    capacity_tokens: int | None = None,
    offload: str | float = "off",
    heads: str | int = "auto",
) -> LayoutSeconds:
    """Return a function that plans and simulates a step of these lengths with a layout, and returns its seconds.

    cost: costs with whole parameters on every rank. device_bytes: memory of one rank. kinds: kinds of recomputation to
    choose from. capacity_tokens: tokens of a rank (default: what the layout leaves). offload: off, auto, or the ratio
    of a run file.
    """
    longest_first = sorted(lengths, reverse=True)

    def seconds(memory: StepMemory) -> float:
        room = device_bytes * (1 - RESERVED)
        held = {kind: capacity_tokens or tokens_within(memory, room, Choice(recompute=kind)) for kind in kinds}
        share = -(-memory.ranks // MOST_RANKS)
        capacities = {kind: tokens for kind, tokens in held.items() if tokens}
        planning = step_planning(memory, cost, capacities, heads=heads, offload=offload)
        planning = replace(planning, ranks=memory.ranks // share)
        try:
            own = lengths if share == 1 else longest_first[::share]
            return simulate_plan(planning.plan(own), planning.cost).step_seconds if planning.capacities else inf
        except LengthwiseError:  # training will refuse it, too
            return inf

    return seconds
