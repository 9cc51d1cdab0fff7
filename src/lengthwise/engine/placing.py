"""Parameters in their places in a model: which train, values of rank 0 on every rank, and what is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import NoReturn

import torch
from torch import Tensor, nn

from lengthwise.comm import Transport
from lengthwise.core.errors import ModelRefused
from lengthwise.models.modules import replace_parameters
from lengthwise.models.text_part import whole_model


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
        expected, got = "no hook of its gradient yet: the model gets new parameters", f"{len(hooked)} with one"
        raise ModelRefused(
            f"parameter {hooked[0]}", expected=expected, got=got, remedy="Register it after the session."
        )


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
            made[id(parameter)] = as_view(parameter, value)
    replace_parameters(model, made)


def as_view(parameter: nn.Parameter, value: Tensor) -> nn.Parameter:
    """Return the parameter with another value; one without storage cannot take it and is made anew."""
    if parameter.is_meta:
        return nn.Parameter(value, requires_grad=parameter.requires_grad)
    parameter.data, parameter.grad = value, None
    return parameter


def refuse_parts(model: nn.Module, is_whole: Callable[[], bool]) -> None:
    """Let a model whose parameters lie over the ranks refuse what goes by whole ones, unless `is_whole` says it is."""

    def refuse(what: str) -> None:
        if not is_whole():
            where, expected = f"model.{what}", "a model with whole parameters: here they lie over the ranks"
            remedy = f"Call the session's {what}, or its save_pretrained, on all ranks; load weights before it."
            raise ModelRefused(where, expected=expected, got=type(model).__name__, remedy=remedy)

    model.register_state_dict_pre_hook(lambda *_: refuse("state_dict"))
    model.register_load_state_dict_pre_hook(lambda *_: refuse("load_state_dict"))

    def refuse_copy(_protocol: object) -> NoReturn:
        raise pickled(model)

    for each in (model, whole_model(model)):
        vars(each)["__reduce_ex__"] = refuse_copy


def pickled(module: nn.Module) -> ModelRefused:
    """Say that a model that ranks train was to be pickled, as torch.save does, and where it is a part, copies do."""
    remedy = "Call session.save_pretrained or session.state_dict on all ranks, or make a copy before the session."
    name = type(module).__name__
    return ModelRefused(f"model {name}", expected="no torch.save, or copy of a rank's part", got="one", remedy=remedy)
