"""The model of a run and its parameters on one rank; `train` and `verify` build it here: one proves the other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lengthwise.comm import Transport, World
from lengthwise.engine.replicated import FlatParameters
from lengthwise.models import DTYPES, build_adapted, compute_so, wrapped_layers
from lengthwise.training.job import Job


def build_trained(
    job: Job,
    world: World,
    transport: Transport,
    *,
    say: Callable[[str], None] | None = None,
    draws_both: bool = False,
) -> tuple[Any, FlatParameters]:
    """Build the job's model and take rank 0's parameters and buffers over, which alone reads weights. Collective.

    `say` hears how the model computes. `draws_both`: as for `build_adapted`.
    """
    dtype, overlap = DTYPES[job.config.precision], job.config.overlap
    transport.phase = "start, taking the model of rank 0 in"
    stored = transport.rank == 0
    model: Any = build_adapted(job.model, job.config.lora, seed=job.config.seed, draws_both=draws_both, stored=stored)
    compute_so(model, job.computing, world.device, dtype=dtype, say=say)
    parameters = FlatParameters(
        model,
        transport,
        dtype=dtype,
        device=world.device,
        layers=wrapped_layers(model),
        overlaps=world.device.type == "cuda" if overlap is None else overlap,
    )
    return model, parameters
