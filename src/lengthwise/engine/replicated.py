"""Flat ZeRO-1: parameters and gradients in one buffer each, optimizer state split evenly over all ranks.

    values          (compute dtype)   every parameter of the model is a view of it
    grads           (fp32, or fp64)   gradients of all microbatches add up in it
    master_weights  (fp32, or fp64)   this rank's slices of the exact parameters

Once a step: a reduce-scatter of `grads`, the optimizer on the slices, an all-gather into `values`, bucket by bucket
(`engine.flat_layout`). With AdamW each of W ranks has 6 + 16/W bytes a parameter in bf16, 8 + 16/W in fp32; one rank
alone 18 and 16, as its slices are the buffers themselves. ZeRO stage 1 (arXiv 1910.02054).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lengthwise.comm import Pending, Transport
from lengthwise.core.errors import ModelRefused
from lengthwise.engine.edits import take_edits, take_edits_to_host
from lengthwise.engine.flat_layout import BUCKET_ENTRIES, BucketOrder, lay_out
from lengthwise.engine.parameters import MASTER_WEIGHTS, SavedParameters, Shard, brought, shards_of


class FlatParameters:
    """`Parameters` in flat buffers, values and gradients whole on every rank; the model works on views of them.

    What rank 0 has of the model counts, wherever it lies; other ranks may have no storage (the meta device).
    device: where the buffers are; None: where the model is. layers: the decoder's, whose parameters stay together.
    overlaps: sums of buckets travel while backward runs. values_late: published values travel while the next forward
    runs, which waits for what it reads. keeps_frozen: what does not train keeps its dtype. exact_on: where master
    weights are, apart from all else; None: where the model is.
    """

    ranks_in_step = 1

    def __init__(
        self,
        model: nn.Module,
        transport: Transport,
        *,
        dtype: torch.dtype,
        device: torch.device | None = None,
        layers: Sequence[nn.Module] = (),
        bucket_entries: int = BUCKET_ENTRIES,
        overlaps: bool = False,
        values_late: bool = False,
        keeps_frozen: bool = False,
        exact_on: torch.device | None = None,
    ) -> None:
        self._transport, self._model = transport, model
        self._overlaps = overlaps and transport.world_size > 1
        self._are_late = values_late and transport.world_size > 1
        self._order: BucketOrder | None = None  # of the sums of this step
        self._sums: list[Pending] = []
        self._arriving: dict[int, Pending] = {}  # values of buckets
        self._hooks: list[RemovableHandle] = []  # of the model's parameters
        self.names, parameters = zip(*trainable(model), strict=True)
        refuse_hooks({name: each for name, each in trainable(model) if each.is_meta})
        where: torch.device = parameters[0].device if device is None else device
        assert device is not None or where.type != "meta", "a model without storage needs a device"
        frozen = [parameter for parameter in model.parameters() if not parameter.requires_grad]
        share_values(model, transport, frozen, dtype=None if keeps_frozen else dtype, device=where)
        self.shapes = [tuple(parameter.shape) for parameter in parameters]
        layer_of = {id(each): number for number, layer in enumerate(layers) for each in layer.parameters()}
        self.layout = lay_out(
            [parameter.numel() for parameter in parameters],
            [layer_of.get(id(parameter), -1) for parameter in parameters],
            world_size=transport.world_size,
            bucket_entries=bucket_entries,
        )
        self.saved = SavedParameters(layout=self.layout, names=self.names, shapes=self.shapes, rank=transport.rank)
        self._gathered = list(range(self.layout.num_buckets))  # in this order
        self._collects = True  # gradients of the model's parameters
        self._is_summed = False  # what `grads` has is in `grad_shard`, with what the other ranks had
        alone, wide = transport.world_size == 1, torch.promote_types(dtype, torch.float32)
        self._is_exact = dtype == wide
        # What no microbatch or token of this rank reaches stays zero in the sum.
        self.grads = torch.zeros(self.layout.entries, dtype=wide, device=where)
        self.grad_shard = self.grads if alone else torch.zeros(self.layout.shard_entries, dtype=wide, device=where)
        self.values = torch.zeros(self.layout.entries, dtype=dtype, device=where)
        is_shard = alone and self._is_exact and exact_on is None
        self.master_weights = self.values if is_shard else torch.empty_like(self.grad_shard, device=exact_on)
        self._is_apart = exact_on is not None
        self._casts = not self._is_exact or self._is_apart  # what is gathered is a copy
        self._published: Tensor | None = None  # of master weights apart, as `take_changes` then finds them
        self._take_in(model, parameters)
        if self._are_late:
            self._wait_before(model, layers)

    def _take_in(self, model: nn.Module, parameters: Sequence[nn.Parameter]) -> None:
        """Take rank 0's parameters over, whatever each rank loaded; their exact values pass through the gradients'."""
        layout, rank, views = self.layout, self._transport.rank, self.views(self.values)
        exact, made = self.views(self.grads), dict[int, nn.Parameter]()
        for bucket in range(layout.num_buckets):
            members = [index for index, number in enumerate(layout.bucket_of) if number == bucket]
            for index in members:
                if not parameters[index].is_meta:
                    exact[index].copy_(parameters[index].detach())
            whole = layout.bucket(bucket)
            self._transport.broadcast(self.grads[whole], 0)
            self.values[whole].copy_(self.grads[whole])
            if self.master_weights is not self.values:
                self.master_weights[layout.in_shard(bucket)].copy_(self.grads[layout.in_whole(bucket, rank)])
            for index in members:
                made[id(parameters[index])] = _as_view(parameters[index], views[index])
        replace_parameters(model, made)
        self.clear_gradients()
        for index, (parameter, grad) in enumerate(zip(parameters, exact, strict=True)):
            own = made[id(parameter)]
            if self._is_exact:
                own.grad = grad  # autograd adds in place
            if self._overlaps or not self._is_exact:
                self._hooks.append(own.register_post_accumulate_grad_hook(partial(self._take_gradient, index, grad)))

    def _take_gradient(self, index: int, grad: Tensor, parameter: Tensor) -> None:
        """Add what a microbatch's backward made of a parameter to the flat gradients; that may complete a bucket."""
        if not self._collects or parameter.data_ptr() != self.values[self.layout.starts[index] :].data_ptr():
            return  # it is somebody else's backward, or parameter by now
        if not self._is_exact and parameter.grad is not None:
            grad.add_(parameter.grad)
            parameter.grad = None
        if self._order is not None:
            self._sum(self._order.arrived(index))

    def _wait_before(self, model: nn.Module, layers: Sequence[nn.Module]) -> None:
        """Let every layer wait for its values before it runs, and the model for those of no layer."""
        places = {
            id(parameter): bucket for parameter, bucket in zip(self._of(model), self.layout.bucket_of, strict=True)
        }
        within = {id(parameter) for layer in layers for parameter in layer.parameters()}
        read_by = [(layer, list(layer.parameters())) for layer in layers]
        read_by.append((model, [each for each in self._of(model) if id(each) not in within]))
        for module, parameters in read_by:
            buckets = sorted({places[id(each)] for each in parameters if id(each) in places})
            module.register_forward_pre_hook(lambda *_, buckets=buckets: self._arrive(buckets))
            if module is model:  # it waits for these before the first layer, and a communicator ends calls in order
                self._gathered = [*buckets, *(each for each in self._gathered if each not in buckets)]

    def _of(self, model: nn.Module) -> list[nn.Parameter]:
        return [parameter for _, parameter in trainable(model)]

    def _arrive(self, buckets: Iterable[int]) -> None:
        for bucket in buckets if self._arriving else ():
            if bucket in self._arriving:
                self._arriving.pop(bucket).wait()

    def views(self, flat: Tensor) -> list[Tensor]:
        """Cut a flat buffer into one view a parameter."""
        places = zip(self.layout.starts, self.layout.sizes, self.shapes, strict=True)
        return [flat[start : start + size].view(shape) for start, size, shape in places]

    def shards(self) -> list[Shard]:
        """Cut this rank's slices where weight decay changes (see `Parameters.shards`)."""
        return shards_of(self.layout, self._transport.rank, self.shapes, self.master_weights, self.grad_shard)

    @contextmanager
    def reducing_early(self) -> Iterator[None]:
        """Sum buckets as soon as the backward inside the block has made their gradients, where `overlaps`."""
        if self._overlaps:
            self._order = BucketOrder(self.layout.bucket_of)
        yield

    def begin_reducing(self) -> None:
        """Begin the sums of all buckets that are left, where `overlaps`."""
        if self._overlaps:
            self._sum_rest()

    def reduce_gradients(self) -> Tensor:
        """Sum gradients over all ranks; return this rank's shard of the sum, with zeros where nobody's entries are."""
        self._sum_rest()
        for each in self._sums:
            each.wait()
        self._sums, self._order = [], None
        self._is_summed = self.grad_shard is not self.grads
        return self.grad_shard

    def _sum_rest(self) -> None:
        self._order = self._order or BucketOrder(self.layout.bucket_of)
        self._sum(self._order.rest())

    def _sum(self, buckets: Iterable[int]) -> None:
        layout = self.layout
        for bucket in buckets:
            own, all_of_it = self.grad_shard[layout.in_shard(bucket)], self.grads[layout.bucket(bucket)]
            self._sums.append(self._transport.reduce_scatter_async(own, all_of_it))

    def gather_gradients(self) -> dict[str, Tensor]:
        """Return the reduced gradient of every parameter, by name; for checks, not for training."""
        whole = torch.zeros_like(self.grads)
        for _, pending in self._gather(whole, self.grad_shard):
            pending.wait()
        return dict(zip(self.names, self.views(whole), strict=True))

    def publish(self) -> None:
        """Give every rank the parameters that each has updated in its shard."""
        self.published()
        for bucket, pending in self._gather(self.values, self.master_weights, self._published):
            if self._are_late:
                self._arriving[bucket] = pending
            else:
                pending.wait()

    def published(self) -> None:
        """Wait for the values of all buckets."""
        self._arrive(range(self.layout.num_buckets))

    def free(self) -> None:
        """Do nothing: values stay."""

    @contextmanager
    def whole_on_first(self, *, trained_only: bool) -> Iterator[None]:
        """Wait for all values: every rank's model has them whole."""
        del trained_only
        self.published()
        yield

    def publish_bytes(self) -> int:
        """Count the bytes of a slice in the compute dtype, where its master weights are not that, or in the host."""
        sizes = [len(own) for own, _ in self._own()]
        return 0 if not self._casts else self.values.element_size() * (sum if self._are_late else max)(sizes)

    def _gather(self, whole: Tensor, shard: Tensor, staged: Tensor | None = None) -> Iterator[tuple[int, Pending]]:
        """Begin to gather one bucket after the other; yield it with what to wait for. staged: as for `brought`."""
        for bucket in self._gathered:
            place = self.layout.in_shard(bucket)
            own = brought(shard[place], whole.dtype, whole.device, None if staged is None else staged[place])
            yield bucket, self._transport.all_gather_async(whole[self.layout.bucket(bucket)], own)

    def clear_gradients(self) -> None:
        """Set the gradients of this rank to zero, once sums that are under way have ended."""
        if self._order is not None:  # of a step that goes no further: the other ranks wait in these sums, too
            self.reduce_gradients()
        self.grads.zero_()
        self.grad_shard.zero_()
        self._is_summed = False

    def keep_sum(self) -> None:
        """Let the next backward add to the sum: this rank's shard of it takes part in the next one."""
        if self._is_summed:
            layout, rank = self.layout, self._transport.rank
            self.grads.zero_()
            for bucket in range(layout.num_buckets):
                self.grads[layout.in_whole(bucket, rank)].copy_(self.grad_shard[layout.in_shard(bucket)])
            self._is_summed = False

    def attach_gradients(self) -> None:
        """See that the model's parameters are views as they were made, and have their gradients in the flat buffer.

        Raises:
            ModelRefused: a parameter was replaced, or moved to other memory.
        """
        parameters, grads = self._of(self._model), self.views(self.grads)
        moved = len(parameters) != len(self.names) or any(
            own.data_ptr() != value.data_ptr() for own, value in zip(parameters, self.views(self.values), strict=False)
        )
        if moved:
            raise replaced(self._model, expected=len(self.names), got=len(parameters))
        for own, grad in zip(parameters, grads, strict=True):
            own.grad = grad if self._is_exact else None
        self._collects = True

    def detach_gradients(self) -> None:
        """Leave the model's own gradients to others until they are attached again."""
        for own in self._of(self._model):
            own.grad = None
        self._collects = False

    def release(self) -> None:
        """Leave the gradients that a backward makes from now on to the model, which keeps its values."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _own(self) -> list[tuple[Tensor, slice]]:
        """Return this rank's slices of the values, and where each lies in its shard."""
        layout, rank = self.layout, self._transport.rank
        return [(self.values[layout.in_whole(each, rank)], layout.in_shard(each)) for each in range(layout.num_buckets)]

    def take_values(self) -> None:
        """Make the values that the model has now this rank's master weights."""
        for own, place in self._own():
            self.master_weights[place].copy_(own)

    def take_changes(self) -> None:
        """Take what somebody changed in the model's values since they were published; other master weights stay."""
        if self._is_apart:
            if self._published is None:  # nobody has changed master weights yet and not published them
                room = torch.empty(self.master_weights.shape, dtype=self.values.dtype, pin_memory=self.values.is_cuda)
                self._published = room.copy_(self.master_weights)
            take_edits_to_host(self._own(), self.master_weights, self._published)
        elif self.values is not self.master_weights:
            take_edits(self._own(), self.master_weights)

    def norm_of_values(self) -> float:
        """Return the norm of this rank's slices of the values; 0.0 where they are the master weights."""
        if self.values is self.master_weights:
            return 0.0
        norms = torch._foreach_norm([each for each, _ in self._own()], 2, dtype=torch.float64)
        return torch.linalg.vector_norm(torch.stack(norms)).item()

    def tensors(self) -> list[Tensor]:
        """Return the flat buffers."""
        return [self.values, self.grads, self.grad_shard, self.master_weights]

    def read_by_forward(self) -> list[Tensor]:
        """Return the model's parameters."""
        return [parameter.data for parameter in self._model.parameters()]

    def state(self) -> dict[str, Tensor]:
        """Return the master weights of this rank; the values of all ranks follow from theirs."""
        return {MASTER_WEIGHTS: self.master_weights}


def trainable(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return the parameters that train, by name, tied ones once.

    Raises:
        ModelRefused: there is none.
    """
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    if not named:
        where, expected = f"model {type(model).__name__}", "at least one parameter that can be trained"
        raise ModelRefused(where, expected=expected, got="none", remedy="Unfreeze the model.")
    return named


def replaced(model: nn.Module, *, expected: int, got: int) -> ModelRefused:
    """Return the error about parameters that are no more those that were made."""
    remedy = "Move, convert, freeze and replace parameters before the first step, not after."
    return ModelRefused(
        f"model {type(model).__name__}",
        expected=f"the {expected} trainable parameters where they were put",
        got=f"{got}, some of them elsewhere",
        remedy=remedy,
    )


def refuse_hooks(parameters: Mapping[str, nn.Parameter]) -> None:
    """Refuse parameters with hooks of their gradients where the model gets others in their place.

    Raises:
        ModelRefused: there are some.
    """
    hooked = [n for n, p in parameters.items() if p._backward_hooks or getattr(p, "_post_accumulate_grad_hooks", None)]
    if hooked:
        expected, remedy = (
            "no hook of its gradient yet: the model gets new parameters",
            "Register it after the session.",
        )
        raise ModelRefused(f"parameter {hooked[0]}", expected=expected, got=f"{len(hooked)} with one", remedy=remedy)


def share_values(
    model: nn.Module,
    transport: Transport,
    parameters: Iterable[nn.Parameter],
    *,
    dtype: torch.dtype | None,
    device: torch.device,
) -> None:
    """Put rank 0's buffers and `parameters` on every rank where the model runs, in `dtype`; None: its own. Collective.

    Of what does not train, which is in no flat buffer; model buffers may be weights, too, which rank 0 alone reads.
    """
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                there = torch.empty_like(buffer, device=device) if buffer.is_meta else buffer.to(device)
                module._buffers[name] = value = there.contiguous()
                if value.numel():
                    transport.broadcast(value.view(-1).view(torch.uint8), 0)
    made: dict[int, nn.Parameter] = {}
    for parameter in parameters:
        if parameter.is_meta:
            value = torch.empty(parameter.shape, dtype=dtype or parameter.dtype, device=device)
        else:
            value = parameter.detach().to(device, dtype or parameter.dtype).contiguous()
        transport.broadcast(value, 0)
        if parameter.is_meta or value.data_ptr() != parameter.data_ptr():  # else its gradient, if any, stays
            made[id(parameter)] = _as_view(parameter, value)
    replace_parameters(model, made)


def _as_view(parameter: nn.Parameter, value: Tensor) -> nn.Parameter:
    """Return the parameter with another value; one without storage cannot take it and is made anew."""
    if parameter.is_meta:
        return nn.Parameter(value, requires_grad=parameter.requires_grad)
    parameter.data, parameter.grad = value, None
    return parameter


def replace_parameters(model: nn.Module, made: Mapping[int, nn.Parameter]) -> None:
    """Put parameters that were made anew in the place of those of these ids, tied ones in all their places."""
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and id(parameter) in made:
                module._parameters[name] = made[id(parameter)]
