"""The opening of a session, in a user's loop as in `lengthwise train`: check, lay the model out, measure, plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lengthwise.comm import Transport, broadcast_bytes, from_first, on_first_rank, raise_together
from lengthwise.core.errors import Collector, ModelRefused
from lengthwise.core.names import counted
from lengthwise.cost import Cost, check_host
from lengthwise.engine.optimizer import SlicedOptimizer
from lengthwise.engine.parameters import lay_parameters
from lengthwise.engine.placing import share_values
from lengthwise.engine.shortage import SMALLER_STATE, free_bytes, reporting_shortage
from lengthwise.engine.slices import Sharding
from lengthwise.engine.stage_messages import Pipeline
from lengthwise.models import ModelStage, choose_layers, left_alone, whole_model
from lengthwise.models.own_rows import OwnRows
from lengthwise.models.weights import first_names, is_finite
from lengthwise.session.capacity import capacities_sentence, least
from lengthwise.session.engine import Engine, engine_of
from lengthwise.session.longest import check_longest
from lengthwise.session.model import towers_sentence
from lengthwise.session.planning import SessionPlanning
from lengthwise.session.ranks import SessionRanks, join_ranks
from lengthwise.session.settings import SessionSettings, check_settings, cost_of, planning_of
from lengthwise.session.stages import cut_stages, join_stages
from lengthwise.session.user_loop import slices_of
from lengthwise.setup import Machine, lengths_of_a_batch, memory_of_settings, resolve
from lengthwise.simulator import MODEL_ERROR

UNMEASURED_TOKENS = 4096  # assumed capacity of a rank where it is needed before it is measured


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """An open session. settings: settings with the chosen layout. optimizer: one on slices, None if nothing trains."""

    settings: SessionSettings
    ranks: SessionRanks
    engine: Engine
    optimizer: SlicedOptimizer | None
    planning: SessionPlanning


def open_session(
    model: Any,
    optimizer: Any,
    given: Mapping[str, Any],
    *,
    seed: int,
    timeout_seconds: float,
    lengths: Sequence[int],
    batch_tokens: int | None,
    ranks: SessionRanks | None,
    closing: ExitStack,
) -> Opened:
    """Open a session with the arguments of `Session`. Collective. closing: stack that runs when the session ends."""
    known: dict[str, Any] = {"lengths": lengths, "batch_tokens": batch_tokens}
    settings = check_settings(model, optimizer, given, seed=seed, timeout_seconds=timeout_seconds, **known)
    ranks = ranks or join_ranks(settings.device, timeout_seconds, closing)
    cost = _cost(settings, ranks)
    settings = with_layout(settings, ranks, cost)
    settings, rows = _read(settings, ranks)
    _refuse_not_finite(settings.model, ranks.transport)
    _check_host_optimizer(settings, ranks)
    with reporting_shortage(
        lambda: f"rank {ranks.transport.rank}, start",
        needs=lambda: "the model, its gradients and its optimizer",
        remedy=SMALLER_STATE,
    ):
        engine, updates = _lay(settings, ranks, cost, rows, closing)
    if ranks.is_run:  # which says which kernel computes
        engine.kernel(engine.dtype, None if ranks.transport.rank else ranks.say)
    planning = planning_of(engine, updates, cost, settings, takes_any_loss=not ranks.is_run)
    if ranks.is_run and not ranks.transport.rank and planning.ahead.measured is not None:
        ranks.say(f"capacity of a rank: {capacities_sentence(planning.ahead.measured, settings.batch_tokens)}")
    end_bytes = 0.0 if updates is None else updates.pending_bytes()[1]
    check_longest(engine, settings, planning.ahead, max(lengths, default=0), end_bytes=end_bytes)
    engine.start_offloading()
    if ranks.planner is not None:
        engine.planner = planning.start(ranks.planner)
    return Opened(settings=settings, ranks=ranks, engine=engine, optimizer=updates, planning=planning)


def _cost(settings: SessionSettings, ranks: SessionRanks) -> Cost:
    """Return the costs of this rank; rank 0 says if they are another device's. Collective."""
    problems, transport = Collector(), ranks.transport
    found = problems.attempt(lambda: cost_of(settings, transport.world_size))
    raise_together(transport, problems.problems)
    assert found is not None, "else there are problems"
    cost, note = found
    if note is not None and not transport.rank:
        ranks.say(note)
    return cost


def with_layout(settings: SessionSettings, ranks: SessionRanks, cost: Cost) -> SessionSettings:
    """Add a layout to settings: the one asked for, or the fastest that fits. Collective.

    Rank 0 decides, by its costs. The bytes that model and optimizer hold already count as free, because they move.

    Raises:
        ConfigError: the number of ranks is not a multiple of the ranks per node.
        MemoryShortage: the model fits in no layout.
    """
    transport, lengths = ranks.transport, settings.lengths
    least_here, most_here = least(transport, [ranks.local_ranks, -ranks.local_ranks])
    number = transport.world_size
    here = int(least_here) if least_here == -most_here else number  # unequal machines make no nodes
    known: dict[str, Any] = {}
    if settings.asked.shard == "auto" and settings.asked.stages == 1:
        (room,) = least(transport, [free_bytes(settings.device, transport.device_ranks) + _held_bytes(settings)])
        known = {"room_bytes": room or None}
    if lengths:
        known |= {"longest": max(lengths), "batch": settings.batch_tokens}
    if sum(lengths) >= settings.batch_tokens:  # of a stream only the longest row is known
        known["lengths"] = lengths_of_a_batch(lengths, settings.batch_tokens)
    margin = MODEL_ERROR if settings.stored is None else 0.0  # a loop that reads the model prefers whole values
    machine = Machine(ranks=number, here=here, on_gpus=settings.on_gpus)

    def layout() -> dict[str, Any]:
        found = resolve(settings.asked, settings.trained, machine, cost, margin=margin, **known)
        if found.why:
            ranks.say(found.why)
        return {"shard": found.settings.shard, "ranks_per_node": found.settings.ranks_per_node}

    return replace(settings, asked=settings.asked.model_copy(update=from_first(transport, layout)))


def _held_bytes(settings: SessionSettings) -> int:
    """Return the bytes that a loop's model and its optimizer hold on the device where steps run."""
    states = settings.optimizer.state.values() if isinstance(settings.optimizer, Optimizer) else ()
    held = [*settings.text.parameters(), *(each for part in states for each in part.values())]
    device = settings.device.type
    return sum(each.nbytes for each in held if isinstance(each, Tensor) and each.device.type == device)


def _read(settings: SessionSettings, ranks: SessionRanks) -> tuple[SessionSettings, OwnRows | None]:
    """Read a stored model; return settings with it, and the source of this rank's own rows, None if it reads none."""
    if settings.stored is None:
        return settings, None
    transport, stages = ranks.transport, settings.asked.stages
    transport.phase = "start, loading the model"
    is_cut = settings.asked.layout(transport.world_size) != "zero1" or stages > 1
    if not is_cut:  # else every rank may read its own rows
        on_first_rank(transport, settings.stored.check_room)
    model, rows = settings.stored.read(settings.text, transport, is_cut=is_cut, stages=stages)
    if settings.stored.sees:  # the run's dtype if it has the values of the towers, which are saved as they were
        towers, narrow, wide = left_alone(model).values(), settings.stored.dtype, settings.stored.source.dtype
        is_exact = from_first(transport, lambda: all(torch.equal(each.to(narrow).to(each), each) for each in towers))
        dtype = narrow if is_exact else wide
        share_values(whole_model(model), transport, towers, dtype=dtype, device=settings.device)
    return replace(settings, model=model, text=model), rows


def _lay(
    settings: SessionSettings, ranks: SessionRanks, cost: Cost, rows: OwnRows | None, closing: ExitStack
) -> tuple[Engine, SlicedOptimizer | None]:
    """Make the engine, and lay the parameters of the model, or of its stage, over the ranks. Collective."""
    asked, transport, text = settings.asked, ranks.transport, settings.text
    say = None if transport.rank else ranks.say
    if say is not None and settings.trains and (towers := towers_sentence(text)):
        say(towers)
    computing, device, dtype = settings.computing, settings.device, settings.dtype
    engine = engine_of(
        text,
        transport,
        chunked=settings.trained.chunked,
        timeout_seconds=settings.timeout_seconds,
        computing=computing,
        device=device,
        dtype=dtype,
        autocast=settings.autocast,
        seed=settings.seed,
        offload=asked.offload,
        layers=choose_layers(text, computing, device, transport, dtype=dtype, say=say, wrap=settings.model),
    )
    closing.callback(engine.close)
    overlaps, in_step = asked.overlaps(on_gpus=settings.on_gpus), asked.ranks_in_step(transport.world_size)
    if not settings.trains and in_step == asked.stages == 1:
        share_values(text, transport, text.parameters(), dtype=None, device=device)
        return engine, None
    rank, stage, on_slices = transport.rank, None, slices_of(settings, closing)  # which names all parameters
    if asked.stages > 1:
        engine.pipeline = pipeline = _take_stage(settings, ranks, cost, rows)
        assert engine.layers is not None, "chosen before"
        engine.layers, rank, rows = engine.layers.kept(), pipeline.mesh.replica, None  # a stage has read its own
        stage, in_step = (pipeline.mesh, pipeline.stage), 1
    sharding = Sharding(
        dtype=dtype,
        device=device,
        ranks_in_step=in_step,
        overlaps=overlaps,
        values_late=overlaps and settings.stored is not None,
        keeps_dtypes=settings.stored is None,
        trains=settings.trains,
        exact_on=torch.device("cpu") if settings.trained.offloads else None,
        casts_to=settings.autocast,
    )
    engine.parameters = parameters = lay_parameters(text, transport, sharding, stage=stage, rows=rows)
    return engine, None if on_slices is None else on_slices(parameters, rank)


def _take_stage(settings: SessionSettings, ranks: SessionRanks, cost: Cost, rows: OwnRows | None) -> Pipeline:
    """Reduce the model to this rank's stage, with the values of the first replica. Collective.

    Measured costs decide where layers are cut, or FLOPs.
    """
    asked, transport, text = settings.asked, ranks.transport, settings.text
    mesh = join_stages(text, transport, asked.stages, reads=rows is not None)
    capacity = settings.capacity_tokens or UNMEASURED_TOKENS
    measured = cost if asked.measurements else None
    lengths = settings.lengths or [capacity]
    chunks = cut_stages(mesh.world, text.config, asked.cut.chunks, lengths, capacity=capacity, cost=measured)
    stage = ModelStage(text, chunks, stages=mesh.stages, stage=mesh.stage)
    if rows is not None and mesh.replica == 0:
        stage.read_weights(rows)
    if not transport.rank:
        of_stage = [chunks[each :: asked.stages] for each in range(asked.stages)]
        cut = " | ".join(", ".join(map(_written, each)) for each in of_stage)
        ranks.say(f"stages: {asked.stages} with {counted(mesh.num_replicas, 'rank')} a stage, of layers {cut}")
    return Pipeline(stage=stage, mesh=mesh, cut=asked.cut)


def _written(layers: range) -> str:
    return f"{layers.start}" if len(layers) == 1 else f"{layers.start} to {layers.stop - 1}"


def _refuse_not_finite(model: nn.Module, transport: Transport) -> None:
    """Refuse a model with NaN or infinity on rank 0, whose values all ranks get. Collective."""
    given = () if transport.rank else model.named_parameters()
    wrong = [name for name, each in given if not each.is_meta and not is_finite(each)]
    found = broadcast_bytes(transport, None if transport.rank else first_names(wrong).encode()).decode()
    if found:
        where, got = f"model {type(model).__name__}", f"NaN or infinity in {found}"
        remedy = "Load the model again, or take an earlier checkpoint."
        raise ModelRefused(where, expected="finite parameters", got=got, remedy=remedy)


def _check_host_optimizer(settings: SessionSettings, ranks: SessionRanks) -> None:
    """Refuse an offloaded optimizer that does not fit into host memory; report if it saves nothing. Collective."""
    transport, key = ranks.transport, "offload_optimizer" if settings.stored is None else "optimizer.offload"
    if settings.trained.offloads and settings.on_gpus:
        free, fewest = least(transport, [free_bytes(torch.device("cpu"), 1), -ranks.local_ranks])
        memory = memory_of_settings(settings.asked, settings.trained, ranks=transport.world_size, on_gpus=True)
        check_host(memory, int(-fewest), free, key=key)
    elif settings.trained.offloads and not transport.rank:
        ranks.say("offloading the optimizer saves no memory without GPUs: everything is in host memory anyway")
