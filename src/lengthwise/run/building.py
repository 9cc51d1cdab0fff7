"""The ranks of a run, its model and parameters on one; `train` and `verify` begin here: one proves the other."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from lengthwise.comm import Mesh, Transport, World, agree, join
from lengthwise.config import dump_config
from lengthwise.core.names import counted
from lengthwise.engine.parameters import Parameters
from lengthwise.engine.pipeline import Pipeline
from lengthwise.engine.replicated import FlatParameters
from lengthwise.engine.sharded import ShardedParameters
from lengthwise.engine.stage_parameters import StageParameters
from lengthwise.models import DTYPES, ModelStage, build_adapted, compute_so, wrapped_layers
from lengthwise.models.own_rows import OwnRows, forget_towers, own_rows
from lengthwise.run.job import Job
from lengthwise.session.engine import Engine, engine_of
from lengthwise.session.model import towers_sentence
from lengthwise.session.source import StepPlanner
from lengthwise.session.stages import cut_stages


def connect(
    world: World, job: Job, on_phase: Callable[[str], None], say: Callable[[str], None] | None = None
) -> Transport:
    """Join the ranks of the run, and check that all of them read the same run file and data.

    `say` is called with the transport, and why.

    Raises:
        RankError: they did not.
    """
    transport = join(world, timeout_seconds=job.timeout_seconds, on_phase=on_phase, say=say)
    if world.world_size == 1:
        return transport
    data = hashlib.sha256(dump_config(job.config).encode())
    for dataset in filter(None, (job.dataset, job.eval_dataset)):
        data.update(dataset.digest())
    agree(transport, data.digest(), "run file and data")
    return transport


def build_trained(
    job: Job, world: World, transport: Transport, *, say: Callable[[str], None] | None = None, draws_both: bool = False
) -> tuple[Any, Parameters]:
    """Build the job's model and take rank 0's parameters and buffers over, which alone reads weights. Collective.

    Where parameters are sharded every rank reads its own rows, where the files have the model's parameters one by one.
    Rank 0 alone holds what a model has beside its text part, and saves it.

    `say` is called with how the model computes. `draws_both`: as for `build_adapted`.
    """
    dtype, overlaps = DTYPES[job.config.precision], job.config.overlaps(on_gpus=world.device.type == "cuda")
    exact_on = torch.device("cpu") if job.config.optimizer.offload else None
    transport.phase = "start, taking the model of rank 0 in"
    build = partial(build_adapted, job.model, job.config.lora, seed=job.config.seed, draws_both=draws_both)
    if job.config.stages > 1:
        return _build_stage(job, world, transport, build, say, exact_on)
    model: Any = build(stored=job.shard == "zero1" and transport.rank == 0)
    rows = None if job.shard == "zero1" else _own_rows(job, model, transport)
    if job.shard != "zero1" and rows is None and transport.rank == 0:
        model = build(stored=True)
    if rows is not None and transport.rank == 0:
        rows.read_towers(model)
    if say is not None and (towers := towers_sentence(model)):
        say(towers)
    compute_so(model, job.computing, world.device, dtype=dtype, say=say)
    layers = wrapped_layers(model)
    if job.shard != "zero1":
        return model, ShardedParameters(
            model,
            transport,
            dtype=dtype,
            device=world.device,
            layers=layers,
            read=None if rows is None else rows.read,
            ranks_per_node=job.config.ranks_in_step(job.ranks),
            exact_on=exact_on,
        )
    parameters = FlatParameters(
        model,
        transport,
        dtype=dtype,
        device=world.device,
        layers=layers,
        overlaps=overlaps,
        values_late=overlaps,
        exact_on=exact_on,
    )
    return model, parameters


def _build_stage(
    job: Job,
    world: World,
    transport: Transport,
    build: Callable[..., Any],
    say: Callable[[str], None] | None,
    exact_on: torch.device | None,
) -> tuple[Any, StageParameters]:
    """Build a stage of the job's model; the ranks of replica 0 read its weights.

    Where the files do not have the model's parameters one by one, they read or draw the whole model.
    """
    config, dtype = job.config, DTYPES[job.config.precision]
    mesh = Mesh(transport, config.stages)
    model = build(stored=False)
    rows = _own_rows(job, model, transport)
    if rows is None and mesh.replica == 0:
        model = build(stored=True)
    if transport.rank:
        forget_towers(model)
    elif rows is not None:
        rows.read_towers(model)
    if say is not None and (towers := towers_sentence(model)):
        say(towers)
    compute_so(model, job.computing, world.device, dtype=dtype, say=say)
    lengths, capacity = job.known.lengths[job.known.ids].tolist(), config.capacity_tokens
    assert isinstance(capacity, int), "stages have a number: `config/together.py`"
    count, cost = config.stages * config.virtual, job.measured_cost
    chunks = cut_stages(mesh.world, job.model.config, count, lengths, capacity=capacity, cost=cost)
    stage = ModelStage(model, chunks, stages=config.stages, stage=mesh.stage)
    if rows is not None and mesh.replica == 0:
        stage.read_weights(rows)
    if say is not None:
        of_stage = [chunks[each :: config.stages] for each in range(config.stages)]
        cut = " | ".join(", ".join(map(_written, each)) for each in of_stage)
        say(f"stages: {config.stages} with {counted(mesh.num_replicas, 'rank')} a stage, of layers {cut}")
    overlaps = job.config.overlaps(on_gpus=world.device.type == "cuda")
    options: dict[str, Any] = {"dtype": dtype, "device": world.device, "exact_on": exact_on}
    return model, StageParameters(stage, mesh, overlaps=overlaps, values_late=overlaps, **options)


def job_engine(
    job: Job, world: World, transport: Transport, planner: StepPlanner | None, model: Any, parameters: Parameters
) -> Engine:
    """Return what runs the steps of this job with a model that was built for it."""
    return engine_of(
        model,
        transport,
        chunked=job.config.loss == "chunked",
        planner=planner,
        timeout_seconds=job.timeout_seconds,
        computing=job.computing,
        device=world.device,
        dtype=DTYPES[job.config.precision],
        seed=job.config.seed,
        offload=job.config.offload,
        parameters=parameters,
        pipeline=Pipeline(stage=parameters.stage, mesh=parameters.mesh, virtual=job.config.virtual)
        if isinstance(parameters, StageParameters)
        else None,
    )


def _written(layers: range) -> str:
    return f"{layers.start}" if len(layers) == 1 else f"{layers.start} to {layers.stop - 1}"


def _own_rows(job: Job, model: Any, transport: Transport) -> OwnRows | None:
    """Return what every rank reads its rows of the model from, the same on all; None: rank 0 reads all. Collective."""
    rows = own_rows(job.model, model) if job.config.lora is None else None
    can = torch.tensor([float(rows is None)])
    transport.all_reduce(can)
    if can.item() or rows is None:
        return None
    agree(transport, rows.digest(), "weights of the model")
    return rows
