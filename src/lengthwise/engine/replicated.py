"""Flat ZeRO-1: parameters and gradients in one buffer each, optimizer state cut evenly over all ranks.

    values   (compute dtype)     every parameter of the model is a view of it
    grads    (fp32, or fp64)     gradients of however many microbatches a rank has add up in it
    masters  (fp32, or fp64)     this rank's slice of the exact parameters, with its optimizer state

Once a step: one reduce-scatter of `grads`, AdamW on the slice, one all-gather into `values`. A rank without a
microbatch, or a parameter that no token reached, contributes zeros, so unequal microbatch counts need nothing special.
Memory: 6 + 12/W bytes a parameter in bf16, 8 + 12/W in fp32, W ranks. Tried before and left: FSDP2 (its dim-0 padding
grows the all-gather 2.5x at 12,288 ranks) and reductions inside the backward (a ring member then waits in one for a
rank that waits for that member's next ring message).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lengthwise.comm import Transport
from lengthwise.core.errors import ModelRefused


class FlatParameters:
    """The parameters of a model, moved into flat buffers; the model goes on working on views of them."""

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
        self.grads = torch.zeros_like(exact)
        self.grad_shard = torch.zeros(self.shard_size, dtype=wide, device=device)
        self.masters = exact[self._shard].clone()
        self.values = exact if dtype == wide else exact.to(dtype)
        for parameter, value, grad in zip(parameters, self.views(self.values), self.views(self.grads), strict=True):
            parameter.data = value
            if dtype == wide:
                parameter.grad = grad  # autograd adds in place
            else:
                parameter.grad = None
                parameter.register_post_accumulate_grad_hook(_add_to(grad))

    def views(self, flat: Tensor) -> list[Tensor]:
        """Cut a flat buffer into one view a parameter."""
        starts = [0, *self._ends[:-1]]
        return [flat[start:end].view(shape) for start, end, shape in zip(starts, self._ends, self._shapes, strict=True)]

    def shard_segments(self) -> list[tuple[int, int, bool]]:
        """Cut this rank's slice where weight decay changes: (start, stop, decayed) within the slice.

        Parameters of two or more dimensions are decayed; biases and norms are not.
        """
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
        """Sum gradients over all ranks; return this rank's slice of the sum."""
        self._transport.reduce_scatter(self.grad_shard, self.grads)
        return self.grad_shard

    def gather_gradients(self) -> dict[str, Tensor]:
        """Return the reduced gradient of every parameter, by name; for checks, not for training."""
        whole = torch.zeros_like(self.grads)
        self._transport.all_gather(whole, self.grad_shard)
        return dict(zip(self.names, self.views(whole), strict=True))

    def publish(self) -> None:
        """Give every rank the parameters that each has updated in its slice, and clear the gradients."""
        self._transport.all_gather(self.values, self.masters.to(self.values.dtype))
        self.grads.zero_()

    @property
    def _shard(self) -> slice:
        start = self._transport.rank * self.shard_size
        return slice(start, start + self.shard_size)


def _trainable(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    if not named:
        raise ModelRefused(
            f"model {type(model).__name__}",
            expected="at least one parameter that can be trained",
            got="none",
            remedy="Unfreeze the model.",
        )
    return named


def _add_to(grad: Tensor):  # noqa: ANN202 - the hook's type is torch's business
    def hook(parameter: Tensor) -> None:
        if parameter.grad is not None:
            grad.add_(parameter.grad)
            parameter.grad = None

    return hook
