"""ZeRO-3: each rank keeps a slice of every unit of the model, of its gradient and of the optimizer's states, in fp32.

A unit (the embedding; a decoder layer; norm and head: `engine.units`) is gathered, in the compute dtype, right before
its forward and its backward, and freed after; what a backward makes of its gradients is summed over the ranks at once
(`engine.waves`). So all ranks run all microbatches, with a row of padding where they have nothing: plans are of kind
`waves`.

    master_weights  (fp32, or fp64)     this rank's slices of all units, what these are gathered from
    grad_shard      (fp32, or fp64)     of the same entries, the sum of all ranks and microbatches
    frozen          (compute dtype)     this rank's slices of what does not train

With AdamW 16/W bytes a parameter on each of W ranks, and two units. ZeRO stage 3 (arXiv 1910.02054).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from lengthwise.comm import Transport
from lengthwise.engine.flat_layout import FlatLayout, lay_out
from lengthwise.engine.gathering import gathered
from lengthwise.engine.parameters import MASTER_WEIGHTS, Shard, shards_of
from lengthwise.engine.replicated import replace_parameters, share_values, trainable
from lengthwise.engine.units import ModelUnit, UnitPart, units_of
from lengthwise.engine.waves import Waves


class ShardedParameters:
    """`Parameters` of which each rank has a slice of every unit; the model's own have no storage outside of a pass.

    What rank 0 has of the model counts, buffers as well, wherever it lies; the others' parameters may be without
    storage (on the meta device). device: where a rank's slices are. layers: the decoder's, a unit each. read: returns
    entries [first, stop) of a parameter by its name, on every rank its own; None: those of rank 0 are sent.
    `names` are in the order of the units.
    """

    in_lock_step = True

    def __init__(
        self,
        model: nn.Module,
        transport: Transport,
        *,
        dtype: torch.dtype,
        device: torch.device,
        layers: Sequence[nn.Module],
        read: Callable[[str, int, int], Tensor] | None = None,
    ) -> None:
        self._transport, self._model, self._dtype = transport, model, dtype
        trainable(model)
        wide = torch.promote_types(dtype, torch.float32)
        share_values(model, transport, (), dtype=dtype, device=device)
        given = dict(model.named_parameters())
        units = units_of(model, layers)
        trained = _Slices(units, given, transport, dtype=wide, device=device, trains=True)
        self._frozen = _Slices(units, given, transport, dtype=dtype, device=device, trains=False)
        self.names, self.shapes, self.layout = trained.names, trained.shapes, trained.layout
        self.master_weights = trained.values
        self.grad_shard = torch.zeros_like(self.master_weights)
        read = read or partial(self._sent, {name: each.detach() for name, each in given.items()})
        made, parts = dict[int, nn.Parameter](), list[list[UnitPart]]()
        for number in range(len(units)):
            kinds = ((trained, self.grad_shard), (self._frozen, None))
            parts.append([part for each, sum_ in kinds for part in each.parts(number, dtype=dtype, gradient=sum_)])
        for slices in (trained, self._frozen):
            slices.fill(read)
            places = iter(slices.names)
            for part in (each for of_unit in parts for each in of_unit if each.trains == slices.trains):
                made.update((id(given[next(places)]), parameter) for parameter in part.parameters)
        replace_parameters(model, made)
        self._waves = Waves(model, units, parts, transport)

    def _sent(self, given: Mapping[str, Tensor], name: str, first: int, stop: int) -> Tensor:
        """Return entries of what rank 0 has of a parameter. Collective."""
        dtype = self.master_weights.dtype if name in self.names else self._dtype
        whole = torch.empty(given[name].shape, dtype=dtype, device=self.master_weights.device)
        if not given[name].is_meta:
            whole.copy_(given[name])
        self._transport.broadcast(whole, 0)
        return whole.view(-1)[first:stop]

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
        """Return this rank's slices of the sum, which every backward added to."""
        return self.grad_shard

    def gather_gradients(self) -> dict[str, Tensor]:
        """Return the gradient of every parameter, by name; for checks, not for training. Collective."""
        found = gathered(self.layout, self.grad_shard, self._transport)
        return {self.names[index]: values.view(self.shapes[index]).clone() for index, values in found}

    def publish(self) -> None:
        """Free what was gathered of the values before, and clear gradients."""
        self._waves.let_go()
        self.clear_gradients()

    def published(self) -> None:
        """Do nothing: units are gathered when they run."""

    def publish_bytes(self) -> int:
        """Return 0: the slices of a rank are what it updates."""
        return 0

    def clear_gradients(self) -> None:
        """Set the gradients of this rank to zero."""
        self.grad_shard.zero_()

    @contextmanager
    @torch.no_grad()
    def whole_on_first(self, *, trained_only: bool) -> Iterator[None]:
        """Give the model of rank 0 whole parameters inside the block, in the compute dtype on the host. Collective.

        They are gathered a unit at a time.
        """
        self._waves.let_go()
        before, made = dict(self._model.named_parameters()), dict[int, nn.Parameter]()
        of = [(self.names, self.shapes, self.layout, self.master_weights)]
        if self._frozen.names and not trained_only:
            of.append((self._frozen.names, self._frozen.shapes, self._frozen.layout, self._frozen.values))
        for names, shapes, layout, values in of:
            for index, each in gathered(layout, values, self._transport, dtype=self._dtype):
                if not self._transport.rank:
                    own, whole = before[names[index]], each.view(shapes[index]).to("cpu", copy=True)
                    made[id(own)] = nn.Parameter(whole, requires_grad=own.requires_grad)
        replace_parameters(self._model, made)
        try:
            yield
        finally:
            replace_parameters(self._model, {id(made[id(each)]): each for each in before.values() if id(each) in made})

    def tensors(self) -> list[Tensor]:
        """Return the slices of this rank."""
        return [self.master_weights, self.grad_shard, self._frozen.values]

    def read_by_forward(self) -> list[Tensor]:
        """Return the slices that units are gathered from."""
        return [self.master_weights, self._frozen.values]

    def state(self) -> dict[str, Tensor]:
        """Return the master weights of this rank's slices."""
        return {MASTER_WEIGHTS: self.master_weights}


class _Slices:
    """This rank's slices of the parameters of all units that train, or that do not: `values`, (entries,)."""

    def __init__(
        self,
        units: Sequence[ModelUnit],
        given: Mapping[str, nn.Parameter],
        transport: Transport,
        *,
        dtype: torch.dtype,
        device: torch.device,
        trains: bool,
    ) -> None:
        self.trains, self._rank = trains, transport.rank
        named = [(name, number) for number, unit in enumerate(units) for name in unit.names]
        named = [(name, number) for name, number in named if given[name].requires_grad == trains]
        self.names, self._unit_of = [name for name, _ in named], [number for _, number in named]
        self.shapes = [tuple(given[name].shape) for name in self.names]
        sizes = [given[name].numel() for name in self.names]
        self.layout: FlatLayout = lay_out(sizes, self._unit_of, world_size=transport.world_size, bucket_entries=1)
        self.values = torch.zeros(self.layout.shard_entries, dtype=dtype, device=device)

    def parts(self, unit: int, *, dtype: torch.dtype, gradient: Tensor | None) -> Iterator[UnitPart]:
        """Yield the part of a unit that has these, if it has any."""
        members = [index for index, number in enumerate(self._unit_of) if number == unit]
        if members:
            bucket = self.layout.bucket_of[members[0]]
            whole, own = self.layout.bucket(bucket), self.layout.in_shard(bucket)
            yield UnitPart(
                [self.shapes[index] for index in members],
                [self.layout.starts[index] - whole.start for index in members],
                entries=whole.stop - whole.start,
                dtype=dtype,
                own=self.values[own],
                gradient=None if gradient is None else gradient[own],
            )

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
