"""`lengthwise profile` as a function: start the ranks, or use torchrun's, and measure."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from lengthwise.comm import World, world_from_environment
from lengthwise.core.errors import Collector, ConfigError
from lengthwise.core.measurements import Measurements
from lengthwise.models import ModelSource, check_model_config, count_parameters, find_model
from lengthwise.profiler.rank_profiler import ProfileSettings, open_store, profile
from lengthwise.run.launch import on_ranks, threads_of_each
from lengthwise.run.prepared_run import count_used_gpus, join_with, quiet_libraries

_TIMEOUT_SECONDS = 600.0


def profile_model(
    model: str, settings: ProfileSettings, *, ranks: int | None = None, device: str = "auto", disk: Path | None = None
) -> Measurements | None:
    """Measure a model on this machine, or on all machines of torchrun, where ranks other than 0 return None.

    Args:
        model: `tiny`, a local Hugging Face folder or a hub name; weights are drawn, not loaded.
        settings: see `ProfileSettings`.
        ranks: number of processes. If None, one per GPU; without GPUs two, or one on a single core.
        device: auto, cpu or cuda, as in a run file.
        disk: folder on a disk for offloaded activations. If None, host memory on GPUs, and no offloading on the CPU.

    Raises:
        LengthwiseError: the model is missing or cannot be trained, or a rank was lost.
    """
    quiet_libraries()
    problems = Collector()
    problems.attempt(world_from_environment)
    gpus = problems.attempt(lambda: count_used_gpus(device))
    problems.raise_all()
    assert gpus is not None, "a missing device must have been a problem"
    launched = world_from_environment()
    number = launched.world_size if launched else ranks or gpus or min(2, os.cpu_count() or 1)
    _check_clock(settings, threads=threads_of_each(number), gpus=gpus)

    def work(world: World, on_phase: Callable[[str], None]) -> Measurements | None:
        def read() -> ModelSource:
            source = find_model(model, weights="fresh")
            check_model_config(source.config)
            world.claim_device()
            count_parameters(source.config)
            return source

        source, transport = join_with(world, read, timeout_seconds=_TIMEOUT_SECONDS, on_phase=on_phase)
        store = open_store(world.device, disk, where=f"rank {world.rank}")
        found = profile(source, world, transport, settings, store=store)
        if store is not None:
            store.close()
        transport.close()
        return None if world.rank else found

    return on_ranks(work, number, gpus=gpus)


def _check_clock(settings: ProfileSettings, *, threads: int, gpus: int) -> None:
    if settings.clock == "cpu" and (gpus or threads > 1):
        got = "GPUs" if gpus else f"{threads} threads a rank"
        remedy = "Give as many {ranks} as there are cores, or {clock} wall."
        raise ConfigError("clock", expected="wall, except on CPU ranks of one thread", got=got, remedy=remedy)
