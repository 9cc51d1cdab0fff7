"""The layout of parameters in flat buffers, and the slice of them that each rank updates; no torch.

Parameters lie in the model's order, aligned to 128 bytes, so that matrix products read views of a buffer as fast as
separate tensors. Buckets end at layer borders, and every bucket is cut evenly over the ranks, so that it can be
gathered or reduced by itself. Costs up to 126 bytes a parameter, and 30 a bucket and rank.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import lcm
from typing import NamedTuple

ALIGNMENT = 64  # entries: 128 bytes in the narrowest dtype of 2 bytes
SLICE_MULTIPLE = 16  # entries; whole vectors of a CPU, whose rounding differs from that of single entries
BUCKET_ENTRIES = 1 << 24  # least entries of a bucket: shorter messages do not fill a link


class Run(NamedTuple):
    """Entries of a parameter, from `entry` on, at [start, stop) of a rank's shard."""

    parameter: int
    entry: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatLayout:
    """The layout of a flat buffer.

    sizes, starts: entries and first entries of the parameters. borders: bucket b is [borders[b], borders[b + 1]), with
    whole parameters and some unused entries; its size is a multiple of `world_size`. bucket_of: buckets of the
    parameters.
    ranks_per_node: the slices of a rank and its replicas (ranks with the same place in other nodes) are adjacent, so
    that together they are one rank's slice of a node's copy. With 1, or all ranks, slices are in rank order.
    stage_buckets: numbers of buckets by stage of a pipeline, whose buckets follow each other; empty without stages.
    `world_size` is then the number of replicas, and stage s of p has the ranks s, s + p, s + 2p, ...
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
        """Entries of the whole buffer."""
        return self.borders[-1]

    @property
    def shard_entries(self) -> int:
        """Entries of a rank's shard: its slices of all buckets, one after the other."""
        return self.entries // self.world_size

    @property
    def num_buckets(self) -> int:
        """Number of buckets."""
        return len(self.borders) - 1

    def bucket(self, number: int) -> slice:
        """Return a bucket's place in the whole buffer."""
        return slice(self.borders[number], self.borders[number + 1])

    def in_shard(self, number: int) -> slice:
        """Return the place of a rank's slice of a bucket in its shard."""
        return slice(self.borders[number] // self.world_size, self.borders[number + 1] // self.world_size)

    def in_whole(self, number: int, rank: int) -> slice:
        """Return the place of a rank's slice of a bucket in the whole buffer."""
        first, last = self.borders[number], self.borders[number + 1]
        size, place = (last - first) // self.world_size, self._place(rank)
        return slice(first + place * size, first + (place + 1) * size)

    def of_node(self) -> FlatLayout:
        """Return the layout over the ranks of one node."""
        return replace(self, world_size=self.ranks_per_node)

    def ranks_in_order(self) -> list[int]:
        """List the ranks by the places of their slices in a bucket."""
        return sorted(range(self.world_size), key=self._place)

    def _place(self, rank: int) -> int:
        node, within = divmod(rank, self.ranks_per_node)
        return within * (self.world_size // self.ranks_per_node) + node

    def runs(self, rank: int) -> Iterator[Run]:
        """Yield the runs of parameters in a rank's shard, in order."""
        for index, (start, size, bucket) in enumerate(zip(self.starts, self.sizes, self.bucket_of, strict=True)):
            whole, shard = self.in_whole(bucket, rank), self.in_shard(bucket)
            first, last = max(start, whole.start), min(start + size, whole.stop)
            if first < last:
                moved = shard.start - whole.start
                yield Run(parameter=index, entry=first - start, start=first + moved, stop=last + moved)

    def owner(self, parameter: int, entry: int) -> tuple[int, int, int]:
        """Return (rank, place in its shard, number of entries from there) of a parameter's entry.

        The number counts entries to the end of the rank's slice of the bucket, this one included.
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
        """Return the number of entries of a rank's shard, which differs between stages."""
        if not self.stage_buckets:
            return self.shard_entries
        stages, stage = list(accumulate(self.stage_buckets, initial=0)), rank % len(self.stage_buckets)
        return (self.borders[stages[stage + 1]] - self.borders[stages[stage]]) // self.world_size


def join_stages(layouts: Sequence[FlatLayout]) -> FlatLayout:
    """Join the layouts of a pipeline's stages, one after the other."""
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
    """The order in which buckets are summed while backward runs: from the last to the first, the same on all ranks.

    A bucket is ready when all its parameters have gradients and all later buckets were summed.
    """

    def __init__(self, bucket_of: Sequence[int]) -> None:
        self._bucket_of = bucket_of
        self._missing = Counter(bucket_of)
        self._arrived: set[int] = set()
        self._next = max(bucket_of)

    def arrived(self, parameter: int) -> list[int]:
        """Note that a parameter has its gradient; return the buckets that are now ready."""
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
        """Return the remaining buckets, whose parameters may lack gradients here."""
        last, self._next = self._next, -1
        return list(range(last, -1, -1))


def lay_out(
    sizes: Sequence[int],
    layers: Sequence[int],
    *,
    world_size: int,
    bucket_entries: int = BUCKET_ENTRIES,
    ranks_per_node: int = 1,
    kinds: Sequence[object] | None = None,
) -> FlatLayout:
    """Lay out parameters of `sizes` entries, of which parameter i belongs to layer `layers[i]`.

    A bucket ends at the first layer border after `bucket_entries`, and where the next parameter's kind in `kinds` (as
    its dtype) is another.
    """
    multiple = lcm(world_size * SLICE_MULTIPLE, ALIGNMENT)
    starts, borders, bucket_of, stop = [], [0], [], 0
    for index, size in enumerate(sizes):
        stop = _up(stop, ALIGNMENT)
        ends_layer = index and layers[index] != layers[index - 1]
        ends_kind = index and kinds is not None and kinds[index] != kinds[index - 1]
        if ends_kind or (ends_layer and stop - borders[-1] >= bucket_entries):
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
