"""Which keys travel where along a ring: whose keys a position holds at each ring step, and how gradients return.

Without a window keys go round once: at ring step t position j holds those of owner j - t, and gradients follow one
step behind. With a window keys travel both ways, `ahead` and `behind`, as far as a block needs them, and gradients
return the same way.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from lengthwise.program.records import Content

_WAYS = (1, -1)


class Move(NamedTuple):
    """`content` of position `owner` goes from position `source` to position `target`."""

    source: int
    target: int
    content: Content
    owner: int


@dataclass(frozen=True, kw_only=True)
class Forwarding:
    """The routes of one ring's shards. goes_round: True if keys make a full turn.

    needed: by owner, offsets o for which position owner + o has a block with its keys.
    """

    degree: int
    goes_round: bool
    needed: tuple[frozenset[int], ...]

    @cached_property
    def reach(self) -> tuple[int, int]:
        """(`ahead`, `behind`): how many ring steps keys travel onward and back."""
        if self.goes_round:
            return self.degree - 1, 0
        offsets = sorted(set().union(*self.needed))
        # Each offset is reached from one side; the split after the i-th one that needs the fewest rounds wins.
        splits = list(zip([0, *offsets], [*(self.degree - offset for offset in offsets), 0], strict=True))
        return min(splits, key=lambda split: (max(split), sum(split), -split[0]))

    @property
    def ring_steps(self) -> int:
        """Number of ring steps with blocks to compute; 1 for own keys only."""
        return 1 + max(self.reach)

    def owners(self, position: int, ring_step: int) -> list[int]:
        """List the positions whose keys `position` holds at `ring_step`, whether or not a block needs them."""
        if ring_step == 0:
            return [position]
        ahead, behind = self.reach
        onward = [(position - ring_step) % self.degree] if ring_step <= ahead else []
        return onward + ([(position + ring_step) % self.degree] if ring_step <= behind else [])

    def key_moves(self, ring_step: int, position: int | None = None) -> Iterator[Move]:
        """Yield the keys sent during `ring_step`; only those from or to `position`, if given."""
        if ring_step >= max(self.reach):
            return
        for owner, way in self._travelling(position, ring_step, ring_step + 1):
            if self._lasts[owner][way < 0] > ring_step:
                yield self._move(owner, way * ring_step, way * (ring_step + 1), Content.KV)

    @property
    def gradient_steps(self) -> range:
        """Ring steps of the backward pass at which gradients of keys are sent."""
        if not any(self.needed):
            return range(0)
        return range(2, self.degree + 1) if self.goes_round else range(self.ring_steps, 2 * self.ring_steps - 1)

    def gradient_moves(self, ring_step: int, position: int | None = None) -> Iterator[Move]:
        """Yield the gradients sent at `ring_step` of the backward pass; only those from or to `position`, if given."""
        if ring_step not in self.gradient_steps:
            return
        if self.goes_round:
            for owner, _ in self._travelling(position, ring_step - 1, ring_step):
                if self.needed[owner]:
                    yield self._move(owner, ring_step - 1, ring_step, Content.DKV)
            return
        left = 2 * self.ring_steps - 1 - ring_step  # distance of the moving gradients from their owner
        for owner, way in self._travelling(position, left, left - 1):
            if self._lasts[owner][way < 0] >= left:
                yield self._move(owner, way * left, way * (left - 1), Content.DKV)

    def _travelling(self, position: int | None, source: int, target: int) -> Iterable[tuple[int, int]]:
        """List (owner, way) of shards that may go from distance `source` to `target` from their owner.

        If a position is given, only shards that leave it or arrive at it: at most two per way.
        """
        if self.goes_round:
            degree = self.degree
            here = range(degree) if position is None else {(position - source) % degree, (position - target) % degree}
            return [(owner, 1) for owner in sorted(here)]
        if position is None:
            return ((owner, way) for owner in range(self.degree) for way in _WAYS)
        here = {((position - way * distance) % self.degree, way) for way in _WAYS for distance in (source, target)}
        return sorted(here, key=lambda each: (each[0], -each[1]))

    @cached_property
    def _lasts(self) -> list[tuple[int, int]]:
        """The distances (onward, back) that an owner's keys travel, up to the last position that needs them."""
        ahead, _ = self.reach
        if self.goes_round:
            return [(ahead if needed else 0, 0) for needed in self.needed]
        return [
            (
                max((offset for offset in needed if offset <= ahead), default=0),
                max((self.degree - offset for offset in needed if offset > ahead), default=0),
            )
            for needed in self.needed
        ]

    def _move(self, owner: int, source: int, target: int, content: Content) -> Move:
        source, target = (owner + source) % self.degree, (owner + target) % self.degree
        return Move(source=source, target=target, content=content, owner=owner)
