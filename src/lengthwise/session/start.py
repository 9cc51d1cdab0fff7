"""The start of a session, for a user's loop or a run file: choose the layout, lay the model out, make the engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from lengthwise.comm import Transport, broadcast_bytes, from_first
from lengthwise.core.errors import ModelRefused
from lengthwise.core.names import counted
from lengthwise.cost import Cost, check_host
from lengthwise.engine.optimizer import SlicedOptimizer
from lengthwise.engine.parameters import Parameters, lay_parameters
from lengthwise.engine.placing import share_values
from lengthwise.engine.shortage import SMALLER_STATE, free_bytes, reporting_shortage
from lengthwise.engine.slices import Sharding
from lengthwise.engine.stage_messages import Pipeline
from lengthwise.models import ModelStage, choose_layers
from lengthwise.models.own_rows import OwnRows
from lengthwise.models.weights import first_names, is_finite
from lengthwise.planner.service.process import PlannerProcess
from lengthwise.session.engine import Engine, engine_of
from lengthwise.session.model import towers_sentence
from lengthwise.session.room import least
from lengthwise.session.settings import SessionSettings
from lengthwise.session.stages import cut_stages, join_stages
from lengthwise.setup import Machine, memory_of_settings, resolve
from lengthwise.simulator import MODEL_ERROR

_UNMEASURED_TOKENS = 4096  # assumed capacity when layers are cut into stages before the capacity is measured
Own = TypeVar("Own", bound=SlicedOptimizer)


@dataclass(frozen=True, slots=True, kw_only=True)
class Start(Generic[Own]):
    """What a session begins with.

    model: the model that is saved. text: its text part, which runs. cost: costs of ranks that have all parameters.
    local_ranks: number of ranks on this machine. process: the planner's process on rank 0; None on other ranks.
    optimizer: makes the optimizer on slices from the parameters and this rank's number among the ranks that share them.
    If None, nothing trains. rows: source from which every rank reads its own weights. If None, rank 0's values count.
    stage_lengths, stage_cost: sequence lengths and costs by which layers are cut into stages; without costs FLOPs
    decide. say: prints a choice; only rank 0 calls it.
    """

    model: nn.Module
    text: Any
    settings: SessionSettings
    cost: Cost
    transport: Transport
    local_ranks: int
    process: PlannerProcess | None
    optimizer: Callable[[Parameters, int], Own] | None
    say: Callable[[str], None]
    rows: OwnRows | None = None
    stage_lengths: Sequence[int] = ()
    stage_cost: Cost | None = None

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0."""
        return not self.transport.rank


def settled(start: Start[Own]) -> Start[Own]:
    """Return the start with its layout settled: the one asked for, or the fastest that fits. Collective.

    Rank 0 decides, by its costs. The bytes that model and optimizer hold already count as free, because they move.

    Raises:
        ConfigError: the number of ranks is not a multiple of the ranks per node.
        MemoryShortage: the model fits in no layout.
    """
    settings, transport = start.settings, start.transport
    ranks, on_gpus = transport.world_size, settings.on_gpus
    least_here, most_here = least(transport, [start.local_ranks, -start.local_ranks])
    here = int(least_here) if least_here == -most_here else ranks  # unequal machines make no nodes
    room = None
    if settings.asked.shard == "auto" and settings.asked.stages == 1:
        (room,) = least(transport, [free_bytes(settings.device, transport.device_ranks) + _held_bytes(start)])
    margin = MODEL_ERROR if settings.is_read_between else 0.0  # a loop that reads the model prefers whole values
    machine = Machine(ranks=ranks, here=here, on_gpus=on_gpus)

    def layout() -> dict[str, Any]:
        found = resolve(settings.asked, settings.trained, machine, start.cost, room_bytes=room or None, margin=margin)
        if found.why:
            start.say(found.why)
        return {"shard": found.settings.shard, "ranks_per_node": found.settings.ranks_per_node}

    asked = settings.asked.model_copy(update=from_first(transport, layout))
    return replace(start, settings=replace(settings, asked=asked))


def _held_bytes(start: Start[Any]) -> int:
    """Return the bytes that a loop's model and its optimizer hold on the device where steps run."""
    optimizer = start.settings.optimizer
    states = () if optimizer is None else optimizer.state.values()
    held = [*start.text.parameters(), *(each for part in states for each in part.values())]
    device = start.settings.device.type
    return sum(each.nbytes for each in held if isinstance(each, Tensor) and each.device.type == device)


def start_engine(start: Start[Own]) -> tuple[Engine, Own | None]:
    """Return the engine of a start whose layout is settled, and the optimizer on slices. Collective."""
    settings, transport, say = start.settings, start.transport, start.say if start.is_first else None
    _refuse_not_finite(start.model, transport)
    _check_host_optimizer(start)
    if start.is_first and start.optimizer is not None and (towers := towers_sentence(start.text)):
        start.say(towers)
    engine = engine_of(
        start.text,
        transport,
        chunked=settings.trained.chunked,
        timeout_seconds=settings.timeout_seconds,
        computing=settings.computing,
        device=settings.device,
        dtype=settings.dtype,
        autocast=settings.autocast,
        seed=settings.seed,
        offload=settings.offload,
        layers=choose_layers(
            start.text, settings.computing, settings.device, dtype=settings.dtype, say=say, wrap=start.model
        ),
    )
    with reporting_shortage(
        lambda: f"rank {transport.rank}, start",
        needs=lambda: "the model, its gradients and its optimizer",
        remedy=SMALLER_STATE,
    ):
        return engine, _take_model(start, engine)


def _take_model(start: Start[Own], engine: Engine) -> Own | None:
    """Give the engine the parameters of the model, or of its stage; return the optimizer on slices. Collective."""
    settings, transport = start.settings, start.transport
    overlaps = settings.asked.overlaps(on_gpus=settings.on_gpus)
    rank, in_step, stage = transport.rank, settings.asked.ranks_in_step(transport.world_size), None
    if start.optimizer is None and in_step == settings.asked.stages == 1:
        share_values(start.text, transport, start.text.parameters(), dtype=None, device=settings.device)
        return None
    if settings.asked.stages > 1:
        engine.pipeline = pipeline = _take_stage(start)
        assert engine.layers is not None, "chosen before"
        engine.layers, rank = engine.layers.kept(), pipeline.mesh.replica
        stage, in_step = (pipeline.mesh, pipeline.stage), 1
    sharding = Sharding(
        dtype=settings.dtype,
        device=settings.device,
        ranks_in_step=in_step,
        overlaps=overlaps,
        values_late=overlaps and not settings.is_read_between,
        keeps_dtypes=settings.keeps_dtypes,
        trains=start.optimizer is not None,
        exact_on=torch.device("cpu") if settings.trained.offloads else None,
    )
    rows = start.rows if stage is None else None  # a stage has read its own
    engine.parameters = parameters = lay_parameters(start.text, transport, sharding, stage=stage, rows=rows)
    return None if start.optimizer is None else start.optimizer(parameters, rank)


def _take_stage(start: Start[Any]) -> Pipeline:
    """Reduce the model to this rank's stage, with the values of the first replica. Collective."""
    asked, transport = start.settings.asked, start.transport
    mesh = join_stages(start.text, transport, asked.stages, reads=start.rows is not None)
    capacity = start.settings.capacity_tokens or _UNMEASURED_TOKENS
    lengths, cost = start.stage_lengths or [capacity], start.stage_cost
    chunks = cut_stages(mesh.world, start.text.config, asked.cut.chunks, lengths, capacity=capacity, cost=cost)
    stage = ModelStage(start.text, chunks, stages=mesh.stages, stage=mesh.stage)
    if start.rows is not None and mesh.replica == 0:
        stage.read_weights(start.rows)
    if start.is_first:
        of_stage = [chunks[each :: asked.stages] for each in range(asked.stages)]
        cut = " | ".join(", ".join(map(_written, each)) for each in of_stage)
        start.say(f"stages: {asked.stages} with {counted(mesh.num_replicas, 'rank')} a stage, of layers {cut}")
    return Pipeline(stage=stage, mesh=mesh, cut=asked.cut)


def _written(layers: range) -> str:
    return f"{layers.start}" if len(layers) == 1 else f"{layers.start} to {layers.stop - 1}"


def _refuse_not_finite(model: nn.Module, transport: Transport) -> None:
    """Refuse a model whose values on rank 0, which all ranks take, have NaN or infinity. Collective.

    Raises:
        ModelRefused: on all ranks, with the names of parameters.
    """
    given = () if transport.rank else model.named_parameters()
    wrong = [name for name, each in given if not each.is_meta and not is_finite(each)]
    found = broadcast_bytes(transport, None if transport.rank else first_names(wrong).encode()).decode()
    if found:
        where, got = f"model {type(model).__name__}", f"NaN or infinity in {found}"
        remedy = "Load the model again, or take an earlier checkpoint."
        raise ModelRefused(where, expected="finite parameters", got=got, remedy=remedy)


def _check_host_optimizer(start: Start[Any]) -> None:
    """Refuse an offloaded optimizer that does not fit into host memory; rank 0 says if it saves nothing. Collective.

    Raises:
        MemoryShortage: it does not fit.
    """
    settings, transport = start.settings, start.transport
    if settings.trained.offloads and settings.on_gpus:
        free, fewest = least(transport, [free_bytes(torch.device("cpu"), 1), -start.local_ranks])
        memory = memory_of_settings(settings.asked, settings.trained, ranks=transport.world_size, on_gpus=True)
        check_host(memory, int(-fewest), free, key="offload_optimizer")
    elif settings.trained.offloads and start.is_first:
        start.say("offloading the optimizer saves no memory without GPUs: everything is in host memory anyway")
