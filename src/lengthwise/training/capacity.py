"""`capacity_tokens: auto`: the tokens that a rank holds in the memory that is free when its model is there.

What a microbatch needs is measured by `engine.activations`, for each kind of recomputation that the run may take; what
is free is asked of the system, and a tenth is left of it. The capacity is the least of all ranks, in steps of 128.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import nn

from lengthwise.attention import BlockKernel
from lengthwise.comm import Transport
from lengthwise.core.errors import DataError, MemoryShortage, ModelRefused
from lengthwise.core.plan import RECOMPUTE_KINDS
from lengthwise.cost import PRECISION_BYTES, RESERVED, loss_bytes, shape_from_config
from lengthwise.engine.activations import MicrobatchBytes, measure_microbatch
from lengthwise.engine.memory import free_bytes
from lengthwise.engine.parameters import Parameters
from lengthwise.models import check_recompute
from lengthwise.report.figures import count
from lengthwise.training.job import Job

_STEP_TOKENS = 128
_MOMENTS = 2  # of AdamW, which the first step makes


def measure_capacities(
    job: Job, model: nn.Module, parameters: Parameters, kernel: BlockKernel, transport: Transport, *, local_ranks: int
) -> dict[str, int]:
    """Return the tokens that a rank holds by kind of recomputation, the same on all ranks. Collective.

    Raises:
        MemoryShortage: not even 128, of any kind.
        DataError: the longest sequence does not fit all ranks together.
    """
    device = next(model.parameters()).device
    moments = _MOMENTS * sum(each.weights.nbytes for each in parameters.shards())
    budget = free_bytes(device, local_ranks) * (1 - RESERVED) - moments
    kinds = _kinds(job)
    found: list[int] = []
    for kind in kinds:
        microbatch = measure_microbatch(model, kernel, kind)
        found.append(_most_tokens(job, microbatch, budget))
    parameters.clear_gradients()
    mine = torch.tensor(found, dtype=torch.float64)
    rows = torch.empty(transport.world_size * len(found), dtype=torch.float64)
    transport.all_gather(rows, mine)
    least = rows.view(-1, len(found)).amin(0).long().tolist()
    capacities = {kind: tokens for kind, tokens in zip(kinds, least, strict=True) if tokens}
    if not capacities:
        got = f"{count(max(0.0, budget))}B free beside the model, its gradients and optimizer, and a tenth left free"
        remedy = "Use more ranks (the optimizer is split over them), a smaller model, recompute: auto, or more memory."
        raise MemoryShortage(
            f"rank {transport.rank}, start", expected=f"room for {_STEP_TOKENS} tokens", got=got, remedy=remedy
        )
    _check_longest(job, capacities)
    return capacities


def told(capacities: Mapping[str, int]) -> str:
    """Say what a rank holds, by kind of recomputation where that makes a difference."""
    if len(set(capacities.values())) == 1:
        return f"{next(iter(capacities.values()))} tokens"
    return ", ".join(f"{tokens} tokens with recompute {kind}" for kind, tokens in capacities.items())


def _kinds(job: Job) -> list[str]:
    if job.config.recompute != "auto":
        return [job.config.recompute]
    kinds = []
    for kind in RECOMPUTE_KINDS:
        try:
            check_recompute(job.model.config, kind)
        except ModelRefused:  # a family whose layers Hugging Face does not wrap
            continue
        kinds.append(kind)
    return kinds


def _most_tokens(job: Job, microbatch: MicrobatchBytes, budget: float) -> int:
    """Return the most tokens that fit, 0 where 128 do not, and at most what a global batch can have."""
    shape, (narrow, wide) = shape_from_config(job.model.config.to_dict()), PRECISION_BYTES[job.config.precision]
    offloads = job.planning.options.offload == "auto" or bool(job.planning.offload_ratio)
    # What offload lets a rank hold beyond the capacity needs its transient bytes all the same.
    stretch = microbatch.layers / 2 if offloads else 1.0

    def needs(tokens: int) -> float:
        more = (stretch - 1) * microbatch.transient_a_row * tokens
        loss = loss_bytes(shape, tokens, narrow=narrow, wide=wide, logits_at_once=job.logits_at_once)
        return max(microbatch.peak(tokens) + more, microbatch.saved(tokens) + loss)

    return _STEP_TOKENS * _largest(lambda steps: needs(steps * _STEP_TOKENS) <= budget, job.most_tokens // _STEP_TOKENS)


def _largest(fits: Callable[[int], bool], most: int) -> int:
    """Return the largest number from 0 to `most` that fits, where all below it do."""
    low, high = 0, max(1, most)
    while low < high:
        middle = -(-(low + high) // 2)
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def _check_longest(job: Job, capacities: dict[str, int]) -> None:
    """Refuse data whose longest sequence no plan holds; say what would make it fit."""
    longest, held = job.longest_tokens, job.with_capacities(capacities).planning.most_held_tokens
    if longest <= held * job.ranks:
        return
    kind = max(capacities, key=lambda each: capacities[each])
    got = f"{longest} tokens; {job.ranks} ranks hold {held} each (measured)"
    remedy = f"Use {-(-longest // held)} ranks"
    remedy += "" if job.config.recompute == "auto" else ", recompute: auto"
    remedy += ", offload" if job.config.offload is None else ""
    remedy += f", or data of at most {held * job.ranks} tokens (too_long: skip). Most is held with recompute: {kind}."
    raise DataError("data", expected="sequences that all ranks together hold", got=got, remedy=remedy)
