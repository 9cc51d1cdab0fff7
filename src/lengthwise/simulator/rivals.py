"""Today's usual training, as planners: FSDP2 in lock-step, with padding, packing, or rings of one size.

A `LockStep` is called as `plan_step` is, and its plans in waves are priced and simulated as all others are. A user
chooses its settings once for a run; the search of meshes tries those that `lock_steps` lists.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product

import numpy as np

from lengthwise.core.plan import ImageWork, Microbatch, Piece, Plan
from lengthwise.core.shape import Cluster
from lengthwise.cost import Cost, mixed_capacity
from lengthwise.planner import PlanOptions, score
from lengthwise.program.features import with_requires
from lengthwise.program.ring_order import ring_order

PADDED, PACKED, ONE_RING = "FSDP2, padded", "FSDP2, packed", "FSDP2, one ring size"
PADDED_RINGS = "FSDP2, padded rings"  # one ring size and no packs, as TRL and accelerate have it
BY_WORK = "FSDP2, own sampler"  # packs, or rings of packs, of like work side by side
RIVALS = (PADDED, PACKED, PADDED_RINGS, ONE_RING, BY_WORK)
_SEED = 0  # of a trainer's shuffled order of packs
_MORE_MICROBATCHES = (0, 1, 2, 4, 8)  # beyond the fewest that hold a batch
_FILLED = 0.98  # share of a pack that whole sequences fill


@dataclass(frozen=True, slots=True, kw_only=True)
class LockStep:
    """A planner of microbatches that all ranks run side by side.

    size: sequences of a microbatch, each padded to the longest of them, in data order or `by_length`; None for packs up
    to the capacity. degree: ranks that share a microbatch (default 1); left-over ranks are idle. by_work: True runs
    packs of most attention (with images, of most work) first, so that like ones run side by side; else their order is
    shuffled.
    """

    size: int | None = None
    by_length: bool = False
    degree: int = 1
    by_work: bool = False

    def __call__(self, tokens: Sequence[int], cluster: Cluster, cost: Cost, options: PlanOptions) -> Plan:
        """Plan one step; the plan's lengths are in the order of its microbatches, padding included."""
        parts = self._microbatches(tokens, cluster.capacity_tokens, cost)
        firsts = range(0, cluster.ranks - self.degree + 1, self.degree)
        groups = [ring_order(first, self.degree) for first in firsts]
        lengths, waves, images = list[int](), list[Microbatch](), list[ImageWork]()
        works = {length: ImageWork(total, largest) for length, *_, total, largest in cost.trees}
        for begin in range(0, len(parts), len(groups)):
            pieces = list[Piece]()
            for ranks, own in zip(groups, parts[begin : begin + len(groups)], strict=False):
                pieces.append(Piece(ranks=ranks, sequences=tuple(range(len(lengths), len(lengths) + len(own)))))
                images += [works.get(length, ImageWork()) for length in own] if works else []
                lengths += [max(own)] * len(own) if self.size is not None else own
            waves.append(Microbatch(pieces=tuple(pieces), recompute=options.recompute))
        plan = with_requires(
            Plan(
                ranks=cluster.ranks,
                layers=options.layers,
                capacity=cluster.capacity_tokens,
                tokens=tuple(lengths),
                microbatches=tuple(waves),
                images=tuple(images),
                schedule={"kind": "waves"},
            )
        )
        seconds = score(plan, cost).makespan_seconds
        return replace(plan, notes={"predicted_seconds": seconds, "bound_seconds": 0.0, "cost": cost.version})

    def _microbatches(self, tokens: Sequence[int], capacity_tokens: int, cost: Cost) -> list[list[int]]:
        if self.size is not None:
            return unpadded(tokens, self.size, by_length=self.by_length)
        packs = packed(tokens, self.degree * capacity_tokens)
        if self.by_work:
            seconds = partial(_seconds, cost=cost) if cost.trees else _squares
            packs.sort(key=seconds, reverse=True)
        return packs


def _squares(pack: Sequence[int]) -> float:
    return sum(length * length for length in pack)


def _seconds(pack: Sequence[int], cost: Cost) -> float:
    return float(cost.compute_seconds(np.array(pack)).sum())


def unpadded(tokens: Sequence[int], size: int, *, by_length: bool) -> list[list[int]]:
    """Return microbatches of `size` sequences before they are padded. by_length: True sorts sequences first."""
    ordered = sorted(tokens, reverse=True) if by_length else list(tokens)
    return [ordered[first : first + size] for first in range(0, len(ordered), size)]


def packed(tokens: Sequence[int], capacity_tokens: int) -> list[list[int]]:
    """Pack whole sequences, longest first, each into the pack that it fits best; shuffle the packs."""
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


def lock_steps(
    name: str, batches: Sequence[Sequence[int]], ranks: int, capacities: Mapping[str, int], *, layers: int
) -> Iterator[tuple[str, int, LockStep]]:
    """Yield the settings of one of `RIVALS` that hold the longest sequence: (recomputation, tokens of a rank, planner).

    Packs are so large that every rank has one in each microbatch. capacities: tokens of a rank, by recomputation. Where
    one kind does not hold the longest, a part of the `layers` may have a stronger one, as in our plans.
    """
    longest, most_tokens = max(map(max, batches)), max(map(sum, batches))
    divisors = [d for d in range(2, ranks + 1) if ranks % d == 0]
    degrees = {PADDED_RINGS: divisors, ONE_RING: divisors, BY_WORK: [1, *divisors]}.get(name, [1])
    leasts = [(degree, -(-longest // degree)) for degree in degrees]
    holding = [(*each, {**capacities, **mixed_capacity(capacities, each[1], layers)}) for each in leasts]
    for degree, least, kind, held in ((*each, *of) for *each, kinds in holding for of in kinds.items()):
        if least > held:
            continue
        if name in (PADDED, PADDED_RINGS):
            orders = (True,) if degree > 1 else (False, True)  # rings of like rows always wait less
            for power, by_length in product(range((held // least).bit_length()), orders):
                yield kind, held, LockStep(size=2**power, by_length=by_length, degree=degree)
            continue
        fewest = -(-most_tokens // int(ranks * held * _FILLED))
        rooms = {int(most_tokens / _FILLED / ((fewest + more) * ranks)) for more in _MORE_MICROBATCHES}
        for room in sorted({held, *(max(least, each) for each in rooms if each <= held)}, reverse=True):
            yield kind, room, LockStep(degree=degree, by_work=name == BY_WORK)
