"""ZeRO-3: each rank keeps rows of every parameter, of its gradient and of the optimizer's states, in fp32.

A layer's parameters are gathered, in the compute dtype, right before its forward and its backward and let go after;
what a backward makes of their gradients is summed over the ranks at once. So all ranks run all microbatches, with a row
of padding where they have nothing: plans are of kind `waves`. Rings lie between a layer's gather and its release.

    master_weights  (fp32, or fp64)   this rank's rows, what layers are gathered from
    grad_shard      (fp32, or fp64)   of the same entries, the sum of all ranks and microbatches

With AdamW 16/W bytes a parameter on each of W ranks, and two layers. FSDP2 gathers and sums (`comm.fsdp`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from lengthwise.comm import Transport
from lengthwise.comm.fsdp import ShardedModules, is_sharded, rows_here
from lengthwise.engine.flat_layout import lay_out_rows
from lengthwise.engine.gathering import gathered
from lengthwise.engine.parameters import MASTER_WEIGHTS, Shard, shards_of
from lengthwise.engine.replicated import replace_parameters, share_values, trainable


class ShardedParameters:
    """`Parameters` of which each rank has some rows; the model's own are without storage outside of a pass.

    What rank 0 has of the model counts, buffers as well, wherever it lies; the others' parameters may be without
    storage (on the meta device). device: where a rank's rows are. layers: modules that are gathered one at a time.
    read: returns rows [first, stop) of a parameter by its name, on every rank its own; None: those of rank 0 are sent.
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
        self.names, parameters = zip(*trainable(model), strict=True)
        self.shapes = [tuple(parameter.shape) for parameter in parameters]
        self.layout = lay_out_rows(self.shapes, world_size=transport.world_size)
        wide = torch.promote_types(dtype, torch.float32)
        share_values(model, transport, (), dtype=dtype, device=device)
        given = {name: parameter.detach() for name, parameter in model.named_parameters()}
        replace_parameters(
            model,
            {
                id(each): nn.Parameter(
                    torch.empty(each.shape, dtype=wide if each.requires_grad else dtype, device="meta"),
                    requires_grad=each.requires_grad,
                )
                for each in model.parameters()
            },
        )
        self._modules = ShardedModules(layers, model, transport, device=device, dtype=dtype, reduce_dtype=wide)
        self.master_weights = torch.zeros(self.layout.shard_entries, dtype=wide, device=device)
        self.grad_shard = torch.zeros_like(self.master_weights)
        self._frozen: list[Tensor] = []
        self._take_in(read or partial(self._sent, given))

    def _take_in(self, read: Callable[[str, int, int], Tensor]) -> None:
        """Put this rank's rows of all parameters where they stay, one parameter at a time."""
        buckets, made = dict(zip(self.names, range(len(self.names)), strict=True)), dict[int, nn.Parameter]()
        device, most = self.master_weights.device, self._modules.size
        for name, parameter in self._model.named_parameters():
            padded = -(-parameter.shape[0] // most)
            shape, gradient = (padded, *parameter.shape[1:]), None
            if name in buckets:
                place = self.layout.in_shard(buckets[name])
                rows, gradient = self.master_weights[place].view(shape), self.grad_shard[place].view(shape)
            else:
                rows = torch.zeros(shape, dtype=parameter.dtype, device=device)
                self._frozen.append(rows)
            own = self._modules.own_rows(parameter.shape[0])
            first = self._modules.position * padded
            rows[:own].copy_(read(name, first, first + own))
            made[id(parameter)] = self._modules.put(parameter, rows, gradient)
        replace_parameters(self._model, made)

    def _sent(self, given: Mapping[str, Tensor], name: str, first: int, stop: int) -> Tensor:
        """Return this rank's rows of what rank 0 has of a parameter. Collective."""
        dtype = self.master_weights.dtype if name in self.names else self._dtype
        whole = torch.empty(given[name].shape, dtype=dtype, device=self.master_weights.device)
        if not given[name].is_meta:
            whole.copy_(given[name])
        self._transport.broadcast(whole, 0)
        return whole[first:stop]

    def shards(self) -> list[Shard]:
        """Cut this rank's rows where weight decay changes (see `Parameters.shards`)."""
        return shards_of(self.layout, self._transport.rank, self.shapes, self.master_weights, self.grad_shard)

    @contextmanager
    def reducing_early(self) -> Iterator[None]:
        """Do nothing: each backward sums what it makes."""
        yield

    def begin_reducing(self) -> None:
        """Do nothing, as above."""

    def reduce_gradients(self) -> Tensor:
        """Return this rank's rows of the sum, which every backward added to."""
        return self.grad_shard

    def gather_gradients(self) -> dict[str, Tensor]:
        """Return the gradient of every parameter, by name; for checks, not for training. Collective."""
        found = gathered(self.layout, self.grad_shard, self._transport)
        return {self.names[index]: values.view(self.shapes[index]).clone() for index, values in found}

    def publish(self) -> None:
        """Let go of what was gathered of the values before, and clear gradients."""
        self._modules.let_go()
        self.clear_gradients()

    def published(self) -> None:
        """Do nothing: layers are gathered when they run."""

    def publish_bytes(self) -> int:
        """Return 0: the rows of a rank are what it updates."""
        return 0

    def clear_gradients(self) -> None:
        """Set the gradients of this rank to zero."""
        self.grad_shard.zero_()

    @contextmanager
    @torch.no_grad()
    def whole_on_first(self, *, trained_only: bool) -> Iterator[None]:
        """Give the model of rank 0 whole parameters inside the block, in the compute dtype on the host. Collective."""
        self._modules.let_go()
        made: dict[int, nn.Parameter] = {}
        sharded = [each for each in self._model.parameters() if each.requires_grad or not trained_only]
        for parameter in sharded:
            assert is_sharded(parameter), "what was gathered was let go"
            rows = rows_here(parameter).to(self._dtype)
            whole = rows.new_empty((len(rows) * self._modules.size, *parameter.shape[1:]))
            self._transport.all_gather(whole, rows)
            if self._transport.rank == 0:
                values = whole[: parameter.shape[0]].to("cpu", copy=True)
                made[id(parameter)] = nn.Parameter(values, requires_grad=parameter.requires_grad)
        replace_parameters(self._model, made)
        try:
            yield
        finally:
            back = {id(made[id(each)]): each for each in sharded if id(each) in made}
            replace_parameters(self._model, back)

    def tensors(self) -> list[Tensor]:
        """Return the rows of this rank."""
        return [self.master_weights, self.grad_shard, *self._frozen]

    def state(self) -> dict[str, Tensor]:
        """Return the master weights of this rank's rows."""
        return {MASTER_WEIGHTS: self.master_weights}
