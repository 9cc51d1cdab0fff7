"""NCCL on clocks: what calls in the order of each rank's host do to the times of its device; no tensors, no threads.

1. A device computes in the order of its host. It waits for a call only where it is given a `Wait`.
2. A call begins when what was computed before it is done, the call before it of its communicator has ended, those that
   its host posted before it have begun (NCCL_LAUNCH_ORDER_IMPLICIT), and its CTAs are free. It has them until its end.
3. An operation takes the seconds that are its `payload` from when all its sides have begun. A call ends as a whole,
   with the last of its operations.

The host takes no time. Calls match as in `testing.order`: by the order in which a pair, or the members, post them.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from lengthwise.core.errors import TransferError
from testing.order import Operation


@dataclass(frozen=True, slots=True, kw_only=True)
class Compute:
    """Work of a device, apart from calls."""

    label: object
    seconds: float


@dataclass(eq=False, slots=True, kw_only=True)
class Call:
    """A grouped call or a collective of one rank; the fields from `rank` on are what became of it."""

    communicator: str
    operations: Sequence[Operation]
    ctas: int = 8
    label: Any = ""
    rank: int = -1
    before: Call | None = None  # the one before it of its communicator
    sides: list[list[Call | None]] = field(default_factory=list)  # of each operation
    is_reached: bool = False
    begun: float | None = None
    ended: float | None = None

    def is_due(self) -> bool:
        """Whether it could begin, as far as computing and its communicator go."""
        return self.is_reached and (self.before is None or self.before.ended is not None)

    def is_met(self) -> bool:
        """Whether all sides of its operations have begun."""
        return all(side is not None and side.begun is not None for sides in self.sides for side in sides)

    def last_end(self) -> float:
        """Return when the last of its operations ends, once it is met."""
        begun = [[side.begun or 0.0 for side in sides if side is not None] for sides in self.sides]
        return max(max(each) + operation.payload for each, operation in zip(begun, self.operations, strict=True))

    def __str__(self) -> str:
        """Return whose call it is."""
        return f"rank {self.rank} in {self.label} on {self.communicator}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """Lets a device wait until a call of its own has ended."""

    call: Call


Item = Compute | Call | Wait


class FakeNccl:
    """Runs a list of items for each rank.

    ctas: that calls can have at a time on a device. ends: when computing ended, by (rank, label). waited: seconds that
    the device of each rank waited for calls. seconds: when all has ended.

    Raises:
        TransferError: sides of other sizes; calls that wait for each other for ever, or for one that is never made.
    """

    def __init__(self, items: Sequence[Sequence[Item]], *, ctas: int = 132) -> None:
        self._items, self._ctas = items, ctas
        self._calls = [[each for each in own if isinstance(each, Call)] for own in items]
        self._next_item, self._next_call = [0] * len(items), [0] * len(items)
        self.ends: dict[tuple[int, object], float] = {}
        self.waited, self.seconds = [0.0] * len(items), 0.0
        self._under_way: list[list[Call]] = [[] for _ in items]
        self._stuck = dict[int, float]()  # ranks whose device waits, since when
        self._events, self._number = list[tuple[float, int, int, Call | None]](), count()
        self._match()
        for rank in range(len(items)):
            self._at(0.0, rank)
        while self._events:
            now, _, rank, call = heapq.heappop(self._events)
            self.seconds = now
            if call is not None:
                call.ended = now
                self._under_way[rank].remove(call)
            self._go_on(rank, now)
        self._refuse_unfinished()

    def _match(self) -> None:
        """Connect the sides of all operations."""
        posted: dict[object, dict[int, tuple[Call, Operation]]] = defaultdict(dict)
        wanted = list[tuple[Call, Operation, object, Sequence[int]]]()
        for rank, calls in enumerate(self._calls):
            numbers, last = Counter[object](), dict[str, Call]()
            for call in calls:
                call.rank, call.before = rank, last.get(call.communicator)
                last[call.communicator] = call
                for each in call.operations:
                    ranks: Sequence[int] = each.members or range(len(self._items))
                    if each.kind != "collective":
                        ranks = (rank, each.peer) if each.kind == "send" else (each.peer, rank)
                    what = (call.communicator, each.kind == "collective", *ranks)
                    numbers[what] += 1
                    key = (*what, numbers[what])
                    posted[key][rank] = (call, each)
                    wanted.append((call, each, key, ranks))
        for call, each, key, ranks in wanted:
            for other, side in posted[key].values():
                if side.size != each.size:
                    got, remedy = f"{side.size} of {other}", "Let all ranks post their calls in one order."
                    raise TransferError(str(call), expected=f"{each.size}", got=got, remedy=remedy)
            call.sides.append([posted[key][rank][0] if rank in posted[key] else None for rank in ranks])

    def _at(self, seconds: float, rank: int, ends: Call | None = None) -> None:
        heapq.heappush(self._events, (seconds, next(self._number), rank, ends))

    def _go_on(self, rank: int, now: float) -> None:
        """Let a device do what it can at this time."""
        items = self._items[rank]
        if rank in self._stuck:
            self.waited[rank] += now - self._stuck.pop(rank)
        while (place := self._next_item[rank]) < len(items):
            item = items[place]
            if isinstance(item, Wait):
                if item.call.ended is None:
                    self._stuck[rank] = now
                    break
            elif isinstance(item, Call):
                item.is_reached = True
            elif (rank, item.label) not in self.ends:
                self.ends[rank, item.label] = now + item.seconds
                self._at(now + item.seconds, rank)
                break
            elif now < self.ends[rank, item.label]:
                break
            self._next_item[rank] += 1
        self._begin_calls(rank, now)

    def _begin_calls(self, rank: int, now: float) -> None:
        calls = self._calls[rank]
        while self._next_call[rank] < len(calls):
            call, taken = calls[self._next_call[rank]], sum(each.ctas for each in self._under_way[rank])
            if not call.is_due() or taken + call.ctas > self._ctas:
                return
            call.begun = now
            self._under_way[rank].append(call)
            self._next_call[rank] += 1
            for each in dict.fromkeys(side for sides in call.sides for side in sides):
                if each is not None and each.is_met():
                    self._at(each.last_end(), each.rank, each)

    def _refuse_unfinished(self) -> None:
        if left := [str(each) for calls in self._calls for each in calls if each.ended is None]:
            remedy = "Let all ranks post their calls in one order, with CTAs for all that are under way."
            raise TransferError(
                "NCCL", expected="every call to end", got=f"a deadlock: {'; '.join(left)}", remedy=remedy
            )
