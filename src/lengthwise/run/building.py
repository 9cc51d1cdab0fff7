"""Open a session of a run's model: for `train`, and for `verify`, which thereby tests it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from lengthwise.comm import Transport, World, agree
from lengthwise.engine.optimizer import SlicedOptimizer
from lengthwise.engine.parameters import Parameters
from lengthwise.engine.whole_optimizer import optimizer_of
from lengthwise.models import DTYPES, build_adapted
from lengthwise.models.own_rows import OwnRows, forget_towers, own_rows
from lengthwise.planner.service.process import PlannerProcess
from lengthwise.run.job import Job
from lengthwise.session import Session
from lengthwise.session.settings import SessionSettings
from lengthwise.session.start import Start


def open_session(
    job: Job,
    world: World,
    transport: Transport,
    process: PlannerProcess | None = None,
    *,
    say: Callable[[str], None],
    draws_both: bool = False,
) -> tuple[Session, SlicedOptimizer]:
    """Return a session of the job's model, and the optimizer of its run file. Collective.

    say: called on rank 0 with how the model computes. draws_both: as in `build_adapted`.
    """
    transport.phase = "start, loading the model"
    model, rows = _load(job, transport, draws_both=draws_both)
    whole = optimizer_of(job.config.optimizer, model)

    def on_slices(parameters: Parameters, rank: int) -> SlicedOptimizer:
        optimizer = SlicedOptimizer(whole, parameters, rank, offloads=job.config.optimizer.offload)
        optimizer.make_states()
        return optimizer

    start = Start(
        model=model,
        text=model,
        settings=session_settings(job, world.device),
        cost=job.cost,
        transport=transport,
        local_ranks=world.local_size,
        process=process,
        optimizer=on_slices,
        rows=rows,
        stage_lengths=job.known.lengths[job.known.ids].tolist(),
        stage_cost=job.measured_cost,
        say=say,
    )
    session, optimizer = Session.of(start)
    session.engine.kernel(session.engine.dtype, say)
    return session, optimizer


def session_settings(job: Job, device: torch.device) -> SessionSettings:
    """Return a job's settings as a session takes them."""
    config = job.config
    return SessionSettings(
        asked=config,
        trained=job.trained_model,
        dtype=DTYPES[config.precision],
        device=device,
        computing=job.computing,
        seed=config.seed,
        timeout_seconds=job.timeout_seconds,
        most_tokens=job.most_tokens,
        context_tokens=int(job.known.lengths.max()),
        takes_any_loss=False,
        is_read_between=False,
        keeps_dtypes=False,
    )


def _load(job: Job, transport: Transport, *, draws_both: bool) -> tuple[Any, OwnRows | None]:
    """Return the job's model with the weights that this rank sends to others, and the source of own rows. Collective.

    With zero1 rank 0 alone reads weights; with stages the ranks of the first replica do. If parameters are sharded and
    the files have them one by one, every rank reads its own rows later, from the returned source, and the model is
    empty. Rank 0 alone holds, and saves, towers beside the text part.
    """
    rank, stages = transport.rank, job.config.stages
    build = partial(build_adapted, job.model, job.config.lora, seed=job.config.seed, draws_both=draws_both)
    is_cut = job.shard != "zero1" or stages > 1
    model: Any = build(stored=not is_cut and rank == 0)
    rows = _own_rows(job, model, transport) if is_cut else None
    if is_cut and rows is None and rank < stages:
        model = build(stored=True)
    if stages > 1 and rank:
        forget_towers(model)
    elif rows is not None and not rank:
        rows.read_towers(model)
    return model, rows


def _own_rows(job: Job, model: Any, transport: Transport) -> OwnRows | None:
    """Return the source of every rank's rows, the same on all ranks, or None if rank 0 must read all. Collective."""
    rows = own_rows(job.model, model) if job.config.lora is None else None
    can = torch.tensor([float(rows is None)])
    transport.all_reduce(can)
    if can.item() or rows is None:
        return None
    agree(transport, rows.digest(), "weights of the model")
    return rows
