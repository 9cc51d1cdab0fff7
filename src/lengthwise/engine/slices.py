"""A rank's slices of parameters, from every bucket: those that it updates, and those that its node computes with.

    values      (wide dtype)      this rank's exact slices; all ranks together have all entries
    of_node     (compute dtype)   these and the slices of its replicas (the ranks with its place in other nodes), from
                                  which units are gathered in the node; with one rank per node the model's parameters

Once a step, `publish` gathers `values` of the replicas into `of_node`. If both would be equal they are one tensor.
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
    """The layout of a model's parameters over the ranks.

    dtype, device: dtype and device of the values that forward reads. ranks_in_step: number of neighbouring ranks (a
    node) that gather and sum together in every pass; nodes do at a step's end. With 1 values stay on every rank, and
    the next three apply. bucket_entries: least entries of a bucket. overlaps: sum gradients while the last backward
    runs. values_late: send values while the next forward begins, which waits for those that it reads. keeps_frozen:
    whether frozen parameters keep their dtype. trains: whether anything trains. exact_on: device of exact values. If
    None, the model's.
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
        """Whether values stay on every rank; otherwise units have them only around their passes."""
        return self.ranks_in_step == 1


class Axes(NamedTuple):
    """Collectives of a rank, over its node and over its replicas."""

    node: Transport
    replicas: Transport


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

    unit_of: units of the parameters, by name, in order. given: the model's parameters by name. layout: layout of
    `values` over all ranks. node: layout of `of_node` over the ranks of a node. made: the parameters that the model
    gets, by name, in `dtype`. order: order in which buckets are published.
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
        self._published: Tensor | None = None  # the last published values, if exact values are on another device
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

    def mine(self, of_node: Tensor) -> Iterator[tuple[Tensor, slice]]:
        """Yield this rank's slices of a node's buffer, with their places in `values`."""
        replicas = self.axes.replicas
        for bucket in self.order:
            whole = of_node[self.node.in_shard(bucket)]
            yield whole.view(replicas.world_size, -1)[replicas.rank], self.layout.in_shard(bucket)

    def parts(self, unit: int, *, sums: Tensor | None) -> Iterator[UnitPart]:
        """Yield the part of a unit with these parameters, if there are some. sums: gradients of `of_node`'s entries."""
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
        """Read this rank's entries of all parameters, one parameter at a time; `read` may be collective.

        Parameters that stay whole become the model's at once, so that its earlier values are freed.
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
        """Gather the replicas' updated values, bucket by bucket; `arrive` waits for them. Collective."""
        if self._sent is not None:
            self._sent.synchronize()  # `_published` is overwritten
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
        """Return the bytes of the copies that `publish` makes in the compute dtype, or on the device."""
        sizes = [place.stop - place.start for place in map(self.layout.in_shard, self.order)]
        casts = self.is_copied and (self._is_apart or self.dtype != self.values.dtype)
        return (max(sizes, default=0) if waits else sum(sizes)) * self.dtype.itemsize * casts

    def take_values(self) -> None:
        """Copy the model's values to the exact values."""
        for own, place in self.mine(self.of_node):
            self.values[place].copy_(own)

    def take_changes(self) -> None:
        """Copy changes of the model's values since they were published to the exact values; others stay.

        All values are compared, because autograd does not count writes to `.data`.
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
        """Do so with exact values on the host: compare on the device, and copy back only slices that changed."""
        if self._published is None:  # all exact values are published
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
        """Return the norm of this rank's part of the model's values, or 0.0 if they are the exact values."""
        if not self.is_copied:
            return 0.0
        norms = torch._foreach_norm([own for own, _ in self.mine(self.of_node)], 2, dtype=torch.float64)
        return torch.linalg.vector_norm(torch.stack(norms)).item()


def brought(values: Tensor, dtype: torch.dtype, device: torch.device, staged: Tensor | None = None) -> Tensor:
    """Copy exact values to the model's device in `dtype`; the host casts its values and sends pinned memory.

    staged: host memory for the cast values. If None, new memory is used.
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
    """Gather shards, (entries,), bucket by bucket; yield the numbers of parameters and their whole tensors. Collective.

    transport: over the layout's ranks. dtype, device: of the gathered tensors; by default the shard's. Tensors of a
    bucket are views of one tensor, which the next bucket does not touch.
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

    They are gathered bucket by bucket; parameters that are not in `slices` are on the meta device.
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
