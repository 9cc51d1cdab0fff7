"""How a session takes a model over: whole on every rank, or its part on each, with what the optimizer then updates."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from lengthwise.comm import Transport
from lengthwise.engine.parameters import Parameters
from lengthwise.engine.replicated import FlatParameters, share_values
from lengthwise.engine.sharded import ShardedParameters
from lengthwise.models import wrapped_layers
from lengthwise.session.model import hugging_face_model
from lengthwise.session.sharded import ShardedInPlace


def take_over(
    model: nn.Module,
    optimizer: Optimizer | None,
    transport: Transport,
    *,
    shard: str,
    ranks_in_step: int,
    dtype: torch.dtype,
    device: torch.device,
    closing: ExitStack,
    offloads: bool = False,
) -> tuple[Parameters | None, ShardedInPlace | None]:
    """Give all ranks the values of rank 0; return the parameters, if they are cut, and their optimizer. Collective.

    shard, ranks_in_step: as `shard_of` returns them. closing: what ends with the session. offloads: master weights and
    the optimizer's states are on the host.
    """
    inner = hugging_face_model(model)
    updates = None if optimizer is None else ShardedInPlace(optimizer, inner, offloads=offloads)  # reads what there was
    options: dict[str, Any] = {"dtype": dtype, "device": device, "layers": wrapped_layers(inner), "keeps_frozen": True}
    options["exact_on"] = torch.device("cpu") if offloads else None
    parameters: Parameters
    if shard != "zero1":
        parameters = ShardedParameters(
            inner, transport, trains=updates is not None, ranks_per_node=ranks_in_step, **options
        )
    elif updates is None:
        share_values(inner, transport, inner.parameters(), dtype=None, device=device)
        return None, None
    else:
        parameters = flat = FlatParameters(inner, transport, **options)
        hook = inner.register_load_state_dict_post_hook(lambda *_: flat.take_values())
        closing.callback(hook.remove)
    if updates is not None:
        point_at_slices(updates, parameters, transport.rank, (model, inner), closing)
    return parameters, updates


def point_at_slices(
    updates: ShardedInPlace, parameters: Parameters, rank: int, models: Sequence[nn.Module], closing: ExitStack
) -> None:
    """Let the optimizer update slices; the models' own gradients are out of reach."""
    updates.point_at(parameters, rank)
    closing.callback(updates.give_gradients_back)
    closing.callback(updates.optimizer.register_step_pre_hook(lambda *_: updates.before_step()).remove)
    for each in {id(model): model for model in models}.values():
        vars(each)["zero_grad"] = updates.zero_grad
        closing.callback(vars(each).pop, "zero_grad", None)
