"""A rank's slices of parameters, from every bucket: those that it updates, and those that its node computes with.

    values      (wide dtype)      this rank's exact slices; all ranks together have all entries
    of_node     (own dtypes)      these and the slices of its replicas (the ranks with its place in other nodes), from
                                  which units are gathered in the node; with one rank per node the model's parameters

Once a step, `publish` gathers `values` of the replicas into `of_node`. If both would be equal they are one tensor. A
bucket has one dtype: parameters lie in the order of their dtypes, those of the fewest entries first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor, nn

from lengthwise.comm import Pending, SoloTransport, Transport
from lengthwise.engine.flat_layout import BUCKET_ENTRIES, FlatLayout, Run, lay_out
from lengthwise.engine.placing import as_view
from lengthwise.engine.units import UnitPart
from lengthwise.models.modules import cast_weights, replace_parameters


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharding:
    """The layout of a model's parameters over the ranks.

    dtype, device: main dtype, and device, of the values that forward reads. ranks_in_step: number of neighbouring ranks
    (a node) that gather and sum together in every pass; nodes do at a step's end. With 1 values stay on every rank, and
    the next three apply. bucket_entries: least entries of a bucket. overlaps: True to sum gradients while the last
    backward runs. values_late: True to send values while the next forward begins, which waits for those that it reads.
    keeps_dtypes: True if parameters keep their dtypes; otherwise all get `dtype`. trains: True if anything trains.
    exact_on: device of exact values, by default the model's. casts_to: dtype of mixed precision, in which units are
    gathered as far as torch.autocast casts them.
    """

    dtype: torch.dtype
    device: torch.device
    ranks_in_step: int = 1
    bucket_entries: int = BUCKET_ENTRIES
    overlaps: bool = False
    values_late: bool = False
    keeps_dtypes: bool = False
    trains: bool = True
    exact_on: torch.device | None = None
    casts_to: torch.dtype | None = None

    @property
    def stays(self) -> bool:
        """Whether values stay on every rank; otherwise units have them only around their passes."""
        return self.ranks_in_step == 1


class Dtypes(NamedTuple):
    """The dtypes of a parameter in passes, and of the whole parameter, as it is saved."""

    read: torch.dtype
    whole: torch.dtype


class Axes(NamedTuple):
    """Collectives of a rank, over its node and over its replicas."""

    node: Transport
    replicas: Transport


def read_in_passes(
    own: Mapping[str, torch.dtype], given: Mapping[str, nn.Parameter], layers: Iterable[nn.Module], sharding: Sharding
) -> dict[str, Dtypes]:
    """Return the dtypes of parameters by name: units are gathered in that of mixed precision, where results are equal.

    own: dtypes of the whole parameters. given: the parameters.
    """
    to = None if sharding.stays else sharding.casts_to
    cast = set[int]() if to is None else {id(each) for each in cast_weights(layers)}
    return {
        name: Dtypes(to if to and dtype == torch.float32 and id(given[name]) in cast else dtype, dtype)
        for name, dtype in own.items()
    }


def axes_of(world: Transport, sharding: Sharding) -> Axes:
    """Return the collectives of a rank of `world`. Collective with several nodes of several ranks."""
    size, ranks = sharding.ranks_in_step, range(world.world_size)
    assert len(ranks) % size == 0, f"{size} ranks in each node, of {len(ranks)}"
    if size == 1:
        return Axes(SoloTransport(), world)
    if size == len(ranks):
        return Axes(world, SoloTransport())
    node = world.among([ranks[first : first + size] for first in ranks[::size]])
    return Axes(node, world.among([ranks[place::size] for place in range(size)]))


class Slices:
    """This rank's slices of parameters that all train, or are all frozen; of frozen ones every node has all entries.

    unit_of: units of the parameters, by name, in order. given: the model's parameters, by name. dtypes: dtypes of the
    parameters, by name. kept: dtype of `values`. layout: layout of `values` over all ranks. node: layout of `of_node`,
    one tensor per bucket, over the ranks of a node. made: the model's new parameters, by name. order: buckets in the
    order in which they are published.
    """

    def __init__(
        self,
        unit_of: Mapping[str, int],
        given: Mapping[str, nn.Parameter],
        sharding: Sharding,
        axes: Axes,
        *,
        dtypes: Mapping[str, Dtypes],
        kept: torch.dtype,
        trains: bool,
    ) -> None:
        self.axes, self.stays = axes, sharding.stays
        self.names = _by_dtype(unit_of, dtypes, given)
        self._unit_of, self.dtypes = [unit_of[name] for name in self.names], [dtypes[name].read for name in self.names]
        self.shapes = [tuple(given[name].shape) for name in self.names]
        self.layout: FlatLayout = lay_out(
            [given[name].numel() for name in self.names],
            self._unit_of,
            world_size=axes.node.world_size * axes.replicas.world_size,
            bucket_entries=sharding.bucket_entries if self.stays else 1,
            ranks_per_node=axes.node.world_size,
            kinds=[dtypes[name] for name in self.names],
        )
        self.node = self.layout.of_node()
        if not trains:
            self.layout = self.node
        self.order = list(range(self.layout.num_buckets if self.names else 0))
        self._is_apart = sharding.exact_on is not None and trains
        where = sharding.exact_on if self._is_apart else sharding.device
        self.values = torch.zeros(self.layout.shard_entries, dtype=kept, device=where)
        of_bucket = dict(zip(self.layout.bucket_of, (dtypes[name] for name in self.names), strict=True))
        self._dtype_of = {bucket: each.read for bucket, each in of_bucket.items()}
        self._whole_dtype_of = {bucket: each.whole for bucket, each in of_bucket.items()}
        self._copied, self.copies, self.of_node = set[int](), list[Tensor](), list[Tensor]()
        for dtype, group in groupby(self.order, key=self._dtype_of.__getitem__):
            buckets = list(group)
            places = [self.node.in_shard(bucket) for bucket in buckets]
            first, stop = places[0].start, places[-1].stop
            if self.layout != self.node or self._is_apart or (self.stays and dtype != kept):
                own = torch.zeros(stop - first, dtype=dtype, device=sharding.device)
                self.copies.append(own)
                self._copied.update(buckets)
            else:
                own = self.values[first:stop]
            self.of_node += [own[place.start - first : place.stop - first] for place in places]
        self.made = dict[str, nn.Parameter]()
        self._arriving = dict[int, Pending]()  # buckets of `of_node`
        self._published: list[Tensor] | None = None  # the last published values, if exact values are on another device
        self._sent: torch.cuda.Event | None = None  # recorded when `_published` has been sent

    @property
    def rank(self) -> int:
        """This rank's number in the layout."""
        node, replicas = self.axes
        return node.rank if self.layout == self.node else replicas.rank * node.world_size + node.rank

    def views(self, of_node: Tensor) -> list[Tensor]:
        """Cut a buffer of all entries into views, one per parameter."""
        places = zip(self.node.starts, self.node.sizes, self.shapes, strict=True)
        return [of_node[start : start + size].view(shape) for start, size, shape in places]

    def mine(self, of_node: Sequence[Tensor]) -> Iterator[tuple[Tensor, slice]]:
        """Yield this rank's slices of a node's buckets, with their places in `values`."""
        return self._mine(of_node, self.order)

    def _in_order(self) -> list[int]:
        """List the buckets that are copied, in the order in which they are published."""
        return [bucket for bucket in self.order if bucket in self._copied]

    def _mine(self, of_node: Sequence[Tensor], buckets: Iterable[int]) -> Iterator[tuple[Tensor, slice]]:
        replicas = self.axes.replicas
        for bucket in buckets:
            whole = of_node[bucket]
            yield whole.view(replicas.world_size, -1)[replicas.rank], self.layout.in_shard(bucket)

    def parts(self, unit: int, *, sums: Tensor | None) -> Iterator[UnitPart]:
        """Yield the parts of a unit with these parameters, one per dtype. sums: gradients of `of_node`'s entries."""
        of_unit = [index for index, number in enumerate(self._unit_of) if number == unit]
        for bucket, group in groupby(of_unit, key=self.node.bucket_of.__getitem__):
            members, whole = list(group), self.node.bucket(bucket)
            part = UnitPart(
                [self.shapes[index] for index in members],
                [self.node.starts[index] - whole.start for index in members],
                entries=whole.stop - whole.start,
                dtype=self._dtype_of[bucket],
                own=self.of_node[bucket],
                gradient=None if sums is None else sums[self.node.in_shard(bucket)],
            )
            self.made.update(zip((self.names[index] for index in members), part.parameters, strict=True))
            yield part

    def wholes(self, world: Transport) -> Iterator[tuple[int, Tensor]]:
        """Gather the parameters in their own dtypes, bucket by bucket, as `gathered` does. Collective over `world`."""
        layout, slices, ranks = self.node, self.of_node, self.axes.node
        if self._copied and self._dtype_of != self._whole_dtype_of:  # the copies are less than exact
            layout, slices, ranks = self.layout, in_buckets(self.layout, self.values), world
        device = self.of_node[0].device if self.of_node else self.values.device
        own = (brought(each, self._whole_dtype_of[bucket], device) for bucket, each in enumerate(slices))
        return gathered(layout, own, ranks)

    def fill(self, read: Callable[[str, int, int], Tensor], given: Mapping[str, nn.Parameter]) -> None:
        """Read this rank's entries of all parameters, one parameter at a time; `read` may be collective.

        Parameters that stay whole become the model's at once, so that its earlier values are freed.
        """
        runs = {run.parameter: run for run in self.layout.runs(self.rank)}
        for index, name in enumerate(self.names):
            run = runs.get(index, Run(parameter=index, entry=0, start=0, stop=0))  # of nothing
            first, stop = run.entry, run.entry + run.stop - run.start
            if self.stays:
                bucket, size = self.node.bucket_of[index], self.node.sizes[index]
                start = self.node.starts[index] - self.node.borders[bucket]
                whole, own = read(name, 0, size), self.of_node[bucket][start : start + size]
                own.copy_(whole)
                self.made[name] = as_view(given[name], own.view(self.shapes[index]))
                found = whole[first:stop]
            else:
                found = read(name, first, stop)
            self.values[run.start : run.stop].copy_(found)

    def publish(self, *, waits: bool = True) -> None:
        """Gather the replicas' updated values, bucket by bucket; `arrive` waits for them. Collective."""
        if self._sent is not None:
            self._sent.synchronize()  # `_published` is overwritten
        for bucket in self._in_order():
            whole, staged = self.of_node[bucket], None if self._published is None else self._published[bucket]
            own = brought(self.values[self.layout.in_shard(bucket)], whole.dtype, whole.device, staged)
            self._arriving[bucket] = self.axes.replicas.all_gather_async(whole, own)
            if waits:
                self.arrive([bucket])
        if self._published is not None and self.copies[0].is_cuda:
            self._sent = torch.cuda.Event()
            self._sent.record(torch.cuda.current_stream(self.copies[0].device))

    def arrive(self, buckets: Iterable[int]) -> None:
        """Wait for the values of these buckets."""
        for bucket in buckets if self._arriving else ():
            if bucket in self._arriving:
                self._arriving.pop(bucket).wait()

    def publish_bytes(self, *, waits: bool) -> int:
        """Return the bytes of the copies that `publish` makes in other dtypes, or on the device."""
        cast = [each for each in self._copied if self._is_apart or self._dtype_of[each] != self.values.dtype]
        sizes = [self.values[self.layout.in_shard(each)].numel() * self._dtype_of[each].itemsize for each in cast]
        return max(sizes, default=0) if waits else sum(sizes)

    def take_values(self) -> None:
        """Copy the model's values to the exact values."""
        for own, place in self.mine(self.of_node):
            self.values[place].copy_(own)

    def take_changes(self) -> None:
        """Copy changes of the model's values since they were published to the exact values; others stay.

        All values are compared, because autograd does not count writes to `.data`.
        """
        if self._is_apart:
            self._take_to_host()
            return
        for own, place in self._mine(self.of_node, self._in_order()):
            kept = self.values[place]
            kept.copy_(torch.where(own != kept.to(own.dtype), own.to(kept.dtype), kept))

    def _take_to_host(self) -> None:
        """Take changes with exact values on the host: compare on the device, and copy back only changed slices."""
        if self._published is None:  # all exact values are published
            self._published = [
                torch.empty(own.shape, dtype=whole.dtype, pin_memory=whole.is_cuda).copy_(own)
                for own, whole in zip(in_buckets(self.layout, self.values), self.of_node, strict=True)
            ]
        places = zip(self.mine(self.of_node), (self._published[each] for each in self.order), strict=True)
        sent = [(own, place, before) for (own, place), before in places]
        changed = [(own != before.to(own.device, non_blocking=True)).any() for own, _, before in sent]
        for (own, place, before), is_changed in zip(sent, torch.stack(changed).tolist(), strict=True):
            if is_changed:
                now = own.to(before.device)
                there = now != before
                self.values[place][there] = now[there].to(self.values.dtype)
                before.copy_(now)

    def norm(self) -> float:
        """Return the norm of this rank's part of the model's values, or 0.0 if they are the exact values."""
        own = [own for own, _ in self._mine(self.of_node, self._in_order())]
        norms = torch._foreach_norm(own, 2, dtype=torch.float64) if own else [torch.zeros(())]
        return torch.linalg.vector_norm(torch.stack(norms)).item()


def _by_dtype(names: Iterable[str], dtypes: Mapping[str, Dtypes], given: Mapping[str, nn.Parameter]) -> list[str]:
    """Sort names by dtype, those of the fewest entries first: backward sums the last bucket first, and all after it."""
    entries, names = Counter[Dtypes](), list(names)
    for name in names:
        entries[dtypes[name]] += given[name].numel()
    return sorted(names, key=lambda name: (entries[dtypes[name]], str(dtypes[name])))


def in_buckets(layout: FlatLayout, shard: Tensor) -> list[Tensor]:
    """Cut a rank's shard, (entries,), into its slices of the buckets."""
    return [shard[layout.in_shard(bucket)] for bucket in range(layout.num_buckets)]


def brought(values: Tensor, dtype: torch.dtype, device: torch.device, staged: Tensor | None = None) -> Tensor:
    """Copy exact values to the model's device in `dtype`; the host casts its values and sends pinned memory.

    staged: host memory for the cast values, by default new memory.
    """
    if staged is None and values.device.type == device.type:
        return values.to(dtype)
    if staged is None:
        staged = torch.empty(values.shape, dtype=dtype, pin_memory=device.type != "cpu")
    return staged.copy_(values).to(device, non_blocking=True)


def gathered(layout: FlatLayout, slices: Iterable[Tensor], transport: Transport) -> Iterator[tuple[int, Tensor]]:
    """Gather slices of buckets one by one; yield the numbers of parameters and their whole tensors. Collective.

    slices: this rank's slices of all buckets (`in_buckets`). transport: transport over the layout's ranks. A bucket's
    tensors are views of one tensor of its own.
    """
    members: dict[int, list[int]] = {}
    for index, number in enumerate(layout.bucket_of):
        members.setdefault(number, []).append(index)
    order = layout.ranks_in_order()
    order = None if order == sorted(order) else order
    for bucket, own in enumerate(slices):
        place = layout.bucket(bucket)
        whole = torch.empty(place.stop - place.start, dtype=own.dtype, device=own.device)
        transport.all_gather(whole, own)
        if order is not None:
            whole = whole.view(layout.world_size, -1)[order].view(-1)
        for index in members.get(bucket, ()):
            start = layout.starts[index] - place.start
            yield index, whole[start : start + layout.sizes[index]]


@contextmanager
@torch.no_grad()
def whole_inside(
    model: nn.Module, slices: Sequence[Slices], world: Transport, *, is_kept: bool, device: torch.device | str
) -> Iterator[None]:
    """Give the model whole parameters inside the block, in their dtypes, where `is_kept`. Collective.

    They are gathered bucket by bucket; parameters that are not in `slices` are on the meta device.
    """
    before, made = dict(model.named_parameters()), dict[int, nn.Parameter]()
    for each in slices:
        for index, values in each.wholes(world):
            if is_kept:
                own, whole = before[each.names[index]], values.view(each.shapes[index]).to(device, copy=True)
                made[id(own)] = nn.Parameter(whole, requires_grad=own.requires_grad)
    for own in before.values() if is_kept else ():
        left_out = torch.empty(own.shape, dtype=own.dtype, device="meta")
        made.setdefault(id(own), nn.Parameter(left_out, requires_grad=own.requires_grad))
    replace_parameters(model, made)
    try:
        yield
    finally:
        replace_parameters(model, {id(made[id(each)]): each for each in before.values() if id(each) in made})
