"""What steps take with what most people use today: FSDP2 in lock-step, with padding, packing, or one size of ring.

Parameters lie over all devices. In each microbatch a layer is gathered before its forward and again before its
backward, and its gradients are reduced and scattered after it, all beside the computation of the layer before it:

    forward   g + (L - 1) max(f, g) + f
    backward  g + (L - 1) max(b, g + r) + b + r

of L layers, f and b seconds of one layer's passes on the slowest device, g of a gather, r of a reduction; embedding and
head are gathered and reduced before and after, hidden by nothing. All devices run microbatch k side by side, and so
wait for the slowest of them. Memory is that of `cost.memory` for sharded parameters. Costs: milliseconds a setting.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from lengthwise.cost import Cost, StepMemory
from lengthwise.cost.analytic import GRADIENT_BYTES
from lengthwise.cost.choices import Choices
from lengthwise.cost.ending import Ending

Floats = NDArray[np.float64]
_SEED = 0  # of the order in which a trainer comes to its packs


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Seconds in which sharded parameters and gradients travel; `rest`: embedding and head, in no layer."""

    layers: int
    gather_seconds: float
    reduce_seconds: float
    rest_gather_seconds: float = 0.0
    rest_reduce_seconds: float = 0.0

    def microbatch_seconds(self, forward: Floats, backward: Floats) -> Floats:
        """Return how long microbatches take; entry i computes `forward[i]` and `backward[i]` seconds in all layers."""
        layers, gather, reduce = self.layers, self.gather_seconds, self.reduce_seconds
        f, b = forward / layers, backward / layers
        there = gather + (layers - 1) * np.maximum(f, gather) + f
        back = gather + (layers - 1) * np.maximum(b, gather + reduce) + b + reduce
        return self.rest_gather_seconds + there + back + self.rest_reduce_seconds


def sharded_traffic(memory: StepMemory, cost: Cost) -> Traffic:
    """Return what travels in a microbatch of a model of these states, over the links of `cost`.

    Parameters travel in the model's numbers, gradients in fp32; of what does not train there are no gradients.
    """
    layer, rest = memory.layer_params()
    trains = 1.0 if memory.trained is None else memory.trained / (layer * memory.shape.layers)
    trains_rest = memory.trained is None

    def seconds(moved_bytes: float) -> float:
        return replace(cost, reduced_bytes=moved_bytes, ending=Ending()).step_end_seconds(memory.ranks)

    return Traffic(
        layers=memory.shape.layers,
        gather_seconds=seconds(layer * memory.dtype_bytes),
        reduce_seconds=seconds(layer * trains * GRADIENT_BYTES),
        rest_gather_seconds=seconds(rest * memory.dtype_bytes),
        rest_reduce_seconds=seconds(rest * trains_rest * GRADIENT_BYTES),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LockStep:
    """A step in lock-step: entry [k, g] of `busy_seconds` is what group g computes in microbatch k, `seconds[k]` long.

    held_tokens: the most that a device holds at once.
    """

    busy_seconds: Floats
    seconds: Floats
    held_tokens: int

    @property
    def step_seconds(self) -> float:
        """The whole step."""
        return float(self.seconds.sum())


def lock_step(microbatches: Sequence[Sequence[int]], ranks: int, degree: int, cost: Cost, traffic: Traffic) -> LockStep:
    """Run microbatches in this order, each cut over `degree` ranks, as many side by side as there are groups of ranks.

    Args:
        microbatches: lengths of the sequences of each, in tokens, padding included.
        ranks: devices in all; what `degree` leaves over has nothing to do.
        degree: of context parallelism, of all of them.
        cost: of the kind of recomputation (`Cost.choosing`).
        traffic: of sharded parameters.
    """
    groups = ranks // degree
    known = {tuple(each): 0.0 for each in microbatches}
    for each in known:
        known[each] = cost.fixed_seconds + cost.piece_seconds(each, degree)
    busy = np.zeros(-(-len(microbatches) // groups) * groups)
    busy[: len(microbatches)] = [known[tuple(each)] for each in microbatches]
    busy = busy.reshape(-1, groups)
    slowest, share = busy.max(axis=1), cost.forward_share(cost.choices.recompute)
    return LockStep(
        busy_seconds=busy,
        seconds=traffic.microbatch_seconds(share * slowest, (1 - share) * slowest),
        held_tokens=max(-(-sum(each) // degree) for each in microbatches),
    )


def padded(tokens: Sequence[int], size: int, *, by_length: bool) -> list[list[int]]:
    """Make microbatches of `size` sequences, each padded to the longest of them; `by_length`: of like lengths."""
    ordered = sorted(tokens, reverse=True) if by_length else list(tokens)
    parts = [ordered[first : first + size] for first in range(0, len(ordered), size)]
    return [[max(part)] * len(part) for part in parts]


def packed(tokens: Sequence[int], capacity_tokens: int) -> list[list[int]]:
    """Pack whole sequences, longest first, each where it fits best; the packs come in the order of a shuffled set."""
    room: list[tuple[int, int]] = []  # (tokens left, pack), ascending
    packs: list[list[int]] = []
    for length in sorted(tokens, reverse=True):
        place = bisect_left(room, (length, 0))
        left, number = room.pop(place) if place < len(room) else (capacity_tokens, len(packs))
        if number == len(packs):
            packs.append([])
        packs[number].append(length)
        insort(room, (left - length, number))
    order = np.random.Generator(np.random.PCG64(_SEED)).permutation(len(packs)).tolist()
    return [packs[number] for number in order]


def recomputing(cost: Cost, kind: str, layers: int) -> Cost:
    """Return the costs of one kind of recomputation, as `lock_step` takes them."""
    return cost.choosing(Choices(recompute=kind, layers=layers))
