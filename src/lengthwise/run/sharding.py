"""`shard` of a run file, before any process starts: the layout that this model and machine allow."""

from __future__ import annotations

from dataclasses import replace

import torch

from lengthwise.comm import world_from_environment
from lengthwise.cost import DTYPE_BYTES, StepMemory, check_host, choose_shard_of_run, ranks_of_node, shape_from_config
from lengthwise.engine.memory import free_bytes
from lengthwise.profiler.place import device_bytes
from lengthwise.run.checks import check_room
from lengthwise.run.job import Job
from lengthwise.simulator.layouts import layout_seconds_of_run


def settle_shard(job: Job) -> Job:
    """Return the job with a layout where its file leaves it open, and the reason among what was chosen. Idempotent.

    Raises:
        MemoryShortage: the model fits under no layout.
        ConfigError: rank 0 cannot read it whole; or nodes do not divide the ranks.
    """
    config, model = job.config, job.model
    if config.optimizer.offload and job.gpus:
        free = free_bytes(torch.device("cpu"), 1)
        check_host(_memory(job), _ranks_here(job), free, key="optimizer.offload")
    node = ranks_of_node(config.ranks_per_node, _ranks_here(job), job.ranks, is_asked=config.shard == "hybrid")
    if config.shard == "hybrid":
        if node == job.ranks:
            note = "shard hybrid: all ranks are on one node, where it is zero3"
            job = replace(job, chosen={**job.chosen, "shard": note})
        return replace(job, config=config.model_copy(update={"ranks_per_node": node}))
    if config.shard != "auto" or config.stages > 1:  # stages have zero1 alone
        return job
    memory, room, kinds = _memory(job, node), _bytes_of_a_rank(job), list(job.facts.kinds)
    seconds = None
    if job.gpus:  # on CPUs transfers and computing share cores, which costs do not know
        seconds = layout_seconds_of_run(config, job.first_lengths, job.cost, room, ranks=job.ranks, kinds=kinds)
    choice = choose_shard_of_run(
        config,
        memory,
        room,
        longest=job.longest_tokens,
        batch=job.most_tokens,
        on_gpus=job.gpus > 0,
        kinds=kinds,
        seconds=seconds,
    )
    if choice.shard == "zero1" and job.gpus and model.weights:
        check_room(model, job.facts.parameters)
    within = node if choice.shard == "hybrid" else None
    settled = config.model_copy(update={"shard": choice.shard, "ranks_per_node": within})
    return replace(job, config=settled, chosen={**job.chosen, "shard": f"shard {choice.shard}: {choice.why}"})


def _memory(job: Job, node: int | None = None) -> StepMemory:
    """Return what a step of the job holds, under zero1."""
    config, model = job.config, job.model
    return StepMemory(
        shape=shape_from_config(model.config.to_dict()),
        dtype_bytes=DTYPE_BYTES[job.precision],
        parameters=job.facts.parameters + (job.facts.adapters or 0),
        trained=job.facts.adapters,
        ranks=job.ranks,
        ranks_per_node=node,
        logits_at_once=job.logits_at_once,
        states=len(config.optimizer.states),
        offloads=config.optimizer.offload and job.gpus > 0,
        ties=bool(getattr(model.config, "tie_word_embeddings", False)),
    )


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
