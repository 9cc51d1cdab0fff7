"""Plans for ranks that are pipelines of p stages with v virtual ones: ByteScale's PP-Balance, levelled in time.

Profiles of full slots with smaller ramps are timed as ideal pipelines, and the most promising are filled
(`microbatch_slots`, or `shelves` if long sequences set the time). Source: W (m V + p - 1), arXiv 2502.21231;
docs/decisions/pipeline-slots.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from lengthwise.core.plan import Microbatch
from lengthwise.core.shape import LayerCut
from lengthwise.planner.problem.effort import LARGE_STEP, SMALL_STEP
from lengthwise.planner.problem.request import PlanRequest
from lengthwise.planner.schedules.microbatch_slots import COARSE, MicrobatchSlots, bundle_rings
from lengthwise.planner.schedules.shelves import plan_shelves, write_shelves
from lengthwise.program.stage_clocks import slot_clocks

FULL_SLOTS = (1.0, 1.1, 1.5, 3.0)  # times the fewest slots that could hold all tokens
RAMPS = (0.5, 1.0, 2.0, 3.0)  # slots of a ramp, per stage
GROWTHS = (1.1, 1.2, 1.35)  # of a slot over the one before, in a ramp
_MOST_SLOTS = 256  # of a profile, unless more are needed to hold all: clocks cost slots x ranks
_TRIED = 12  # profiles whose rings are placed, the fastest ideal ones
_FILLED = 200_000  # sequences filled in over all profiles; at least two profiles are filled
Floats = NDArray[np.float64]
Whole = NDArray[np.int64]


def plan_pipeline(request: PlanRequest, least_seconds: float) -> Iterator[list[Microbatch]]:
    """Yield the plan that should end first, or several for small steps; none for large ones after `least_seconds`."""
    slots = _Slots(request)
    num_sequences = len(request.tokens)
    is_small = num_sequences * request.cluster.ranks <= SMALL_STEP
    profiles = list(_profiles(slots.fewest, request.cut))
    ideal = slots.ideal_seconds(profiles)
    promising = [
        number for number in np.argsort(ideal, kind="stable").tolist() if is_small or ideal[number] < least_seconds
    ]
    tried = [slots.placed(profiles[number]) for number in promising[:_TRIED]]
    tried.sort(key=lambda each: each.end_seconds)
    fitting = (each for each in map(slots.filled, tried) if each is not None)
    filled = list(islice(fitting, max(2, _FILLED // num_sequences)))
    end_seconds = min([least_seconds, *(each.end_seconds for each in filled)])
    # Interleaved stages take microbatches in groups, which rings of unequal lengths delay.
    shelves = plan_shelves(request, end_seconds) if is_small or request.virtual == 1 else []
    is_shelved = bool(shelves) and shelves[0].end_seconds < end_seconds
    if is_small:
        yield from map(slots.written, filled)
    elif end_seconds < least_seconds and not is_shelved:
        yield slots.written(min(filled, key=lambda each: each.end_seconds))
    if is_small or is_shelved:
        yield from (write_shelves(request, shelve) for shelve in shelves[:1])


def is_worth_search(request: PlanRequest) -> bool:
    """Return whether a plan for ranks without stages could end first: a long sequence, or a small step."""
    if request.stages == 1 or len(request.tokens) * request.cluster.ranks <= LARGE_STEP:
        return True
    longest = [int(np.argmax(request.lengths))]
    table = request.growth(request.lengths[longest], request.least_degrees[longest])
    alone = request.cost.ring_piece_seconds(request.lengths[longest], table.quickest())
    return request.stages * float(alone[0]) > request.bound_seconds


def pipeline_schedule(cut: LayerCut) -> dict[str, object]:
    """Return the `schedule` of a plan file."""
    return {"kind": "pipeline", "stages": cut.stages, "virtual": cut.virtual}


def _profiles(fewest: int, cut: LayerCut) -> Iterator[Floats]:
    """Yield slots as shares of a full one, as full as possible; interleaved ones in groups of as many as stages."""
    ramps = [np.ones(0)]
    ramps += [
        growth ** np.arange(-slots, 0.0)
        for slots in sorted({max(1, int(cut.stages * share)) for share in RAMPS})
        for growth in GROWTHS
    ]
    seen = set[bytes]()
    for up in ramps:
        for down in (up, ramps[0]):
            for share in FULL_SLOTS:
                full = max(1, int(np.ceil(share * fewest - up.sum() - down.sum())))
                if cut.virtual > 1:
                    full += -(full + len(up) + len(down)) % cut.stages
                profile = np.concatenate((up, np.ones(full), down[::-1]))
                if len(profile) <= max(_MOST_SLOTS, fewest) and profile.tobytes() not in seen:
                    seen.add(profile.tobytes())
                    yield profile


@dataclass(frozen=True, slots=True, kw_only=True)
class _PlacedProfile:
    """A profile with placed rings, and its end with local sequences spread evenly or filled in."""

    slots: MicrobatchSlots
    targets: Floats  # seconds of local sequences at [rank, slot]
    local: Whole  # sequences, longest first
    seconds: Floats  # of each of them
    end_seconds: float


class _Slots:
    """The sequences of a step, cut for slots of a given time."""

    def __init__(self, request: PlanRequest) -> None:
        self._request, self._ranks = request, request.cluster.ranks
        self._forward = request.cost.forward_share("none")
        found = np.unique(request.lengths, return_inverse=True, return_index=True, return_counts=True)
        self._lengths, places, self._inverse, self._counts = found
        least = request.least_degrees[places]
        self._work = float(self._counts @ (least * request.cost.ring_piece_seconds(self._lengths, least)))
        self._grown = request.growth(self._lengths, least).grown
        self._descending = np.lexsort((np.arange(len(request.tokens)), -request.lengths))
        self.fewest = -(-sum(request.tokens) // request.cluster.longest_tokens)
        self._known: dict[float, tuple[Whole, Floats, float]] = {}

    def ideal_seconds(self, profiles: Sequence[Floats]) -> Floats:
        """Return the end of each profile with even slots; longer sequences take middle slots of their own."""
        rows = [self._ideal_slots(profile) for profile in profiles]
        seconds = np.zeros((max(map(len, rows)), len(rows)))
        for number, row in enumerate(rows):
            seconds[: len(row), number] = row + self._request.cost.fixed_seconds
        return self._clocks(seconds, np.ones(seconds.shape, dtype=np.bool_))

    def placed(self, profile: Floats) -> _PlacedProfile:
        request, capacity = self._request, self._request.cluster.capacity_tokens
        full_slots = float(profile.sum())
        of_length, seconds, work = self._cut(full_slots)
        degrees, took = of_length[self._inverse], seconds[self._inverse]
        is_local = degrees[self._descending] == 1
        cut, local = self._descending[~is_local], self._descending[is_local]
        cut = cut[np.argsort(-degrees[cut], kind="stable")]
        rows = cut.tolist(), request.lengths[cut].tolist(), degrees[cut].tolist(), took[cut].tolist()
        slot_seconds = work / (self._ranks * full_slots)
        bundles = bundle_rings(list(zip(*rows, strict=True)), capacity_tokens=capacity, most_seconds=slot_seconds)
        slots = MicrobatchSlots(self._ranks, profile, bundles, capacity)
        targets = slots.targets(work / self._ranks)
        ends = self._ends(slots, targets)
        return _PlacedProfile(slots=slots, targets=targets, local=local, seconds=took[local], end_seconds=ends)

    def filled(self, placed: _PlacedProfile) -> _PlacedProfile | None:
        lengths = self._request.lengths[placed.local]
        if not placed.slots.fill(lengths, placed.seconds, placed.targets):
            return None
        return replace(placed, end_seconds=self._ends(placed.slots, placed.slots.local))

    def written(self, filled: _PlacedProfile) -> list[Microbatch]:
        return filled.slots.microbatches(filled.local)

    def _ends(self, slots: MicrobatchSlots, local: Floats) -> float:
        seconds = slots.taken + local
        launches = np.where(seconds > 0, self._request.cost.fixed_seconds, 0.0)
        return float(self._clocks((seconds + launches).T, slots.is_first).max())

    def _clocks(self, seconds: Floats, is_first: NDArray[np.bool_]) -> Floats:
        forward = self._forward * seconds
        return slot_clocks(forward, seconds - forward, is_first, self._request.cut)

    def _cut(self, full_slots: float) -> tuple[NDArray[np.int64], Floats, float]:
        """Return degree and seconds of each length so that none exceeds a full slot, and the total work."""
        if full_slots not in self._known:
            cost = self._request.cost
            degrees = self._grown(self._work / (self._request.cluster.ranks * full_slots) + cost.fixed_seconds)
            seconds = cost.ring_piece_seconds(self._lengths, degrees)
            self._known[full_slots] = degrees, seconds, float(self._counts @ (degrees * seconds))
        return self._known[full_slots]

    def _ideal_slots(self, profile: Floats) -> Floats:
        degrees, seconds, work = self._cut(COARSE ** round(np.log(profile.sum()) / np.log(COARSE)))
        ranks = self._request.cluster.ranks
        slow = np.flatnonzero(seconds > work / (ranks * float(profile.sum())) * (1 + 1e-9))
        if len(slow) == 0:
            return profile * (work / (ranks * float(profile.sum())))
        slow = slow[np.argsort(-seconds[slow], kind="stable")]
        filled = np.cumsum(self._counts[slow] * degrees[slow]) / ranks  # slots of all ranks
        many = min(int(np.ceil(filled[-1])), len(profile))
        longest = seconds[slow][np.minimum(np.searchsorted(filled, np.arange(many) + 1e-9), len(slow) - 1)]
        first = (len(profile) - many) // 2
        rest = np.concatenate((profile[:first], profile[first + many :]))
        share = max(0.0, work / ranks - float(longest.sum())) / max(float(rest.sum()), 1.0)
        middle = np.concatenate((longest[::2][::-1], longest[1::2]))  # the longest in the middle
        return np.concatenate((profile[:first] * share, middle, profile[first + many :] * share))
