"""Parameters in a model: which of them train, rank 0's values on every rank, and uses that are refused."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import NoReturn

import torch
from torch import Tensor, nn

from lengthwise.comm import Transport, agree
from lengthwise.core.errors import ModelRefused
from lengthwise.core.names import counted
from lengthwise.models.modules import replace_parameters
from lengthwise.models.quantized import layers_of, settle
from lengthwise.models.text_part import whole_model


def trainable(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return the trainable parameters by name, tied ones once.

    Raises:
        ModelRefused: there are none.
    """
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    if not named:
        where, expected = f"model {type(model).__name__}", "at least one trainable parameter"
        raise ModelRefused(where, expected=expected, got="none", remedy="Unfreeze the model.")
    return named


def replaced(model: nn.Module, *, expected: int, got: int) -> ModelRefused:
    """Return the error for parameters that were replaced or moved."""
    remedy = "Move, convert, freeze and replace parameters before the first step, not after."
    return ModelRefused(
        f"model {type(model).__name__}",
        expected=f"the {expected} trainable parameters in their places",
        got=f"{got}, some of them elsewhere",
        remedy=remedy,
    )


def refuse_hooks(parameters: Mapping[str, nn.Parameter]) -> None:
    """Refuse gradient hooks of parameters that the model will replace.

    Raises:
        ModelRefused: a parameter has a hook.
    """
    hooked = [n for n, p in parameters.items() if p._backward_hooks or getattr(p, "_post_accumulate_grad_hooks", None)]
    if hooked:
        where, got = f"parameter {hooked[0]}", f"hooks of {counted(len(hooked), 'parameter')}"
        expected = "no gradient hook yet, because the model gets new parameters"
        raise ModelRefused(where, expected=expected, got=got, remedy="Register hooks after making the session.")


def share_values(
    model: nn.Module,
    transport: Transport,
    parameters: Iterable[nn.Parameter],
    *,
    dtype: torch.dtype | None,
    device: torch.device,
) -> None:
    """Copy rank 0's buffers and `parameters` to every rank's device, in `dtype` or their own dtype. Collective.

    parameters: those outside of flat buffers, such as frozen ones. Buffers may be weights that only rank 0 reads.
    Quantized weights stay as they are, and rank 0's scales go with them.
    """
    parameters, quantized = list(parameters), {id(layer.weight) for layer in layers_of(model)}
    if quantized:
        found = settle(model, device, dtype)
        shapes = repr([(each.shape, each.dtype) for each in found]).encode()
        agree(transport, shapes, "quantized weights", "Load the model alike on all ranks.")
        for each in found:
            transport.broadcast(each.view(-1).view(torch.uint8), 0)
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                there = torch.empty_like(buffer, device=device) if buffer.is_meta else buffer.to(device)
                module._buffers[name] = value = there.contiguous()
                if value.numel():
                    transport.broadcast(value.view(-1).view(torch.uint8), 0)
    made: dict[int, nn.Parameter] = {}
    for parameter in parameters:
        if id(parameter) in quantized:
            continue
        if parameter.is_meta:
            value = torch.empty(parameter.shape, dtype=dtype or parameter.dtype, device=device)
        else:
            value = parameter.detach().to(device, dtype or parameter.dtype).contiguous()
        transport.broadcast(value, 0)
        if parameter.is_meta or value.data_ptr() != parameter.data_ptr():  # otherwise a gradient stays
            made[id(parameter)] = as_view(parameter, value)
    replace_parameters(model, made)


def as_view(parameter: nn.Parameter, value: Tensor) -> nn.Parameter:
    """Return the parameter with another value, or a new parameter if it is on the meta device."""
    if parameter.is_meta:
        return nn.Parameter(value, requires_grad=parameter.requires_grad)
    parameter.data, parameter.grad = value, None
    return parameter


def refuse_parts(model: nn.Module, is_whole: Callable[[], bool]) -> None:
    """Make a model with sharded parameters refuse state dicts and copies, except while `is_whole` returns True."""

    def refuse(what: str) -> None:
        if not is_whole():
            where, expected = f"model.{what}", "a model with whole parameters, but they lie over the ranks"
            remedy = "Call session.save or save_pretrained on all ranks; load weights before the session."
            raise ModelRefused(where, expected=expected, got=type(model).__name__, remedy=remedy)

    model.register_state_dict_pre_hook(lambda *_: refuse("state_dict"))
    model.register_load_state_dict_pre_hook(lambda *_: refuse("load_state_dict"))

    def refuse_copy(_protocol: object) -> NoReturn:
        raise pickled(model)

    for each in (model, whole_model(model)):
        vars(each)["__reduce_ex__"] = refuse_copy


def pickled(module: nn.Module) -> ModelRefused:
    """Return the error for pickling a model in a session, as torch.save does, or copying a sharded one."""
    remedy = "Call session.save_pretrained or session.save on all ranks, or make a copy before the session."
    name, expected = type(module).__name__, "no torch.save, and no copy of a sharded model, during a session"
    return ModelRefused(f"model {name}", expected=expected, got="a pickle or a copy", remedy=remedy)
