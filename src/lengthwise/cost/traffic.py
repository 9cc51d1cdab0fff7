"""Costs of ranks that have a part of the parameters: what a wave gathers and sums, and what the step's end does."""

from __future__ import annotations

from dataclasses import replace

from lengthwise.cost.analytic import GRADIENT_BYTES
from lengthwise.cost.ending import Ending, Traffic
from lengthwise.cost.memory import StepMemory
from lengthwise.cost.terms import Cost


def sharded_traffic(memory: StepMemory, cost: Cost, *, head_apart: bool = False) -> Traffic:
    """Return what travels in a wave of a model of these states, over the links of `cost` and all `memory.ranks`.

    Parameters travel in the model's numbers, gradients in fp32; of what does not train there are no gradients.
    head_apart: a head that is not tied to the embedding is a unit of its own, as ours is.
    """
    layer, rest = memory.layer_params()
    words = float(memory.shape.hidden * memory.shape.vocab)
    head = words if head_apart and rest > words else 0.0
    trains = 1.0 if memory.trained is None else memory.trained / (layer * memory.shape.layers)
    trains_rest = memory.trained is None

    ending = Ending(reduced_bytes_per_second=cost.ending.reduced_bytes_per_second)  # where that was measured

    def seconds(moved_bytes: float) -> float:
        return replace(cost, reduced_bytes=moved_bytes, ending=ending).step_end_seconds(memory.ranks)

    return Traffic(
        layers=memory.shape.layers,
        gather_seconds=seconds(layer * memory.dtype_bytes),
        reduce_seconds=seconds(layer * trains * GRADIENT_BYTES),
        rest_gather_seconds=seconds((rest - head) * memory.dtype_bytes),
        rest_reduce_seconds=seconds((rest - head) * trains_rest * GRADIENT_BYTES),
        head_gather_seconds=seconds(head * memory.dtype_bytes),
        head_reduce_seconds=seconds(head * trains_rest * GRADIENT_BYTES),
    )


def sharded_cost(cost: Cost, memory: StepMemory, *, group: int | None = None) -> Cost:
    """Return the costs of ranks whose parameters lie over groups of `group` ranks (None: all of `memory.ranks`).

    Over all there is nothing left to be summed at the step's end; copies of groups are, as whole parameters would be,
    which all links of a node do together.
    """
    ranks = memory.ranks
    over = ranks if group is None else min(group, ranks)
    if over == 1 or not cost.prices_choices:
        return cost
    traffic = sharded_traffic(replace(memory, ranks=over), cost, head_apart=True)
    left = cost.reduced_bytes if over < ranks else 0.0
    return replace(cost, traffic=traffic, reduced_bytes=left, version=f"{cost.version} over {over}")
