"""What steps take with what most people use today: FSDP2 in lock-step, with padding, packing, or one size of ring.

All devices run microbatch k side by side, with the gathers of `cost.ending.Traffic` (embedding and head exposed) and
the memory of `cost.memory`. Milliseconds a setting.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lengthwise.cost import Cost
from lengthwise.cost.choices import Choices
from lengthwise.cost.ending import Traffic

Floats = NDArray[np.float64]
_SEED = 0  # of the order in which a trainer comes to its packs


@dataclass(frozen=True, slots=True, kw_only=True)
class LockStep:
    """Group g computes `busy_seconds[k, g]` of microbatch k, `seconds[k]` long; `held_tokens`: of a device at most.

    update_seconds: of the optimizer, at the step's end.
    """

    busy_seconds: Floats
    seconds: Floats
    held_tokens: int
    update_seconds: float = 0.0

    @property
    def step_seconds(self) -> float:
        """The whole step."""
        return float(self.seconds.sum()) + self.update_seconds


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
    known = {tuple(microbatch): 0.0 for microbatch in microbatches}
    for each in known:
        known[each] = cost.fixed_seconds + cost.piece_seconds(each, degree)
    busy = np.zeros(-(-len(microbatches) // groups) * groups)
    busy[: len(microbatches)] = [known[tuple(microbatch)] for microbatch in microbatches]
    busy = busy.reshape(-1, groups)
    slowest, share = busy.max(axis=1), cost.forward_share(cost.choices.recompute)
    return LockStep(
        busy_seconds=busy,
        seconds=traffic.wave_seconds(share * slowest, (1 - share) * slowest),
        held_tokens=max(-(-sum(microbatch) // degree) for microbatch in microbatches),
        update_seconds=cost.ending.update_seconds / ranks,
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
