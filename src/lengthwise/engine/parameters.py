"""The owner of a model's parameters, gradients and exact values on one rank.

The n ranks of a node (of W) gather values and sum gradients in every pass. Ranks with the same place in all nodes sum
gradients and exchange updated values once a step. A rank keeps (in fp32 or fp64, but `values`)

    master_weights, grad_shard    its slices among all ranks: exact values, summed gradients
    values, grads                 its slices in its node: values in the main dtype, summed gradients

    zero1 (also stages)     n = 1: both are whole, and the model's parameters are views
    zero3                   n = W: hooks gather and sum units (`engine.unit_waves`)
    hybrid                  1 < n < W: zero3 in, zero1 between nodes

Two tensors with the same entries are one, except values in another dtype with zero1; zero3 casts when it gathers
(docs/sharding.md; ZeRO, arXiv 1910.02054).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import reduce

import torch
from torch import Tensor, nn

from lengthwise.comm import Mesh, Pending, Transport, agree
from lengthwise.engine.flat_layout import BucketOrder
from lengthwise.engine.placing import refuse_hooks, refuse_parts, replaced, share_values, trainable
from lengthwise.engine.slices import Sharding, Slices, axes_of, gathered, in_buckets, read_in_passes, whole_inside
from lengthwise.engine.stage_share import StageShare
from lengthwise.engine.unit_waves import Waves
from lengthwise.engine.units import Accumulation, ModelUnit, UnitPart, units_of
from lengthwise.models import ModelStage, wrapped_layers
from lengthwise.models.modules import replace_parameters
from lengthwise.models.own_rows import OwnRows

MASTER_WEIGHTS = "master_weights"


class Parameters:
    """The trainable parameters of a model on one rank, and the frozen ones too if they are sharded.

    Rank 0's parameters and buffers count, on any device; other ranks' parameters may be on the meta device. Forward and
    backward use the model's own parameters, not this class.

    names, shapes: names and shapes of the trained parameters. layout: their layout in the `state` of all ranks. saved:
    layout of all stages' trained parameters. ranks_in_step: number of neighbouring ranks that gather and sum together
    in every pass, and therefore run every microbatch together. keeps_values: True if the model always has its values.
    stage: exchange with other stages.

    layers: the decoder's layers, which become units. read: function that returns this rank's entries [first, stop) of a
    named parameter; without it rank 0 sends them.
    """

    def __init__(
        self,
        model: nn.Module,
        sharding: Sharding,
        stage: StageShare,
        *,
        layers: Sequence[nn.Module] = (),
        read: Callable[[str, int, int], Tensor] | None = None,
    ) -> None:
        self._model, self._transport, self.stage = model, stage.mesh.replicas, stage
        self.ranks_in_step, self.keeps_values = sharding.ranks_in_step, sharding.stays
        learns = {name for name, _ in trainable(model)} if sharding.trains else set[str]()
        given = dict(model.named_parameters())
        new = {name: own for name, own in given.items() if name in learns and (own.is_meta or not sharding.stays)}
        refuse_hooks(new)
        all_to = None if sharding.keeps_dtypes else sharding.dtype
        dtypes = read_in_passes({name: all_to or own.dtype for name, own in given.items()}, given, layers, sharding)
        if all_to is None:  # parameters lie in the order of their dtypes
            own_dtypes = repr([(name, dtypes[name]) for name in given if name in learns]).encode()
            agree(self._transport, own_dtypes, "dtypes of trainable parameters", "Load the model alike on all ranks.")
        in_place = [own for name, own in given.items() if name not in learns and sharding.stays]
        share_values(model, self._transport, in_place, dtype=all_to, device=sharding.device)

        axes, units = axes_of(self._transport, sharding), [] if sharding.stays else units_of(model, layers)
        unit_of = {name: number for number, unit in enumerate(units) for name in unit.names}
        if sharding.stays:
            layer_of = {id(own): number for number, layer in enumerate(layers) for own in layer.parameters()}
            unit_of = {name: layer_of.get(id(own), -1) for name, own in given.items() if name in learns}
        own, frozen = {name: number for name, number in unit_of.items() if name in learns}, {}
        for name in (each for each in unit_of if each not in learns):
            frozen.setdefault(dtypes[name].whole, {})[name] = unit_of[name]
        trained_dtypes = {dtypes[name].whole for name in own} | (stage.trained_dtypes() if all_to is None else set())
        wide = reduce(torch.promote_types, trained_dtypes, torch.promote_types(sharding.dtype, torch.float32))
        trained = Slices(own, given, sharding, axes, dtypes=dtypes, kept=wide, trains=True)
        self._frozen = [
            Slices(each, given, sharding, axes, dtypes=dtypes, kept=kept, trains=False)
            for kept, each in sorted(frozen.items(), key=str)
        ]
        self._trained, self.names, self.shapes, self.layout = trained, trained.names, trained.shapes, trained.layout
        self.master_weights, self.views = trained.values, trained.views
        self.values = (trained.copies or [trained.values])[-1]
        self._replicas = axes.replicas
        has_replicas = axes.replicas.world_size > 1
        # Entries that no microbatch or token of this rank reaches stay zero in the sum.
        self.grads = self.grad_shard = torch.zeros(trained.node.shard_entries, dtype=wide, device=sharding.device)
        if has_replicas:
            self.grad_shard = torch.zeros(self.layout.shard_entries, dtype=wide, device=sharding.device)
        self._dtype = all_to  # of all parameters, or None
        self._is_summed = False  # whether `grad_shard` has the sum of `grads` over the replicas
        self._overlaps = sharding.overlaps and has_replicas
        self._are_late = sharding.values_late and sharding.stays and has_replicas
        self._order: BucketOrder | None = None  # order of this step's sums
        self._sums = list[Pending]()
        self._take_in(given, read)
        self._hook_in(units, layers)
        self._is_whole = sharding.stays and stage.mesh.stages == 1
        if not self._is_whole:
            refuse_parts(model, lambda: self._is_whole)
        self.saved = stage.saved(self.layout, self.names, self.shapes)

    def _take_in(self, given: Mapping[str, nn.Parameter], read: Callable[[str, int, int], Tensor] | None) -> None:
        """Fill all slices with rank 0's values, or with each rank's own read ones. Collective."""
        every, device = [self._trained, *self._frozen], self.grads.device
        kept = {name: each.values.dtype for each in every for name in each.names}
        views = self.views(self.grads) if self.keeps_values else []
        rooms = dict(zip(self.names, views, strict=bool(views)))  # buffers for exact values

        def sent(name: str, first: int, stop: int) -> Tensor:
            own = given[name].detach()
            whole = rooms[name] if rooms else torch.empty(own.shape, dtype=kept[name], device=device)
            if not own.is_meta:
                whole.copy_(own)
            self._transport.broadcast(whole, 0)
            return whole.view(-1)[first:stop]

        for each in every:
            each.fill(read or sent, given)
        self.grads.zero_()

    def _hook_in(self, units: Sequence[ModelUnit], layers: Sequence[nn.Module]) -> None:
        """Put the new parameters into the model, and install the hooks that fill, free, wait for and sum them."""
        trained, model = self._trained, self._model
        every = [(trained, self.grads), *((each, None) for each in self._frozen)]
        parts = [[part for each, sums in every for part in each.parts(unit, sums=sums)] for unit in range(len(units))]
        given = dict(model.named_parameters())
        replace_parameters(model, {id(given[name]): own for each, _ in every for name, own in each.made.items()})
        self._learning, self._waves, gradients = self._now, None, dict[int, Tensor]()
        self._added = list[Accumulation]()  # gradients of parameters that stay
        if self.keeps_values:
            views, made = self.views(self.grads), self._made_gradient if self._overlaps else None
            self._added = [Accumulation(self._learning, views, made=made)]
            gradients = dict(zip(map(id, self._learning), views, strict=True))
        else:
            trained.publish()
            self._waves = Waves(model, units, parts, trained.axes.node, made=self._made_part)
        if self._are_late:
            self._wait_before(layers)
        self._added += self.stage.begin(gradients, self.grads.dtype)

    @property
    def _now(self) -> list[nn.Parameter]:
        """The model's current parameters that this rank updates, in the layout's order."""
        places = {name: place for place, name in enumerate(self.names)}
        every = self._model.named_parameters() if self.names else ()  # otherwise nothing trains
        own = [(name, each) for name, each in every if each.requires_grad and each is not self.stage.copy]
        return [each for _, each in sorted(own, key=lambda named: places.get(named[0], len(places)))]

    def _wait_before(self, layers: Sequence[nn.Module]) -> None:
        """Let every layer wait for its values before it runs, and the model for those outside of layers."""
        trained, bucket_of = self._trained, dict(zip(map(id, self._learning), self.layout.bucket_of, strict=True))
        within = {id(own) for layer in layers for own in layer.parameters()}
        read_by = [(layer, {id(own) for own in layer.parameters()}) for layer in layers]
        for module, members in (*read_by, (self._model, bucket_of.keys() - within)):
            buckets = sorted({bucket_of[each] for each in members if each in bucket_of})
            module.register_forward_pre_hook(lambda *_, buckets=buckets: trained.arrive(buckets))
            if module is self._model:  # it waits first, and a communicator completes calls in order
                trained.order = [*buckets, *(each for each in trained.order if each not in buckets)]

    def reduce_early(self) -> None:
        """Sum buckets as soon as the next backward has made their gradients, if `overlaps`.

        Call it before this rank's last backward of a step, after its last transfer.
        """
        if self._overlaps:
            self._order = BucketOrder(self.layout.bucket_of)

    def _made_gradient(self, number: int) -> None:
        if self._order is not None:
            self._sum(self._order.arrived(number))

    def _made_part(self, part: UnitPart) -> None:
        if self._order is not None:
            made = set(map(id, part.parameters))
            for number, own in enumerate(self._learning):
                if id(own) in made:
                    self._made_gradient(number)

    def begin_reducing(self) -> None:
        """Add up a tied head's gradient; if `overlaps`, begin the remaining sums, before any other collective."""
        self.stage.add_tied_gradient()
        if self._overlaps:
            self._sum_rest()

    def reduce_gradients(self) -> Tensor:
        """Sum the gradients over all ranks into shards; return this rank's, (entries,). Collective.

        Unused entries are 0.
        """
        self._sum_rest()
        for each in self._sums:
            each.wait()
        self._order, self._is_summed = None, self._replicas.world_size > 1
        self._sums.clear()
        return self.grad_shard

    def _sum_rest(self) -> None:
        self._order = self._order or BucketOrder(self.layout.bucket_of)
        self._sum(self._order.rest())

    def _sum(self, buckets: Iterable[int]) -> None:
        layout, node = self.layout, self._trained.node
        for bucket in buckets if self._replicas.world_size > 1 else ():
            own, of_node = self.grad_shard[layout.in_shard(bucket)], self.grads[node.in_shard(bucket)]
            self._sums.append(self._replicas.reduce_scatter_async(own, of_node))

    def gather_gradients(self) -> dict[str, Tensor]:
        """Return the reduced gradient of every parameter, by name; for checks, not for training. Collective.

        Rank 0 gets all stages' gradients, other ranks their own stage's.
        """
        found = gathered(self.layout, in_buckets(self.layout, self.grad_shard), self._transport)
        own = {self.names[index]: values.view(self.shapes[index]).clone() for index, values in found}
        return self.stage.gather_gradients(own, self.grads.dtype)

    def clear_gradients(self) -> None:
        """Set the gradients of this rank to zero, after sums that have begun."""
        if self._order is not None:  # a step that ends early: other ranks wait in these sums
            self.reduce_gradients()
        self.grads.zero_()
        if self.grad_shard is not self.grads:
            self.grad_shard.zero_()
        self._is_summed = False
        self.stage.clear()

    def take_sum(self) -> None:
        """Count values that a loop wrote into `grad_shard` between steps as a sum, which the next backward keeps."""
        self._is_summed = self._replicas.world_size > 1

    def keep_sum(self) -> None:
        """Let the next backward add to the last sum, by this rank's slices of it."""
        if self._is_summed:
            self.grads.zero_()
            for own, place in self._trained.mine(in_buckets(self._trained.node, self.grads)):
                own.copy_(self.grad_shard[place])
            self._is_summed = False

    def attach_gradients(self) -> None:
        """Check that the model still has its parameters in their places, and give them their gradients.

        Raises:
            ModelRefused: some were replaced, moved or frozen.
        """
        now, device = self._now, self.grads.device
        stays = len(now) == len(self._learning) and all(
            own is made and (own.dtype, own.device) == (dtype, device)
            for own, made, dtype in zip(now, self._learning, self._trained.dtypes, strict=True)
        )
        if not stays or not all(each.are_in_place() for each in self._added):
            raise replaced(self._model, expected=len(self.names), got=len(now))
        self.detach_gradients()
        for each in self._added:
            each.attach()

    def detach_gradients(self) -> None:
        """Clear the gradients of the model's parameters, and ignore new ones until they are attached again."""
        for own in self._learning:
            own.grad = None
        for each in self._added:
            each.detach()

    def release(self) -> None:
        """Stop summing gradients; the model keeps its values."""
        for each in self._added:
            each.release()

    def publish(self) -> None:
        """Send the updated master weights of all ranks to the values that forward reads. Collective.

        They may arrive later: a forward of the model waits for the values that it reads; call `published` before any
        other use.
        """
        self.free()
        self.published()
        self._trained.publish(waits=not self._are_late)
        if self.stage.shares_updates:
            self.published()
            self.stage.share_tied(from_first=True)

    def published(self) -> None:
        """Wait for all values: before a transfer, and before they are read outside of a forward."""
        self._trained.arrive(range(self.layout.num_buckets))

    def free(self) -> None:
        """Free values that a pass has left gathered, because writes to them would be lost."""
        if self._waves is not None:
            self._waves.let_go()

    def publish_bytes(self) -> int:
        """Return the bytes that `publish` needs beside the kept tensors."""
        return self._trained.publish_bytes(waits=not self._are_late)

    @contextmanager
    def whole_on_first(self, *, trained_only: bool) -> Iterator[None]:
        """Make the parameters of rank 0's model whole inside the block, for saving. Collective.

        trained_only: True if only trained parameters are needed; the others may then be on the meta device.
        """
        slices = [self._trained, *([] if trained_only else self._frozen)]
        is_first = self._transport.rank == 0
        with self._whole(slices, is_kept=is_first, device="cpu"), self.stage.whole(self._dtype):
            yield

    @contextmanager
    def whole(self, *, on_first: bool = False) -> Iterator[None]:
        """Give the model of every rank whole parameters inside the block, where it runs alone. Collective.

        on_first: True for rank 0 alone; parameters of other ranks are on the meta device.
        """
        device = "meta" if on_first and self._transport.rank else self.values.device
        with self._whole([self._trained, *self._frozen], is_kept=True, device=device):
            if self._waves is not None:
                self._waves.is_off = True
            try:
                yield
            finally:
                if self._waves is not None:
                    self._waves.is_off = False

    @contextmanager
    def _whole(self, slices: Sequence[Slices], *, is_kept: bool, device: torch.device | str) -> Iterator[None]:
        self.published()
        self.free()
        before = self._is_whole
        self._is_whole = self.keeps_values or is_kept
        try:
            inside = whole_inside(self._model, slices, self._transport, is_kept=is_kept, device=device)
            with nullcontext() if self.keeps_values else inside:
                yield
        finally:
            self._is_whole = before

    # A loop's changes of the model's values, if the model keeps them; otherwise it refuses changes itself.

    def take_values(self) -> None:
        """Copy the model's values to this rank's master weights."""
        if self.keeps_values:
            self._trained.take_values()

    def take_changes(self) -> None:
        """Copy changes of the model's values since they were published to the master weights; others stay exact."""
        if self.keeps_values:
            self._trained.take_changes()

    def norm_of_values(self) -> float:
        """Return the norm of this rank's part of the model's values, or 0.0 if they are the master weights."""
        return self._trained.norm() if self.keeps_values else 0.0

    def tensors(self) -> list[Tensor]:
        """Return all tensors that are kept between steps, except frozen ones of a model that keeps its values."""
        own = [*self._trained.copies, self.grads, self.grad_shard, self.master_weights]
        return [*{id(each): each for each in own}.values(), *(each.values for each in self._frozen)]

    def read_by_forward(self) -> list[Tensor]:
        """Return the tensors that forward reads, frozen ones too."""
        if self.keeps_values:
            return [own.data for own in self._model.parameters()]
        return [bucket for each in (self._trained, *self._frozen) for bucket in each.of_node]

    def state(self) -> dict[str, Tensor]:
        """Return the tensors that only this rank has and that cannot be recomputed, (entries,), by name."""
        return {MASTER_WEIGHTS: self.master_weights}


def largest_magnitude(parameters: Parameters) -> Tensor:
    """Return the largest magnitude in this rank's state, (), on its device, or NaN if one is NaN."""
    return torch.stack([torch.linalg.vector_norm(each, float("inf")) for each in parameters.state().values()]).max()


def lay_parameters(
    model: nn.Module,
    transport: Transport,
    sharding: Sharding,
    *,
    stage: tuple[Mesh, ModelStage] | None = None,
    rows: OwnRows | None = None,
) -> Parameters:
    """Lay a model's parameters out over the ranks, with the values of rank 0. Collective.

    stage: mesh of pipelines and this rank's stage, None without a pipeline. rows: source from which every rank reads
    its own sharded values; without it rank 0 sends them.
    """
    assert rows is None or not sharding.stays, "whole parameters come from rank 0"
    share = StageShare(Mesh(transport, 1)) if stage is None else StageShare(*stage, trains=sharding.trains)
    read = None if rows is None else rows.read
    return Parameters(model, sharding, share, layers=wrapped_layers(model), read=read)
