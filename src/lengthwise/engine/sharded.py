"""ZeRO-3, over all ranks or inside nodes: a rank keeps a slice of every unit, its gradient and the optimizer's states.

A unit (embedding; a decoder layer; norm and head: `engine.units`) is gathered before its forward and its backward, and
freed after; its gradients are summed over the ranks at once (`engine.waves`). All ranks run all microbatches.

    master_weights  (fp32, or fp64)     this rank's slices of all units, what these are gathered from
    grad_shard      (fp32, or fp64)     of the same entries, the sum of all ranks and microbatches
    frozen          (compute dtype, or its own)     this rank's slices of what does not train

Hybrid gathers and sums inside nodes of n ranks; replicas, the ranks of one place in all nodes, sum once a step. Beside
the above a rank keeps

    values          (compute dtype)     its slices among the ranks of its node, what units are gathered from
    sums            (fp32, or fp64)     of the same entries, the sum of the node's ranks and all microbatches

Bytes a parameter with AdamW: 16/W, hybrid 6/n + 16/W. ZeRO stage 3 (arXiv 1910.02054).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lengthwise.comm import Pending, Transport
from lengthwise.engine.flat_layout import FlatLayout, lay_out
from lengthwise.engine.gathering import gathered
from lengthwise.engine.parameters import MASTER_WEIGHTS, SavedParameters, Shard, brought, refuse_parts, shards_of
from lengthwise.engine.replicated import refuse_hooks, replace_parameters, replaced, share_values, trainable
from lengthwise.engine.units import ModelUnit, UnitPart, units_of
from lengthwise.engine.waves import Waves


class ShardedParameters:
    """`Parameters` of which each rank has a slice of every unit; the model's own have no storage outside of a pass.

    What rank 0 has of the model counts, buffers as well, wherever it lies; the others' parameters may be without
    storage (on the meta device). device: where a rank's slices are. layers: the decoder's, a unit each. read: returns
    entries [first, stop) of a parameter by its name, on every rank its own; None: those of rank 0 are sent.
    keeps_frozen: what does not train keeps its dtype. trains: False: nothing does, whatever the model says.
    ranks_per_node: so many neighbouring ranks gather together, of hybrid; None: all do. exact_on: where master weights
    are, apart from slices in the compute dtype that units are gathered from; None: with these.
    `names` are in the order of the units.
    """

    def __init__(
        self,
        model: nn.Module,
        transport: Transport,
        *,
        dtype: torch.dtype,
        device: torch.device,
        layers: Sequence[nn.Module],
        read: Callable[[str, int, int], Tensor] | None = None,
        keeps_frozen: bool = False,
        trains: bool = True,
        ranks_per_node: int | None = None,
        exact_on: torch.device | None = None,
    ) -> None:
        self.ranks_in_step = ranks_per_node or transport.world_size
        node_of_rank, self._replicas = _axes(transport, self.ranks_in_step)
        self._transport, self._model, self._is_whole, self._device = transport, model, False, device
        learns = {name for name, _ in trainable(model)} if trains else set[str]()
        wide = torch.promote_types(dtype, torch.float32)
        share_values(model, transport, (), dtype=dtype, device=device)
        given = dict(model.named_parameters())
        refuse_hooks({name: given[name] for name in sorted(learns)})
        units = units_of(model, layers)
        node: dict[str, Any] = {"transport": transport, "node_of_rank": node_of_rank, "device": device}
        trained = _Slices(units, given, learns, dtype=dtype, kept=wide, trains=True, exact_on=exact_on, **node)
        frozen = dict[torch.dtype, set[str]]()
        for name, each in given.items():
            if name not in learns:
                frozen.setdefault(each.dtype if keeps_frozen else dtype, set()).add(name)
        self._frozen = [
            _Slices(units, given, names, dtype=own, kept=own, trains=False, **node)
            for own, names in sorted(frozen.items(), key=str)
        ]
        self._trained, self.names, self.shapes, self.layout = trained, trained.names, trained.shapes, trained.layout
        self.saved = SavedParameters(layout=self.layout, names=self.names, shapes=self.shapes, rank=transport.rank)
        self.master_weights = trained.values
        self.grad_shard = self._sums = torch.zeros_like(self.master_weights, device=device)
        if self._replicas is not None:
            self._sums = torch.zeros(len(trained.of_node), dtype=wide, device=device)
        self._is_summed = False  # what `_sums` has is in `grad_shard`, with what the other nodes had
        read = read or partial(self._sent, {name: each.detach() for name, each in given.items()})
        made, parts = dict[int, nn.Parameter](), list[list[UnitPart]]()
        for number in range(len(units)):
            kinds = ((trained, self._sums), *((each, None) for each in self._frozen))
            parts.append([part for each, sums in kinds for part in each.parts(number, gradient=sums)])
        for slices in (trained, *self._frozen):
            slices.fill(read)
            made.update((id(given[name]), own) for name, own in slices.made.items())
        self._share_updates()
        replace_parameters(model, made)
        self._waves = Waves(model, units, parts, node_of_rank)
        refuse_parts(model, lambda: self._is_whole)

    def _sent(self, given: Mapping[str, Tensor], name: str, first: int, stop: int) -> Tensor:
        """Return entries of what rank 0 has of a parameter. Collective."""
        (dtype,) = (each.values.dtype for each in (self._trained, *self._frozen) if name in each.members)
        whole = torch.empty(given[name].shape, dtype=dtype, device=self._device)
        if not given[name].is_meta:
            whole.copy_(given[name])
        self._transport.broadcast(whole, 0)
        return whole.view(-1)[first:stop]

    def _share_updates(self) -> None:
        """Give the replicas of this rank's place in a node what it updates, and take theirs. Collective."""
        layout, own = self.layout, self._trained
        if own.of_node is own.values or not self.names:
            return
        for bucket in range(layout.num_buckets):
            updated = brought(own.values[layout.in_shard(bucket)], own.dtype, self._device)
            whole = own.of_node[own.node.in_shard(bucket)]
            if self._replicas is None:
                whole.copy_(updated)
            else:
                self._replicas.all_gather(whole, updated)

    def shards(self) -> list[Shard]:
        """Cut this rank's slices where weight decay changes (see `Parameters.shards`)."""
        return shards_of(self.layout, self._transport.rank, self.shapes, self.master_weights, self.grad_shard)

    @contextmanager
    def reducing_early(self) -> Iterator[None]:
        """Do nothing: each backward sums what it makes."""
        yield

    def begin_reducing(self) -> None:
        """Do nothing, as above."""

    def reduce_gradients(self) -> Tensor:
        """Return this rank's slices of the sum, which every backward added to; of hybrid, that of all nodes."""
        layout, node, pending = self.layout, self._trained.node, list[Pending]()
        if self._replicas is not None:
            for bucket in range(layout.num_buckets):
                own, of_node = self.grad_shard[layout.in_shard(bucket)], self._sums[node.in_shard(bucket)]
                pending.append(self._replicas.reduce_scatter_async(own, of_node))
        for each in pending:
            each.wait()
        self._is_summed = self._replicas is not None
        return self.grad_shard

    def gather_gradients(self) -> dict[str, Tensor]:
        """Return the gradient of every parameter, by name; for checks, not for training. Collective."""
        found = gathered(self.layout, self.grad_shard, self._transport)
        return {self.names[index]: values.view(self.shapes[index]).clone() for index, values in found}

    def publish(self) -> None:
        """Free what was gathered of the values before, and share the new ones between nodes."""
        self.free()
        self._share_updates()

    def published(self) -> None:
        """Do nothing: units are gathered when they run."""

    def free(self) -> None:
        """Free the units that stay after a pass."""
        self._waves.let_go()

    def publish_bytes(self) -> int:
        """Count the bytes of a slice in the compute dtype, where another node needs it so, or the host has another."""
        slices = [self.layout.in_shard(bucket) for bucket in range(self.layout.num_buckets)]
        own = self._trained
        needs = own.of_node is not own.values and (own.is_apart or own.dtype != own.values.dtype)
        return max(each.stop - each.start for each in slices) * self._trained.dtype.itemsize if needs else 0

    def clear_gradients(self) -> None:
        """Set the gradients of this rank to zero."""
        self._sums.zero_()
        self.grad_shard.zero_()
        self._is_summed = False

    def keep_sum(self) -> None:
        """Let the next backward add to the sum: this rank's slices of it take part in the next one between nodes."""
        if self._is_summed and self._replicas is not None:
            place, layout, node = self._replicas.rank, self.layout, self._trained.node
            self._sums.zero_()
            for bucket in range(layout.num_buckets):
                own = self.grad_shard[layout.in_shard(bucket)]
                self._sums[node.in_shard(bucket)].view(self._replicas.world_size, -1)[place].copy_(own)
            self._is_summed = False

    def attach_gradients(self) -> None:
        """See that the model has the parameters that were made for it; gradients stay in the slices.

        Raises:
            ModelRefused: somebody replaced, moved or froze some.
        """
        now, dtype, device = dict(self._model.named_parameters()), self._trained.dtype, self.grad_shard.device
        found = sum(each.requires_grad for each in now.values())
        stays = all(
            now.get(name) is own and own.dtype == dtype and own.device == device
            for name, own in self._trained.made.items()
        )
        if found != len(self.names) or not stays:
            raise replaced(self._model, expected=len(self.names), got=found)
        self.detach_gradients()

    def detach_gradients(self) -> None:
        """Leave the model's own gradients to others; a pass takes those that it makes at once."""
        for own in self._trained.made.values():
            own.grad = None

    @contextmanager
    @torch.no_grad()
    def whole_on_first(self, *, trained_only: bool) -> Iterator[None]:
        """Give the model of rank 0 whole parameters inside the block, in the compute dtype on the host. Collective.

        They are gathered a unit at a time; those that are left out are on the meta device.
        """
        self._waves.let_go()
        before, made = dict(self._model.named_parameters()), dict[int, nn.Parameter]()
        for slices in (self._trained, *([] if trained_only else self._frozen)):
            found = gathered(slices.node, slices.of_node, slices.among, dtype=slices.dtype)
            for index, each in found:
                if not self._transport.rank:
                    own, whole = before[slices.names[index]], each.view(slices.shapes[index]).to("cpu", copy=True)
                    made[id(own)] = nn.Parameter(whole, requires_grad=own.requires_grad)
        if not self._transport.rank:
            for own in before.values():
                left_out = torch.empty(own.shape, dtype=own.dtype, device="meta")
                made.setdefault(id(own), nn.Parameter(left_out, requires_grad=own.requires_grad))
        replace_parameters(self._model, made)
        self._is_whole = not self._transport.rank
        try:
            yield
        finally:
            self._is_whole = False
            replace_parameters(self._model, {id(made[id(each)]): each for each in before.values() if id(each) in made})

    def tensors(self) -> list[Tensor]:
        """Return the slices of this rank."""
        own = [self.master_weights, self.grad_shard, self._trained.of_node, self._sums]
        return [*{id(each): each for each in own}.values(), *(each.values for each in self._frozen)]

    def read_by_forward(self) -> list[Tensor]:
        """Return the slices that units are gathered from."""
        return [each.of_node for each in (self._trained, *self._frozen)]

    def state(self) -> dict[str, Tensor]:
        """Return the master weights of this rank's slices."""
        return {MASTER_WEIGHTS: self.master_weights}


def _axes(world: Transport, ranks_per_node: int) -> tuple[Transport, Transport | None]:
    """Return the collectives of a rank's node, and of its replicas, in its place in all nodes; None: one node."""
    assert world.world_size % ranks_per_node == 0, f"{ranks_per_node} ranks in each node, of {world.world_size}"
    if ranks_per_node == world.world_size:
        return world, None
    ranks = range(world.world_size)
    nodes = [ranks[first : first + ranks_per_node] for first in ranks[::ranks_per_node]]
    return world.among(nodes), world.among([ranks[place::ranks_per_node] for place in range(ranks_per_node)])


class _Slices:
    """This rank's slices of the parameters `members` of all units.

    values: (entries,), in `kept`, of what it updates, or of what does not train and every node has. of_node: what units
    are gathered from, `among` the ranks of a node, which lies as in `node`; the same where there is one node. made: by
    name the parameters that are gathered of them, in `dtype`. exact_on: as for `ShardedParameters`.
    """

    def __init__(
        self,
        units: Sequence[ModelUnit],
        given: Mapping[str, nn.Parameter],
        members: Collection[str],
        *,
        transport: Transport,
        node_of_rank: Transport,
        dtype: torch.dtype,
        kept: torch.dtype,
        device: torch.device,
        trains: bool,
        exact_on: torch.device | None = None,
    ) -> None:
        self.members, self.dtype, self._rank, self.among = members, dtype, transport.rank, node_of_rank
        self.made = dict[str, nn.Parameter]()
        named = [(name, number) for number, unit in enumerate(units) for name in unit.names if name in members]
        self.names, self._unit_of = [name for name, _ in named], [number for _, number in named]
        self.shapes = [tuple(given[name].shape) for name in self.names]
        sizes = [given[name].numel() for name in self.names]
        self.layout: FlatLayout = lay_out(
            sizes,
            self._unit_of,
            world_size=transport.world_size,
            bucket_entries=1,
            ranks_per_node=node_of_rank.world_size,
        )
        self.node = self.layout.of_node()
        if not trains:
            self.layout, self._rank = self.node, node_of_rank.rank
        self.is_apart = exact_on is not None
        self.values = self.of_node = torch.zeros(self.layout.shard_entries, dtype=kept, device=exact_on or device)
        if self.layout != self.node or self.is_apart:
            self.of_node = torch.zeros(self.node.shard_entries, dtype=dtype, device=device)

    def parts(self, unit: int, *, gradient: Tensor | None) -> Iterator[UnitPart]:
        """Yield the part of a unit that has these, if it has any."""
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
                gradient=None if gradient is None else gradient[own],
            )
            self.made.update(zip((self.names[index] for index in members), part.parameters, strict=True))
            yield part

    def fill(self, read: Callable[[str, int, int], Tensor]) -> None:
        """Put this rank's entries of all parameters where they stay, one parameter at a time."""
        runs = {run.parameter: run for run in self.layout.runs(self._rank)}
        for index, name in enumerate(self.names):
            run = runs.get(index)
            if run is None:
                read(name, 0, 0)  # which may be a collective
            else:
                size = run.stop - run.start
                self.values[run.start : run.stop].copy_(read(name, run.entry, run.entry + size))
