"""The chunked loss: logits of a microbatch are made for a few tokens at a time, and dropped.

The decoder runs once. The rest of the model (head, scale, cap) runs on chunks of the hidden states, whose loss and
gradients are computed at once, without more arithmetic. After Liger Kernel (arXiv 2410.10989), for heads of any kind.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import repeat
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.loss.loss_utils import ForCausalLMLoss

from lengthwise.core.errors import ModelRefused
from lengthwise.models.modules import modules_of
from lengthwise.models.text_part import has_towers, whole_model, without_towers


def token_loss(logits: Tensor, shift_labels: Tensor, weights: Tensor | None = None) -> Tensor:
    """Sum the cross entropy of logits (tokens, vocab), in fp32 or wider. weights: weights (tokens,), None for 1."""
    if weights is None:
        wide = torch.promote_types(logits.dtype, torch.float32)
        return F.cross_entropy(logits.to(wide), shift_labels, ignore_index=-100, reduction="sum")
    losses = token_losses(logits, shift_labels)
    return (losses * weights.to(losses.dtype)).sum()


def token_losses(logits: Tensor, shift_labels: Tensor) -> Tensor:
    """Return the cross entropy per token, (tokens,), from logits (tokens, vocab), in fp32 or wider."""
    wide = torch.promote_types(logits.dtype, torch.float32)
    return F.cross_entropy(logits.to(wide), shift_labels, ignore_index=-100, reduction="none")


_chosen = WeakKeyDictionary[nn.Module, dict[tuple[Callable[..., Tensor], torch.dtype], Callable[..., Tensor]]]()


def use_losses(
    model: nn.Module, dtype: torch.dtype, losses: Mapping[Callable[..., Tensor], Callable[..., Tensor]]
) -> None:
    """Let planned passes of a model compute losses of logits in `dtype` by others. losses: these, by the above."""
    _chosen.setdefault(model, {}).update({(each, dtype): other for each, other in losses.items()})


def loss_by(model: nn.Module, loss: Callable[..., Tensor], logits: Tensor, *given: Tensor | None) -> Tensor:
    """Return `token_loss` or `token_losses`, as chosen for the model and the dtype of its logits."""
    return _chosen.get(model, {}).get((loss, logits.dtype), loss)(logits, *given)


def has_own_logits(model: Any) -> bool:
    """Return whether a model may make its logits by a forward or a forward hook of the user.

    These may need ids, positions or all tokens, but chunks of a loss have hidden states only.
    """
    model = whole_model(model)
    forward = getattr(model, "_original_forward", model.forward)  # accelerate wraps it in autocast
    is_family = type(model).forward.__module__.startswith("transformers.models.")
    known = ("lengthwise.", "transformers.")
    hooks = (str(getattr(each, "__module__", None)) for each in model._forward_hooks.values())
    is_plain = is_family and getattr(forward, "__func__", None) is type(model).forward
    return not is_plain or not all(each.startswith(known) for each in hooks)


def has_own_loss(model: Any) -> bool:
    """Return whether the `loss` of a model's output may be another than the next token's cross entropy."""
    return has_own_logits(model) or whole_model(model).loss_function is not ForCausalLMLoss


class DecoderOutput:
    """Keeps a decoder's output, and passes only one token on to the rest of the model."""

    def __init__(self, model: nn.Module) -> None:
        self._model, self._decoder = model, _run_once(model)
        self._outputs: list[Any] = []

    @contextmanager
    def caught(self) -> Iterator[None]:
        """Catch the decoder's output inside the block.

        Raises:
            ModelRefused: the decoder did not run once.
        """

        def keep(_module: nn.Module, _asked: Any, output: Any) -> Any:
            self._outputs.append(output)
            return _with_hidden(output, output.last_hidden_state[:, :1])

        handle = self._decoder.register_forward_hook(keep)
        try:
            yield
        finally:
            handle.remove()
        if len(self._outputs) != 1:
            where = f"model {type(self._model).__name__}"
            expected = "a forward that runs its decoder once, for the chunked loss"
            raise ModelRefused(where, expected=expected, got=f"{len(self._outputs)} runs", remedy="Set loss: whole.")

    def loss(self, shift_labels: Tensor, chunk_tokens: int, weights: Tensor | None = None) -> Tensor:
        """Sum the loss of the first tokens, whose labels are `shift_labels` (tokens,), as `token_loss` does."""
        hidden = self._hidden(shift_labels)
        outside = _outside(self._model, self._decoder) if torch.is_grad_enabled() else []
        return _ChunkedLoss.apply(hidden, shift_labels, weights, self._summed, chunk_tokens, *outside)  # type: ignore[no-any-return]

    def losses(self, shift_labels: Tensor, chunk_tokens: int) -> Tensor:
        """Return the loss of each of the first tokens, (tokens,), without gradients."""
        chunks = zip(self._hidden(shift_labels).split(chunk_tokens), shift_labels.split(chunk_tokens), strict=True)
        with torch.no_grad():
            return torch.cat(
                [loss_by(self._model, token_losses, self._logits(each), labels) for each, labels in chunks]
            )

    def _summed(self, hidden: Tensor, labels: Tensor, weights: Tensor | None) -> Tensor:
        return loss_by(self._model, token_loss, self._logits(hidden), labels, weights)

    def _hidden(self, shift_labels: Tensor) -> Tensor:
        return self._outputs[0].last_hidden_state[0, : len(shift_labels)]  # type: ignore[no-any-return]

    def _logits(self, hidden: Tensor) -> Tensor:
        """Run the model after its decoder on hidden states (tokens, hidden)."""
        output = _with_hidden(self._outputs[0], hidden[None])
        output.router_logits = None  # they were counted in the first run
        forward = self._decoder.forward
        self._decoder.forward = _HasRun(output)
        try:
            ids = torch.zeros(1, len(hidden), dtype=torch.long, device=hidden.device)
            # forward, not a call: the hooks, which may gather values or wait for them, ran with the decoder.
            return self._model.forward(input_ids=ids, position_ids=ids, use_cache=False).logits[0]
        finally:
            self._decoder.forward = forward


def _run_once(model: Any) -> nn.Module:
    """Return what runs before the head: the decoder, or what embeds tokens and images and calls it."""
    whole, decoder = whole_model(model), model.get_decoder()
    if not has_towers(whole.config):
        return decoder  # type: ignore[no-any-return]
    return next((each for each in whole.children() if decoder in each._modules.values()), decoder)


class _HasRun:
    """Stands in for the forward of a module that has run. output: what it returns."""

    def __init__(self, output: Any) -> None:
        self._output = output

    def __call__(self, *_: Any, **__: Any) -> Any:
        return self._output


def has_run(module: nn.Module) -> bool:
    """Return whether a module has run, and only what follows it runs now, on some of its hidden states."""
    return isinstance(vars(module).get("forward"), _HasRun)


def _with_hidden(output: Any, hidden: Tensor) -> Any:
    copied = copy.copy(output)
    copied.last_hidden_state = hidden
    return copied


def _outside(model: nn.Module, decoder: nn.Module) -> list[nn.Parameter]:
    """List trained parameters outside the decoder and towers; a tied head's weight belongs to the embedding inside."""
    inside = set(modules_of(decoder))
    found = (
        parameter
        for module in modules_of(without_towers(model))
        if module not in inside
        for parameter in module.parameters(recurse=False)
    )
    return list({id(each): each for each in found if each.requires_grad}.values())


class _ChunkedLoss(torch.autograd.Function):
    """The summed loss, whose forward also computes the gradients of hidden states and head."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        labels: Tensor,
        weights: Tensor | None,
        loss_of: Callable[..., Tensor],
        chunk_tokens: int,
        *parameters: Tensor,
    ) -> Tensor:
        wide = torch.promote_types(hidden.dtype, torch.float32)
        total = torch.zeros((), dtype=wide, device=hidden.device)
        wanted = any(ctx.needs_input_grad)
        by_hidden = torch.zeros_like(hidden) if wanted else None
        by_parameter: list[Tensor | None] = [None] * len(parameters)
        for start in range(0, len(hidden), chunk_tokens):
            part = slice(start, start + chunk_tokens)
            weighed = None if weights is None else weights[part]
            loss, found = _take_chunk(hidden[part], labels[part], weighed, loss_of, parameters, wanted=wanted)
            total += loss
            if by_hidden is not None:
                assert found[0] is not None, "logits follow from hidden states"
                by_hidden[part] = found[0]
                by_parameter = [_sum(*each) for each in zip(by_parameter, found[1:], strict=True)]
            del found  # before others are made
        if by_hidden is not None:
            sums = zip(by_parameter, parameters, strict=True)
            ctx.made = [by_hidden, *(torch.zeros_like(own) if each is None else each for each, own in sums)]
            ctx.dtypes = [each.dtype for each in (hidden, *parameters)]
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        made: list[Tensor] = ctx.made
        del ctx.made  # returned without a copy
        by_hidden, *by_parameter = map(_scaled, made, ctx.dtypes, repeat(gradients[0]))
        return by_hidden, None, None, None, None, *by_parameter


def _take_chunk(
    hidden: Tensor,
    labels: Tensor,
    weights: Tensor | None,
    loss_of: Callable[..., Tensor],
    parameters: Sequence[Tensor],
    *,
    wanted: bool,
) -> tuple[Tensor, Sequence[Tensor | None]]:
    """Return the loss of a chunk, and its gradients of hidden states and parameters if they are wanted."""
    with torch.set_grad_enabled(wanted):
        chunk = hidden.detach().requires_grad_(wanted)
        loss = loss_of(chunk, labels, weights)
    found = torch.autograd.grad(loss, (chunk, *parameters), allow_unused=True) if wanted else ()
    return loss.detach(), found


def _scaled(gradient: Tensor, dtype: torch.dtype, factor: Tensor) -> Tensor:
    """Multiply a gradient, in place if it has the dtype, and round it once."""
    out = gradient if gradient.dtype == dtype else torch.empty_like(gradient, dtype=dtype)
    return torch.mul(gradient, factor, out=out)


def _sum(total: Tensor | None, more: Tensor | None) -> Tensor | None:
    """Add a chunk's gradient in fp32 or wider; the first one is written, not added to zeros."""
    if total is None or more is None:
        return total if more is None else more.to(torch.promote_types(more.dtype, torch.float32), copy=True)
    return total.add_(more)
