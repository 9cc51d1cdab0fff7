"""`shard` of a run file, before any process starts: the layout that this model and machine allow."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from lengthwise.comm import world_from_environment
from lengthwise.cost import check_host
from lengthwise.engine.shortage import free_bytes
from lengthwise.profiler.place import device_bytes
from lengthwise.run.checks import check_room
from lengthwise.run.job import Job
from lengthwise.setup import Machine, resolve


def settle_shard(job: Job) -> Job:
    """Return the job with a layout where its file leaves it open, and the reason among what was chosen. Idempotent.

    Raises:
        MemoryShortage: the model fits under no layout.
        ConfigError: rank 0 cannot read it whole; or nodes do not divide the ranks.
    """
    config, here = job.config, _ranks_here(job)
    if job.memory.offloads:
        check_host(job.memory, here, free_bytes(torch.device("cpu"), 1), key="optimizer.offload")
    is_open, known = config.shard == "auto" and config.stages == 1, dict[str, Any]()
    if is_open:
        known = {"room_bytes": _bytes_of_a_rank(job), "longest": job.longest_tokens, "batch": job.most_tokens}
        known["lengths"] = job.first_lengths if job.gpus else None
    machine = Machine(ranks=job.ranks, here=here, on_gpus=job.gpus > 0)
    found = resolve(config, job.trained_model, machine, job.cost, **known)
    if is_open and found.settings.shard == "zero1" and job.gpus and job.model.weights:
        check_room(job.model, job.facts.parameters)
    # Of a layout that was asked for, the session says what there is to say.
    chosen = {**job.chosen, "shard": found.why} if is_open and found.why else job.chosen
    return replace(job, config=found.settings, chosen=chosen)


def _ranks_here(job: Job) -> int:
    world = world_from_environment()
    return job.ranks if world is None else world.local_size


def _bytes_of_a_rank(job: Job) -> float | None:
    """Return the memory for a rank: of its GPU all, without one its share of what is free here; None: not known."""
    here = _ranks_here(job)
    if not job.gpus:
        return free_bytes(torch.device("cpu"), here) or None
    found = device_bytes()
    return None if found is None else found / -(-here // job.gpus)
