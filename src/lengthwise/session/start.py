"""The start of a session: its engine, and what becomes of the loop's model: whole, cut as asked for, or in stages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from math import inf
from typing import Any

import torch
from torch import Tensor, nn

from lengthwise.comm import Transport, broadcast_bytes
from lengthwise.core.errors import ModelRefused
from lengthwise.cost import (
    ZERO3_ALONE,
    Cost,
    LayoutSeconds,
    StepMemory,
    check_host,
    choose_shard,
    ranks_of_node,
    wanted_tokens,
)
from lengthwise.engine.memory import free_bytes
from lengthwise.models import choose_layers, has_own_logits, whole_model
from lengthwise.models.weights import first_names, is_finite
from lengthwise.session.capacity import kinds_of, least
from lengthwise.session.engine import Engine, engine_of
from lengthwise.session.parameters import take_over
from lengthwise.session.settings import SessionSettings, session_memory
from lengthwise.session.sharded import ShardedInPlace
from lengthwise.session.stages import join_stages, take_stage
from lengthwise.setup import offload_of
from lengthwise.simulator import MODEL_ERROR
from lengthwise.simulator.layouts import layout_seconds, usual_lengths


def start_engine(
    model: Any, transport: Transport, settings: SessionSettings, *, seed: int, timeout_seconds: float
) -> Engine:
    """Return what runs the steps of a Hugging Face model, which computes as asked in them alone."""
    computing, say = settings.computing, None if transport.rank else _say
    return engine_of(
        model,
        transport,
        chunked=not has_own_logits(model),
        planner=None,
        timeout_seconds=timeout_seconds,
        computing=computing,
        device=settings.device,
        dtype=settings.dtype,
        autocast=settings.autocast,
        seed=seed,
        offload=settings.offload,
        layers=choose_layers(model, computing, settings.device, dtype=settings.dtype, say=say),
    )


def _say(choice: str) -> None:
    print(f"lengthwise: {choice}", flush=True)


def take_model(
    model: nn.Module, engine: Engine, settings: SessionSettings, cost: Cost, *, local_ranks: int, closing: ExitStack
) -> tuple[str, ShardedInPlace | None]:
    """Give the engine the model's parameters; return how they lie over the ranks, and their optimizer. Collective.

    local_ranks: of this machine. closing: what ends with the session.
    """
    transport, optimizer, asked = engine.transport, settings.optimizer, settings.asked
    options: dict[str, Any] = {"dtype": settings.dtype, "device": settings.device, "closing": closing}
    options |= {
        "offloads": settings.offloads_optimizer,
        "overlaps": asked.overlaps(on_gpus=settings.device.type == "cuda"),
    }
    _refuse_not_finite(model, transport)
    check_host_optimizer(engine.model, transport, settings, local_ranks)
    if optimizer is not None and asked.stages > 1:
        mesh, tokens = join_stages(engine.model, transport, asked.stages), settings.capacity_tokens or 1
        options |= {"virtual": asked.virtual, "tokens": tokens, "cost": cost if asked.measurements else None}
        engine.pipeline, engine.parameters, sharded = take_stage(model, engine.model, optimizer, mesh, **options)
        assert engine.layers is not None, "chosen at the start"
        engine.layers = engine.layers.kept()
        return "zero1", sharded
    shard, in_step = shard_of(engine.model, transport, settings, cost, local_ranks=local_ranks)
    options |= {"shard": shard, "ranks_in_step": in_step}
    engine.parameters, sharded = take_over(model, engine.model, optimizer, transport, **options)
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


def shard_of(
    model: nn.Module, transport: Transport, settings: SessionSettings, cost: Cost, *, local_ranks: int
) -> tuple[str, int]:
    """Return how the parameters of a model lie over the ranks, and how many neighbouring ranks share them. Collective.

    As asked for, or the fastest for which there is room, by `cost`. What model and optimizer hold already counts as
    free: it moves. Rank 0 says why, where parameters are cut. local_ranks: of this machine, which are a node where
    nothing else was asked for.

    Raises:
        ConfigError: nodes do not divide the ranks.
        MemoryShortage: the model fits in no way.
    """
    ranks, shard = transport.world_size, settings.asked.shard
    least_here, most_here = least(transport, [local_ranks, -local_ranks])  # the same on all ranks, or no node
    here = int(least_here) if least_here == -most_here else ranks
    node = ranks_of_node(settings.asked.ranks_per_node, here, ranks, is_asked=shard == "hybrid")
    within = {"zero1": 1, "zero3": ranks, "hybrid": node or ranks}
    if shard == "auto" and ranks > 1:
        shard = _chosen(model, transport, settings, _memory(model, settings, ranks, node), cost)
    if ranks == 1:
        if shard == "zero3":
            print(f"lengthwise: {ZERO3_ALONE}", flush=True)
        return "zero1", 1
    if shard == "hybrid" and node == ranks:
        if not transport.rank:
            print("lengthwise: shard hybrid: all ranks are on one node, where it is zero3", flush=True)
        shard = "zero3"
    return shard, within[shard]


def check_host_optimizer(model: nn.Module, transport: Transport, settings: SessionSettings, local_ranks: int) -> None:
    """Refuse an offloaded optimizer that is more than hosts have free; rank 0 says where it saves nothing. Collective.

    local_ranks: of this machine.

    Raises:
        MemoryShortage: it is more.
    """
    if settings.offloads_optimizer and settings.device.type == "cuda":
        free, fewest = least(transport, [free_bytes(torch.device("cpu"), 1), -local_ranks])
        memory = _memory(model, settings, transport.world_size)
        check_host(memory, int(-fewest), free, key="offload_optimizer")
    elif settings.offloads_optimizer and not transport.rank:
        print("lengthwise: offload_optimizer saves no memory without GPUs", flush=True)


def _memory(model: nn.Module, settings: SessionSettings, ranks: int, node: int | None = None) -> StepMemory:
    """Return what a step of the model holds, under zero1."""
    parameters = list(model.parameters())
    widths = Counter[int]()
    for parameter in parameters:
        widths[parameter.element_size()] += parameter.numel()
    trains = settings.optimizer is not None
    return session_memory(
        whole_model(model).config,
        settings,
        ranks=ranks,
        ranks_per_node=node,
        parameters=sum(widths.values()),
        trained=sum(each.numel() for each in parameters if each.requires_grad) if trains else 0,
        dtype_bytes=widths.most_common(1)[0][0],
        chunked=not has_own_logits(model),
    )


def _chosen(model: nn.Module, transport: Transport, settings: SessionSettings, memory: StepMemory, cost: Cost) -> str:
    """Return the fastest layout that what is free allows, and say why. Collective."""
    device, optimizer = settings.device, settings.optimizer
    states = () if optimizer is None else optimizer.state.values()
    held = [*model.parameters(), *(each for part in states for each in part.values())]
    own = sum(each.nbytes for each in held if isinstance(each, Tensor) and each.device.type == device.type)
    (free,) = least(transport, [free_bytes(device, transport.device_ranks) + own])
    kinds = kinds_of(whole_model(model).config, settings.recompute)
    choice = choose_shard(
        memory,
        free or None,
        tokens=settings.capacity_tokens or wanted_tokens(transport.world_size),
        kinds=kinds,
        offload=0.0 if settings.offload is None else 1.0,
        keeps_whole=settings.asked.keeps_whole,
        can_offload=optimizer is not None and device.type == "cuda",
        seconds=_layout_seconds(transport, settings, cost, free, kinds),
        margin=MODEL_ERROR,  # a loop that reads the model between steps is worth more than what costs cannot tell
    )
    if choice.shard != "zero1" and not transport.rank:
        print(f"lengthwise: shard {choice.shard}: {choice.why}", flush=True)
    return choice.shard


def _layout_seconds(
    transport: Transport, settings: SessionSettings, cost: Cost, free: float, kinds: Sequence[str]
) -> LayoutSeconds | None:
    """Return how long a step takes with a layout, by the costs of rank 0, for all. The result is collective, too.

    None: nothing trains, costs know no transfers, or there is no GPU: on CPUs transfers and computing share cores.
    """
    trains = settings.optimizer is not None and settings.device.type == "cuda"
    if not trains or not least(transport, [float(cost.prices_choices and free > 0)])[0]:
        return None
    tokens = settings.capacity_tokens
    of_rank_0 = layout_seconds(
        usual_lengths(transport.world_size, tokens),
        cost,
        free,
        kinds=kinds,
        capacity_tokens=tokens,
        offload=offload_of(settings.offload),
        heads=settings.asked.heads,
    )
    return lambda memory: least(transport, [inf if transport.rank else of_rank_0(memory)])[0]
