"""What a rank keeps of parameters: slices of every bucket, those it updates and those that its node computes with.

    values      (wide dtype)      this rank's, exact; the ranks of all nodes have all entries among them
    of_node     (compute dtype)   with those of its replicas, the ranks of its place in other nodes: what units are
                                  gathered from in the node; with one rank a node all entries, which the model works on

Once a step, `publish` gathers `values` of the replicas into `of_node`. Where both would be equal they are one tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from lengthwise.comm import Pending, SoloTransport, Transport
from lengthwise.engine.flat_layout import BUCKET_ENTRIES, FlatLayout, Run, lay_out
from lengthwise.engine.placing import as_view
from lengthwise.engine.units import UnitPart
from lengthwise.models.modules import replace_parameters


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharding:
    """How a model's parameters lie over the ranks.

    dtype, device: of what forward computes with. ranks_in_step: so many neighbouring ranks, a node, gather and sum
    together in every pass, and all nodes at a step's end; 1: values stay on every rank. bucket_entries: of a bucket of
    what stays, at least. overlaps: sums of what stays travel while the last backward runs. values_late: values of what
    stays travel while the next forward begins, which waits for what it reads. keeps_frozen: what does not train keeps
    its dtype. trains: False: nothing does, whatever the model says. exact_on: where exact values are, apart from all
    else; None: where the model is.
    """

    dtype: torch.dtype
    device: torch.device
    ranks_in_step: int = 1
    bucket_entries: int = BUCKET_ENTRIES
    overlaps: bool = False
    values_late: bool = False
    keeps_frozen: bool = False
    trains: bool = True
    exact_on: torch.device | None = None

    @property
    def stays(self) -> bool:
        """Whether values stay; else a unit has them around its passes alone."""
        return self.ranks_in_step == 1


class Axes(NamedTuple):
    """Collectives of a rank: of its node, and of its replicas."""

    node: Transport
    replicas: Transport


def axes_of(world: Transport, sharding: Sharding) -> Axes:
    """Return the collectives of a rank of `world`. Collective where there are several nodes of several ranks."""
    size, ranks = sharding.ranks_in_step, range(world.world_size)
    assert len(ranks) % size == 0, f"{size} ranks in each node, of {len(ranks)}"
    if size == 1:
        return Axes(SoloTransport(), world)
    if size == len(ranks):
        return Axes(world, SoloTransport())
    node = world.among([ranks[first : first + size] for first in ranks[::size]])
    return Axes(node, world.among([ranks[place::size] for place in range(size)]))


class Slices:
    """This rank's slices of parameters that all train, or all do not: of the latter every node has all entries.

    unit_of: the units they belong to, by name, in order. given: what the model has. layout: of `values`, over
    all ranks; node: of `of_node`, over the ranks of a node. made: by name the parameters that the model gets, in
    `dtype`. order: of the buckets, as they are published.
    """

    def __init__(
        self,
        unit_of: Mapping[str, int],
        given: Mapping[str, nn.Parameter],
        sharding: Sharding,
        axes: Axes,
        *,
        dtype: torch.dtype,
        kept: torch.dtype,
        trains: bool,
    ) -> None:
        self.dtype, self.axes, self.stays = dtype, axes, sharding.stays
        self.names, self._unit_of = list(unit_of), list(unit_of.values())
        self.shapes = [tuple(given[name].shape) for name in self.names]
        self.layout: FlatLayout = lay_out(
            [given[name].numel() for name in self.names],
            self._unit_of,
            world_size=axes.node.world_size * axes.replicas.world_size,
            bucket_entries=sharding.bucket_entries if self.stays else 1,
            ranks_per_node=axes.node.world_size,
        )
        self.node = self.layout.of_node()
        if not trains:
            self.layout = self.node
        self.order = list(range(self.layout.num_buckets if self.names else 0))
        self._is_apart = sharding.exact_on is not None and trains
        self.is_copied = self.layout != self.node or self._is_apart or (self.stays and dtype != kept)
        where = sharding.exact_on if self._is_apart else sharding.device
        self.values = self.of_node = torch.zeros(self.layout.shard_entries, dtype=kept, device=where)
        if self.is_copied:
            self.of_node = torch.zeros(self.node.shard_entries, dtype=dtype, device=sharding.device)
        self.made = dict[str, nn.Parameter]()
        self._arriving = dict[int, Pending]()  # buckets of `of_node`
        self._published: Tensor | None = None  # of values apart, as `take_changes` then finds them
        self._sent: torch.cuda.Event | None = None  # recorded once that has been sent

    @property
    def rank(self) -> int:
        """This rank among those of the layout."""
        node, replicas = self.axes
        return node.rank if self.layout == self.node else replicas.rank * node.world_size + node.rank

    def views(self, of_node: Tensor) -> list[Tensor]:
        """Cut a buffer of all entries into one view a parameter."""
        places = zip(self.node.starts, self.node.sizes, self.shapes, strict=True)
        return [of_node[start : start + size].view(shape) for start, size, shape in places]

    def mine(self, of_node: Tensor) -> Iterator[tuple[Tensor, slice]]:
        """Yield what this rank updates of a buffer of its node, with the place of it in `values`."""
        replicas = self.axes.replicas
        for bucket in self.order:
            whole = of_node[self.node.in_shard(bucket)]
            yield whole.view(replicas.world_size, -1)[replicas.rank], self.layout.in_shard(bucket)

    def parts(self, unit: int, *, sums: Tensor | None) -> Iterator[UnitPart]:
        """Yield the part of a unit that has these, if it has any. sums: of `of_node`'s entries."""
        members = [index for index, number in enumerate(self._unit_of) if number == unit]
        if members:
            bucket = self.node.bucket_of[members[0]]
            whole, own = self.node.bucket(bucket), self.node.in_shard(bucket)
            part = UnitPart(
                [self.shapes[index] for index in members],
                [self.node.starts[index] - whole.start for index in members],
                entries=whole.stop - whole.start,
                dtype=self.dtype,
                own=self.of_node[own],
                gradient=None if sums is None else sums[own],
            )
            self.made.update(zip((self.names[index] for index in members), part.parameters, strict=True))
            yield part

    def fill(self, read: Callable[[str, int, int], Tensor], given: Mapping[str, nn.Parameter]) -> None:
        """Put this rank's entries of all parameters where they stay, one parameter at a time; `read` may be collective.

        Those that stay whole become the model's at once, so that what it had before is freed.
        """
        runs = {run.parameter: run for run in self.layout.runs(self.rank)}
        views = self.views(self.of_node) if self.stays else []
        for index, name in enumerate(self.names):
            run = runs.get(index, Run(parameter=index, entry=0, start=0, stop=0))  # of nothing
            first, stop = run.entry, run.entry + run.stop - run.start
            if views:
                whole = read(name, 0, views[index].numel())
                views[index].view(-1).copy_(whole)
                self.made[name] = as_view(given[name], views[index])
                found = whole[first:stop]
            else:
                found = read(name, first, stop)
            self.values[run.start : run.stop].copy_(found)

    def publish(self, *, waits: bool = True) -> None:
        """Gather what the replicas have updated, a bucket after the other; `arrive` waits for it. Collective."""
        if self._sent is not None:
            self._sent.synchronize()  # `_published` is written anew
        for bucket in self.order if self.is_copied else ():
            place = self.layout.in_shard(bucket)
            staged = None if self._published is None else self._published[place]
            own = brought(self.values[place], self.dtype, self.of_node.device, staged)
            whole = self.of_node[self.node.in_shard(bucket)]
            self._arriving[bucket] = self.axes.replicas.all_gather_async(whole, own)
            if waits:
                self.arrive([bucket])
        if self._published is not None and self.of_node.is_cuda:
            self._sent = torch.cuda.Event()
            self._sent.record(torch.cuda.current_stream(self.of_node.device))

    def arrive(self, buckets: Iterable[int]) -> None:
        """Wait for the values of these buckets."""
        for bucket in buckets if self._arriving else ():
            if bucket in self._arriving:
                self._arriving.pop(bucket).wait()

    def publish_bytes(self, *, waits: bool) -> int:
        """Count the bytes of a slice in the compute dtype, where that is not what is kept, or that is in the host."""
        sizes = [place.stop - place.start for place in map(self.layout.in_shard, self.order)]
        casts = self.is_copied and (self._is_apart or self.dtype != self.values.dtype)
        return (max(sizes, default=0) if waits else sum(sizes)) * self.dtype.itemsize * casts

    def take_values(self) -> None:
        """Make what the model has now exact values."""
        for own, place in self.mine(self.of_node):
            self.values[place].copy_(own)

    def take_changes(self) -> None:
        """Take what somebody wrote into the model's values since they were published; other exact values stay.

        All are compared with what was published, because a write to `.data` counts no change.
        """
        if not self.is_copied:
            return
        if self._is_apart:
            self._take_to_host()
            return
        for own, place in self.mine(self.of_node):
            kept = self.values[place]
            kept.copy_(torch.where(own != kept.to(own.dtype), own.to(kept.dtype), kept))

    def _take_to_host(self) -> None:
        """Send what was published again and compare it on the device, for it is not cast twice; one read says of all.

        Of what differs alone values come back.
        """
        if self._published is None:  # nobody has changed exact values yet and not published them
            room = torch.empty(self.values.shape, dtype=self.dtype, pin_memory=self.of_node.is_cuda)
            self._published = room.copy_(self.values)
        sent = [(own, place, self._published[place]) for own, place in self.mine(self.of_node)]
        changed = [(own != before.to(own.device, non_blocking=True)).any() for own, _, before in sent]
        for (own, place, before), is_changed in zip(sent, torch.stack(changed).tolist(), strict=True):
            if is_changed:
                now = own.to(before.device)
                there = now != before
                self.values[place][there] = now[there].to(self.values.dtype)
                before.copy_(now)

    def norm(self) -> float:
        """Return the norm of this rank's part of the model's values; 0.0 where they are the exact ones."""
        if not self.is_copied:
            return 0.0
        norms = torch._foreach_norm([own for own, _ in self.mine(self.of_node)], 2, dtype=torch.float64)
        return torch.linalg.vector_norm(torch.stack(norms)).item()


def brought(values: Tensor, dtype: torch.dtype, device: torch.device, staged: Tensor | None = None) -> Tensor:
    """Return exact values in `dtype` where the model runs; the host's are cast there, and sent from pinned memory.

    staged: memory of the host, of as many entries in `dtype`, that keeps what is sent; None: some is taken for it.
    """
    if staged is None and values.device.type == device.type:
        return values.to(dtype)
    if staged is None:
        staged = torch.empty(values.shape, dtype=dtype, pin_memory=device.type != "cpu")
    return staged.copy_(values).to(device, non_blocking=True)


def gathered(
    layout: FlatLayout,
    shard: Tensor,
    transport: Transport,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
) -> Iterator[tuple[int, Tensor]]:
    """Yield each parameter's place and what all ranks have of it in their shards, (entries,) each. Collective.

    transport: of the layout's ranks. dtype, device: to gather them in; None: those of the shard. It takes a bucket at a
    time; those of a bucket are views of one tensor, which the next bucket does not touch.
    """
    members: dict[int, list[int]] = {}
    for index, number in enumerate(layout.bucket_of):
        members.setdefault(number, []).append(index)
    order = layout.ranks_in_order()
    order = None if order == sorted(order) else order
    for bucket in range(layout.num_buckets):
        place = layout.bucket(bucket)
        own = shard[layout.in_shard(bucket)].to(device or shard.device, dtype or shard.dtype)
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
    model: nn.Module, slices: Sequence[Slices], *, is_kept: bool, device: torch.device | str
) -> Iterator[None]:
    """Give the model whole parameters inside the block, in the compute dtype, where `is_kept`. Collective.

    They are gathered a unit at a time; those that are not in `slices` are on the meta device.
    """
    before, made = dict(model.named_parameters()), dict[int, nn.Parameter]()
    for each in slices:
        for index, values in gathered(each.node, each.of_node, each.axes.node, dtype=each.dtype):
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
