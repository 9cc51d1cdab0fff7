"""The start of a session: its engine, and what becomes of the loop's model, whole, cut or in stages."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from torch import nn

from lengthwise.comm import Transport, broadcast_bytes
from lengthwise.core.errors import ModelRefused
from lengthwise.cost import Cost, shape_from_config
from lengthwise.models import Computing, compute_so
from lengthwise.models.weights import first_names, is_finite
from lengthwise.session.engine import Engine
from lengthwise.session.layouts import check_host_optimizer, shard_of
from lengthwise.session.parameters import take_over
from lengthwise.session.settings import SessionSettings
from lengthwise.session.sharded import ShardedInPlace
from lengthwise.session.stages import join_stages, take_stage


def start_engine(
    model: Any, transport: Transport, settings: SessionSettings, *, attention: str, seed: int, timeout_seconds: float
) -> Engine:
    """Return what runs the steps of a Hugging Face model, which computes so from now on."""
    computing = Computing(attention=attention, fused_layers="off")
    compute_so(model, computing, settings.device, dtype=settings.dtype)
    return Engine(
        model=model,
        transport=transport,
        planner=None,
        num_heads=shape_from_config(model.config.to_dict()).heads,
        timeout_seconds=timeout_seconds,
        computing=computing,
        device=settings.device,
        dtype=settings.dtype,
        autocast=settings.autocast,
        seed=seed,
        offload=settings.offload,
    )


def take_model(
    model: nn.Module, engine: Engine, settings: SessionSettings, cost: Cost, *, local_ranks: int, closing: ExitStack
) -> tuple[str, ShardedInPlace | None]:
    """Give the engine the model's parameters; return how they lie over the ranks, and their optimizer. Collective.

    local_ranks: of this machine. closing: what ends with the session.
    """
    transport, optimizer, asked = engine.transport, settings.optimizer, settings.asked
    options: dict[str, Any] = {"dtype": settings.dtype, "device": settings.device, "closing": closing}
    options["offloads"] = settings.offloads_optimizer
    _refuse_not_finite(model, transport)
    check_host_optimizer(engine.model, transport, settings, local_ranks)
    if optimizer is not None and asked.stages > 1:
        mesh, tokens = join_stages(engine.model, transport, asked.stages), settings.capacity_tokens or 1
        options |= {"virtual": asked.virtual, "tokens": tokens, "cost": cost if asked.measurements else None}
        engine.pipeline, engine.parameters, sharded = take_stage(model, optimizer, mesh, **options)
        return "zero1", sharded
    shard, in_step = shard_of(engine.model, transport, settings, cost, local_ranks=local_ranks)
    options |= {"shard": shard, "ranks_in_step": in_step}
    engine.parameters, sharded = take_over(model, optimizer, transport, **options)
    return shard, sharded


def _refuse_not_finite(model: nn.Module, transport: Transport) -> None:
    """Refuse a model whose values, which are those of rank 0, have NaN or infinity in them. Collective.

    Raises:
        ModelRefused: on all ranks, with the names of parameters.
    """
    wrong = [name for name, each in model.named_parameters() if not transport.rank and not is_finite(each)]
    found = broadcast_bytes(transport, None if transport.rank else first_names(wrong).encode()).decode()
    if found:
        where, got = f"model {type(model).__name__}", f"NaN or infinity in {found}"
        remedy = "Load the model again, or take an earlier checkpoint."
        raise ModelRefused(where, expected="finite parameters", got=got, remedy=remedy)
