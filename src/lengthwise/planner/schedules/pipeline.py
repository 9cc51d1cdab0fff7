"""Plans for ranks that are pipelines of p stages with v virtual ones: PP-Balance of ByteScale, levelled in time.

On equal microbatches of t seconds a pipeline takes t m + t (p - 1) / v: W (m V + p - 1) of arXiv 2502.21231. Unequal
ones cost more the more neighbours differ: stages wait for the longest at every change. The paper gives each pipeline
sequences of like lengths, falling. Here microbatches are made alike in time, whatever is in them: sequences that take
longer than a slot are cut, short and long ones share cells (`slots`), and all ranks have as many slots. What is then
left is filling and draining, which lasts (p - 1) / v times the first forward and the last backward pass. So small slots
stand at the ends and grow towards the middle, by a factor each, where launches allow it: 32 full packs of 8K in 8
stages lose 9 % to bubbles and not 22 %.

1. Profiles are drawn: numbers of full slots, lengths of the ramps and their factors. For each, all sequences are
   cut to its slot's time, and one ideal pipeline is run on clocks (`stage_clocks`), all profiles at once.
2. The most promising are filled with the real sequences.

Slots suit steps of many short sequences. Where long ones set the time, columns of rings end sooner (`columns`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from lengthwise.core.plan import Microbatch
from lengthwise.planner.problem.request import PlanRequest
from lengthwise.planner.schedules.slots import Grid, bundle_rings
from lengthwise.program.stage_clocks import stage_clocks

FULL_SLOTS = (1.0, 1.05, 1.1, 1.2, 1.35, 1.6, 2.0, 3.0, 4.0)  # of the fewest that could hold all tokens
RAMPS = (0.5, 1.0, 2.0, 3.0)  # slots of one, in stages
GROWTHS = (1.1, 1.2, 1.35)  # of a slot over the one before, in a ramp
_MOST_SLOTS = 256
_COARSE = 1.02  # between sums of slots for which all profiles are compared with the same degrees
_TRIED, _FILLED = 9, 4  # profiles that are tried, and those that all sequences have room in
_SMALL = 50_000  # sequences x ranks, up to which they are filled whenever they should end
_REFINED = 3  # times that a slot's time and the degrees that it asks for are found from each other

Floats = NDArray[np.float64]


def plan_slots(request: PlanRequest, least_seconds: float) -> Iterator[list[Microbatch]]:
    """Yield plans of the profiles that should end first; of large steps, only if before `least_seconds`.

    An ideal pipeline is no bound: its long sequences stand in the middle, where a small step may end with them.
    """
    slots = _Slots(request)
    is_small = len(request.tokens) * request.cluster.ranks <= _SMALL
    profiles = list(_profiles(slots.fewest, request.stages, request.virtual))
    ideal = slots.ideal_seconds(profiles)
    promising = [
        number for number in np.argsort(ideal, kind="stable").tolist() if is_small or ideal[number] < least_seconds
    ]
    filled = (slots.filled(profiles[number]) for number in promising[:_TRIED])
    yield from islice((each for each in filled if each is not None), _FILLED)


def pipeline_schedule(stages: int, virtual: int) -> dict[str, object]:
    """Return the `schedule` of a plan file."""
    return {"kind": "pipeline", "stages": stages, "virtual": virtual}


def _profiles(fewest: int, stages: int, virtual: int) -> Iterator[Floats]:
    """Yield slots as shares of a full one: none above 1, interleaved ones in groups of `stages`, as full as can be."""
    ramps = [np.ones(0)]
    ramps += [
        growth ** np.arange(-slots, 0.0)
        for slots in sorted({max(1, int(stages * share)) for share in RAMPS})
        for growth in GROWTHS
    ]
    seen = set[bytes]()
    for up in ramps:
        for down in (up, ramps[0]):
            for share in FULL_SLOTS:
                full = max(1, int(np.ceil(share * fewest - up.sum() - down.sum())))
                if virtual > 1:
                    full += -(full + len(up) + len(down)) % stages
                profile = np.concatenate((up, np.ones(full), down[::-1]))
                if len(profile) <= max(_MOST_SLOTS, fewest) and profile.tobytes() not in seen:
                    seen.add(profile.tobytes())
                    yield profile


class _Slots:
    """The sequences of a step, cut for slots of some time."""

    def __init__(self, request: PlanRequest) -> None:
        self._request = request
        found = np.unique(request.lengths, return_index=True, return_inverse=True, return_counts=True)
        self._lengths, places, self._inverse, self._counts = found
        self._least = request.least_degrees[places]
        self._grown = request.growth(self._lengths, self._least).grown
        self.fewest = -(-sum(request.tokens) // request.cluster.longest_tokens)
        self._known: dict[float, tuple[NDArray[np.int64], Floats, float]] = {}

    def ideal_seconds(self, profiles: Sequence[Floats]) -> Floats:
        """Tell when each profile would end if every rank had its even share of every slot.

        Sequences that take longer than a slot at any degree take slots of their own, in the middle.
        """
        rows = [self._ideal_slots(profile) + self._request.cost.fixed_seconds for profile in profiles]
        owner = np.repeat(np.arange(len(profiles)), [len(row) for row in rows])
        seconds = np.concatenate(rows)
        share = self._request.cost.forward_share("none")
        clocks = stage_clocks(
            [(number,) for number in owner.tolist()],
            share * seconds,
            (1 - share) * seconds,
            stages=self._request.stages,
            virtual=self._request.virtual,
        )
        ends = np.zeros(len(profiles))
        np.maximum.at(ends, owner, clocks.end.max(axis=0))
        return ends

    def filled(self, profile: Floats) -> list[Microbatch] | None:
        """Fill a profile with the sequences; None if they do not fit its slots."""
        tokens, ranks = self._request.tokens, self._request.cluster.ranks
        capacity = self._request.cluster.capacity_tokens
        degrees, seconds, work = self._cut(float(profile.sum()))
        slot_seconds = work / (ranks * float(profile.sum()))
        degree, took = degrees[self._inverse], seconds[self._inverse]
        order = np.lexsort((np.arange(len(tokens)), -self._request.lengths, -degree))
        rings = [(i, tokens[i], int(degree[i]), float(took[i])) for i in order.tolist() if degree[i] > 1]
        bundles = bundle_rings(rings, capacity_tokens=capacity, most_seconds=slot_seconds)
        grid = Grid(ranks, profile, bundles, capacity)
        local = [i for i in order.tolist() if degree[i] == 1]
        return grid.microbatches() if grid.fill(local, tokens, took.tolist(), work / ranks) else None

    def _cut(self, full_slots: float) -> tuple[NDArray[np.int64], Floats, float]:
        """Find degrees and seconds of each length so that none takes longer than a full slot, and the work of all."""
        if full_slots not in self._known:
            cost = self._request.cost
            degrees = self._least
            for _ in range(_REFINED):
                seconds = cost.ring_piece_seconds(self._lengths, degrees)
                work = float(self._counts @ (degrees * seconds))
                limit = work / (self._request.cluster.ranks * full_slots) + cost.fixed_seconds
                degrees = self._grown(limit)
            seconds = cost.ring_piece_seconds(self._lengths, degrees)
            self._known[full_slots] = degrees, seconds, float(self._counts @ (degrees * seconds))
        return self._known[full_slots]

    def _ideal_slots(self, profile: Floats) -> Floats:
        degrees, seconds, work = self._cut(_COARSE ** round(np.log(profile.sum()) / np.log(_COARSE)))
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
        hill = np.concatenate((longest[::2][::-1], longest[1::2]))
        return np.concatenate((profile[:first] * share, hill, profile[first + many :] * share))
