"""Flat ZeRO-1: parameters and gradients in one buffer each, optimizer state split evenly over all ranks.

    values          (compute dtype)   every parameter of the model is a view of it
    grads           (fp32, or fp64)   gradients of all microbatches add up in it
    master_weights  (fp32, or fp64)   this rank's slice of the exact parameters

Once a step: a reduce-scatter of `grads`, AdamW on the slice, an all-gather into `values`. Each of W ranks has 6 + 16/W
bytes a parameter in bf16, 8 + 16/W in fp32, one rank alone 18 and 16, as its slices are the buffers themselves (10, 8
+ 4/W while the model is taken in). ZeRO stage 1 (arXiv 1910.02054).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lengthwise.comm import Transport
from lengthwise.core.errors import ModelRefused
from lengthwise.engine.parameters import Shard


class FlatParameters:
    """`Parameters` in flat buffers, values and gradients whole on every rank; the model works on views of them."""

    def __init__(self, model: nn.Module, transport: Transport, *, dtype: torch.dtype) -> None:
        self._transport = transport
        for parameter in model.parameters():
            if not parameter.requires_grad:  # the base under adapters: in no buffer, but as narrow, and alike on all
                parameter.data = parameter.detach().to(dtype).contiguous()
                transport.broadcast(parameter.data, 0)
        self.names, parameters = zip(*_trainable(model), strict=True)
        self._shapes = [parameter.shape for parameter in parameters]
        sizes = [parameter.numel() for parameter in parameters]
        self._ends = torch.tensor(sizes).cumsum(0).tolist()
        wide = torch.promote_types(dtype, torch.float32)
        self.shard_size = -(-self._ends[-1] // transport.world_size)
        padded, device = self.shard_size * transport.world_size, parameters[0].device

        exact = torch.zeros(padded, dtype=wide, device=device)
        for parameter, view in zip(parameters, self.views(exact), strict=True):
            view.copy_(parameter.detach())
        transport.broadcast(exact, 0)  # whatever each rank loaded, all train the same model
        alone = transport.world_size == 1
        is_exact = dtype == wide
        self.master_weights = exact if alone and is_exact else exact[self._shard].clone()
        self.values = exact if is_exact else exact.to(dtype)
        del exact
        for parameter, value in zip(parameters, self.views(self.values), strict=True):
            parameter.data, parameter.grad = value, None
        # What no microbatch or token of this rank reaches stays zero in the sum.
        self.grads = torch.zeros(padded, dtype=wide, device=device)
        self.grad_shard = self.grads if alone else torch.zeros(self.shard_size, dtype=wide, device=device)
        for parameter, grad in zip(parameters, self.views(self.grads), strict=True):
            if is_exact:
                parameter.grad = grad  # autograd adds in place
            else:
                parameter.register_post_accumulate_grad_hook(_add_to(grad))

    def views(self, flat: Tensor) -> list[Tensor]:
        """Cut a flat buffer into one view a parameter."""
        starts = [0, *self._ends[:-1]]
        return [flat[start:end].view(shape) for start, end, shape in zip(starts, self._ends, self._shapes, strict=True)]

    def shards(self) -> list[Shard]:
        """Cut this rank's slice where weight decay changes (see `Parameters.shards`)."""
        return [
            Shard(weights=self.master_weights[start:stop], gradient=self.grad_shard[start:stop], decayed=decayed)
            for start, stop, decayed in self._segments()
        ]

    def _segments(self) -> list[tuple[int, int, bool]]:
        """Return (start, stop, decayed) within the slice."""
        low = self._transport.rank * self.shard_size
        segments: list[tuple[int, int, bool]] = []
        for start, end, shape in zip([0, *self._ends[:-1]], self._ends, self._shapes, strict=True):
            first, last = max(start - low, 0), min(end - low, self.shard_size)
            if first >= last:
                continue
            decayed = len(shape) >= 2
            if segments and segments[-1][2] == decayed:
                segments[-1] = (segments[-1][0], last, decayed)
            else:
                segments.append((first, last, decayed))
        return segments

    def reduce_gradients(self) -> Tensor:
        """Sum gradients over all ranks; return this rank's slice of the sum, padded with zeros to `shard_size`."""
        self._transport.reduce_scatter(self.grad_shard, self.grads)
        return self.grad_shard

    def gather_gradients(self) -> dict[str, Tensor]:
        """Return the reduced gradient of every parameter, by name; for checks, not for training."""
        whole = torch.zeros_like(self.grads)
        self._transport.all_gather(whole, self.grad_shard)
        return dict(zip(self.names, self.views(whole), strict=True))

    def publish(self) -> None:
        """Give every rank the parameters that each has updated in its slice, and clear the gradients."""
        self._transport.all_gather(self.values, self.master_weights.to(self.values.dtype))
        self.clear_gradients()

    def clear_gradients(self) -> None:
        """Set the gradients of this rank to zero."""
        self.grads.zero_()

    def tensors(self) -> list[Tensor]:
        """Return the flat buffers."""
        return [self.values, self.grads, self.grad_shard, self.master_weights]

    def state(self) -> dict[str, Tensor]:
        """Return the master weights of this rank; the values of all ranks follow from theirs."""
        return {"master_weights": self.master_weights}

    @property
    def _shard(self) -> slice:
        start = self._transport.rank * self.shard_size
        return slice(start, start + self.shard_size)


def _trainable(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    if not named:
        where, expected = f"model {type(model).__name__}", "at least one parameter that can be trained"
        raise ModelRefused(where, expected=expected, got="none", remedy="Unfreeze the model.")
    return named


def _add_to(grad: Tensor):  # noqa: ANN202 - the hook's type is torch's business
    def hook(parameter: Tensor) -> None:
        if parameter.grad is not None:
            grad.add_(parameter.grad)
            parameter.grad = None

    return hook
