"""How a session takes a model over: whole on every rank, or its part on each, with what the optimizer then updates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
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
) -> tuple[Parameters | None, ShardedInPlace | None]:
    """Give all ranks the values of rank 0; return the parameters, if they are cut, and their optimizer. Collective.

    shard, ranks_in_step: as `shard_of` returns them. closing: what ends with the session.
    """
    inner = hugging_face_model(model)
    updates = None if optimizer is None else ShardedInPlace(optimizer, inner)  # reads the parameters that there were
    options: dict[str, Any] = {"dtype": dtype, "device": device, "layers": wrapped_layers(inner), "keeps_frozen": True}
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
    closing.callback(updates.optimizer.register_step_pre_hook(lambda *_: updates.take_changes()).remove)
    for each in {id(model): model for model in models}.values():
        vars(each)["zero_grad"] = _ZeroGrad(each, updates)
        closing.callback(vars(each).pop, "zero_grad", None)


class _ZeroGrad:
    """`zero_grad` of a model in a session; a copy of the model has no part in the session, and clears its own."""

    def __init__(self, model: nn.Module, updates: ShardedInPlace) -> None:
        self._model, self._updates = model, updates

    def __call__(self, set_to_none: bool = True) -> None:
        self._updates.zero_grad(set_to_none)

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., None]:
        return partial(type(self._model).zero_grad, memo.get(id(self._model), self._model))
