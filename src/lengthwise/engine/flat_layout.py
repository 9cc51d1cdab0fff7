"""Where parameters lie in flat buffers, and which part of them each rank updates; no torch.

Parameters lie in the model's order, each from a border of 128 bytes on: kernels of matrix products read views of a
buffer as fast as tensors of their own. They are cut into buckets where a layer ends, and every bucket evenly over the
ranks, so that each can be gathered or reduced by itself. Costs up to 126 bytes a parameter, 30 a bucket and rank.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import lcm
from typing import NamedTuple

ALIGNMENT = 64  # entries: 128 bytes in the narrowest dtype, which has two
SLICE_MULTIPLE = 16  # entries of a rank's slice of a bucket: as many as a CPU's vector, which rounds otherwise than one
BUCKET_ENTRIES = 1 << 24  # of a bucket at least, where the model has as many: shorter messages do not fill a link


class Run(NamedTuple):
    """Entries of a parameter, from `entry` on, at [start, stop) of a rank's shard."""

    parameter: int
    entry: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatLayout:
    """Entries of a flat buffer.

    sizes, starts: of each parameter. borders: bucket b is [borders[b], borders[b + 1]), of whole parameters and some
    entries that nobody uses; a multiple of `world_size`. bucket_of: the bucket of each parameter.
    ranks_per_node: the slices of a rank and its replicas, the ranks of its place in other nodes, lie side by side; so
    they are what each node has of a bucket at that place. 1, or all: slices lie in the order of the ranks.
    stage_buckets: of each stage of a pipeline, one after the other; `world_size` is then the replicas that share a
    bucket, and a stage's are every so many ranks. Empty: no stages.
    """

    sizes: tuple[int, ...]
    starts: tuple[int, ...]
    borders: tuple[int, ...]
    bucket_of: tuple[int, ...]
    world_size: int
    ranks_per_node: int = 1
    stage_buckets: tuple[int, ...] = ()

    @property
    def entries(self) -> int:
        """The entries of the whole buffer."""
        return self.borders[-1]

    @property
    def shard_entries(self) -> int:
        """The entries of a rank's shard: its slices of all buckets, one after the other."""
        return self.entries // self.world_size

    @property
    def num_buckets(self) -> int:
        """The number of buckets."""
        return len(self.borders) - 1

    def bucket(self, number: int) -> slice:
        """Return where a bucket lies in the whole buffer."""
        return slice(self.borders[number], self.borders[number + 1])

    def in_shard(self, number: int) -> slice:
        """Return where a rank's slice of a bucket lies in its shard."""
        return slice(self.borders[number] // self.world_size, self.borders[number + 1] // self.world_size)

    def in_whole(self, number: int, rank: int) -> slice:
        """Return where a rank's slice of a bucket lies in the whole buffer."""
        first, last = self.borders[number], self.borders[number + 1]
        size, place = (last - first) // self.world_size, self._place(rank)
        return slice(first + place * size, first + (place + 1) * size)

    def of_node(self) -> FlatLayout:
        """Return how the ranks of a node, counted in it, have all entries among them."""
        return replace(self, world_size=self.ranks_per_node)

    def ranks_in_order(self) -> list[int]:
        """List the ranks by the places of their slices in a bucket."""
        return sorted(range(self.world_size), key=self._place)

    def _place(self, rank: int) -> int:
        node, within = divmod(rank, self.ranks_per_node)
        return within * (self.world_size // self.ranks_per_node) + node

    def runs(self, rank: int) -> Iterator[Run]:
        """Yield what a rank's shard has of each parameter, in the order of the shard."""
        for index, (start, size, bucket) in enumerate(zip(self.starts, self.sizes, self.bucket_of, strict=True)):
            whole, shard = self.in_whole(bucket, rank), self.in_shard(bucket)
            first, last = max(start, whole.start), min(start + size, whole.stop)
            if first < last:
                moved = shard.start - whole.start
                yield Run(parameter=index, entry=first - start, start=first + moved, stop=last + moved)

    def owner(self, parameter: int, entry: int) -> tuple[int, int, int]:
        """Return where an entry of a parameter lies: (rank, place in its shard, how many entries follow it there).

        Those that follow, it included, are to the end of the rank's slice of the bucket.
        """
        bucket = self.bucket_of[parameter]
        shard = self.in_shard(bucket)
        slice_number, place = divmod(self.starts[parameter] + entry - self.borders[bucket], shard.stop - shard.start)
        within, node = divmod(slice_number, self.world_size // self.ranks_per_node)
        rank, follow = node * self.ranks_per_node + within, shard.stop - shard.start - place
        stages = list(accumulate(self.stage_buckets, initial=0))
        stage = bisect_right(stages, bucket) - 1  # 0 without stages
        start = shard.start - self.borders[stages[stage]] // self.world_size
        return rank * max(1, len(self.stage_buckets)) + stage, start + place, follow

    def entries_of(self, rank: int) -> int:
        """Return the entries of the shard of a rank, which differ between stages."""
        if not self.stage_buckets:
            return self.shard_entries
        stages, stage = list(accumulate(self.stage_buckets, initial=0)), rank % len(self.stage_buckets)
        return (self.borders[stages[stage + 1]] - self.borders[stages[stage]]) // self.world_size


def join_stages(layouts: Sequence[FlatLayout]) -> FlatLayout:
    """Return the layout of all stages of a pipeline, their parameters one after the other."""
    sizes, starts, borders, bucket_of = list[int](), list[int](), [0], list[int]()
    for layout in layouts:
        first, start = len(borders) - 1, borders[-1]
        sizes += layout.sizes
        starts += [start + own for own in layout.starts]
        bucket_of += [first + own for own in layout.bucket_of]
        borders += [start + own for own in layout.borders[1:]]
    return FlatLayout(
        sizes=tuple(sizes),
        starts=tuple(starts),
        borders=tuple(borders),
        bucket_of=tuple(bucket_of),
        world_size=layouts[0].world_size,
        stage_buckets=tuple(layout.num_buckets for layout in layouts),
    )


class BucketOrder:
    """Which buckets can be summed while backward runs: from the last to the first, the same on all ranks.

    A bucket can when all of its parameters have their gradients and those after it were.
    """

    def __init__(self, bucket_of: Sequence[int]) -> None:
        self._bucket_of = bucket_of
        self._missing = Counter(bucket_of)
        self._arrived: set[int] = set()
        self._next = max(bucket_of)

    def arrived(self, parameter: int) -> list[int]:
        """Note that a parameter has its gradient; return the buckets that can be summed now."""
        bucket = self._bucket_of[parameter]
        assert parameter not in self._arrived, f"parameter {parameter} of bucket {bucket} has its gradient twice"
        assert bucket <= self._next, f"parameter {parameter} has its gradient after the sum of bucket {bucket}"
        self._arrived.add(parameter)
        self._missing[bucket] -= 1
        last = self._next
        while self._next >= 0 and not self._missing[self._next]:
            self._next -= 1
        return list(range(last, self._next, -1))

    def rest(self) -> list[int]:
        """Return the buckets that are left, where some parameters have no gradient here."""
        last, self._next = self._next, -1
        return list(range(last, -1, -1))


def lay_out(
    sizes: Sequence[int],
    layers: Sequence[int],
    *,
    world_size: int,
    bucket_entries: int = BUCKET_ENTRIES,
    ranks_per_node: int = 1,
) -> FlatLayout:
    """Lay parameters of `sizes` entries one after the other, `layers[i]` the layer of the i-th, any number.

    A bucket ends where a layer does, as soon as it has `bucket_entries`.
    """
    multiple = lcm(world_size * SLICE_MULTIPLE, ALIGNMENT)
    starts, borders, bucket_of, stop = [], [0], [], 0
    for index, size in enumerate(sizes):
        stop = _up(stop, ALIGNMENT)
        if index and layers[index] != layers[index - 1] and stop - borders[-1] >= bucket_entries:
            stop = _up(stop, multiple)
            borders.append(stop)
        starts.append(stop)
        bucket_of.append(len(borders) - 1)
        stop += size
    borders.append(_up(stop, multiple))
    return FlatLayout(
        sizes=tuple(sizes),
        starts=tuple(starts),
        borders=tuple(borders),
        bucket_of=tuple(bucket_of),
        world_size=world_size,
        ranks_per_node=ranks_per_node,
    )


def _up(entries: int, multiple: int) -> int:
    return -(-entries // multiple) * multiple
