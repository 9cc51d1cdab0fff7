"""How shards travel along a ring: which home's keys a position holds at which hop, and how gradients come home.

Without a window every position meets every other one's keys, and these go once round: at hop t position j holds the
keys of position j - t. Gradients of keys start at the first other position, follow one hop behind and are home after
hop d; what a position's own queries add never leaves it.

With a window most positions have nothing to do with each other, but the two ends of a ring's cut do: position j holds
chunks j and 2d-1-j, so the high chunk of j - 1 needs the keys of j, which a full turn brings last. So keys then travel
both ways, as far as anyone needs them: `ahead` hops onward and `behind` hops back, and gradients return the way the
keys came. What no position further on needs is not sent; that is decided here, for both sides.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """`content` about position `home` goes from position `source` to position `target`."""

    source: int
    target: int
    content: str
    home: int


@dataclass(frozen=True, kw_only=True)
class Relay:
    """The travel plan of one ring.

    `needed[home]` holds the offsets o such that position home + o has a block with the keys of `home`. `goes_round`:
    keys make a full turn, and gradients follow them home.
    """

    degree: int
    goes_round: bool
    needed: tuple[frozenset[int], ...]

    @cached_property
    def reach(self) -> tuple[int, int]:
        """(`ahead`, `behind`): how many hops keys travel onward and back."""
        if self.goes_round:
            return self.degree - 1, 0
        offsets = sorted(set().union(*self.needed))
        # Each offset is reached from one side; the split after the i-th one that needs the fewest rounds wins.
        splits = [
            (onward[-1] if onward else 0, self.degree - back[0] if back else 0)
            for onward, back in ((offsets[:i], offsets[i:]) for i in range(len(offsets) + 1))
        ]
        return min(splits, key=lambda split: (max(split), sum(split), -split[0]))

    @property
    def hops(self) -> int:
        """Hops at which there are blocks to compute: 1 for own keys alone."""
        return 1 + max(self.reach)

    def homes(self, position: int, hop: int) -> list[int]:
        """List whose keys arrive at `position` for `hop`, whether or not there is a block for them."""
        if hop == 0:
            return [position]
        ahead, behind = self.reach
        onward = [(position - hop) % self.degree] if hop <= ahead else []
        return onward + ([(position + hop) % self.degree] if hop <= behind else [])

    def key_moves(self, hop: int) -> Iterator[Move]:
        """Yield the keys that are sent while the blocks of `hop` are computed."""
        for home in range(self.degree):
            for way in (1, -1):
                if self._last(home, way) > hop:
                    yield self._move(home, way * hop, way * (hop + 1), "kv")

    @property
    def gradient_hops(self) -> range:
        """Hops of the backward pass at which gradients of keys are sent."""
        if not any(self.needed):
            return range(0)
        return range(2, self.degree + 1) if self.goes_round else range(self.hops, 2 * self.hops - 1)

    def gradient_moves(self, hop: int) -> Iterator[Move]:
        """Yield the gradients that are sent at `hop` of the backward pass."""
        if hop not in self.gradient_hops:
            return
        if self.goes_round:
            for home in range(self.degree):
                if self.needed[home]:
                    yield self._move(home, hop - 1, hop, "dkv")
            return
        left = 2 * self.hops - 1 - hop  # how many hops from home the gradients are that move now
        for home in range(self.degree):
            for way in (1, -1):
                if self._last(home, way) >= left:
                    yield self._move(home, way * left, way * (left - 1), "dkv")

    def _last(self, home: int, way: int) -> int:
        """How many hops the keys of `home` travel one way: as far as the last position there that needs them."""
        ahead, _ = self.reach
        if self.goes_round:
            return ahead if way == 1 and self.needed[home] else 0
        if way == 1:
            return max((offset for offset in self.needed[home] if offset <= ahead), default=0)
        return max((self.degree - offset for offset in self.needed[home] if offset > ahead), default=0)

    def _move(self, home: int, source: int, target: int, content: str) -> Move:
        return Move(
            source=(home + source) % self.degree,
            target=(home + target) % self.degree,
            content=content,
            home=home,
        )
