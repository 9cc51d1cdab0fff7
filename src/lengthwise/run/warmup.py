"""The largest microbatch, run once before the first step, so that too little memory shows at once and not hours in.

Each rank runs it alone, as a pack that needs no transfers: no two ranks can miss each other; then a pack of the most
sequences, and the end of a step. A ring's shard of as many tokens holds a little more, keys, values and gradients of
the layer under way, and fragmentation comes with time: this finds what cannot work, and does not prove that all will.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import nn

from lengthwise.attention import BlockKernel
from lengthwise.comm import SoloTransport, Transport
from lengthwise.core.plan import Microbatch, Piece, Plan
from lengthwise.engine.batch import random_batch
from lengthwise.engine.memory import memory_in_use, reporting_update
from lengthwise.engine.optimizer import ShardedOptimizer
from lengthwise.engine.parameters import Parameters
from lengthwise.engine.step import run_plan
from lengthwise.run.job import Job


def check_memory(model: nn.Module, parameters: Parameters, job: Job, kernel: BlockKernel) -> str:
    """Run the largest local microbatches forward and backward and discard their gradients; say what was found.

    Raises:
        MemoryShortage: one does not fit.
    """
    longest, most = largest_pack(job), pack_of_most(job)
    packs = [longest, *([most] if len(most) > len(longest) else [])]
    for lengths in packs:
        _run_pack(lengths, model, job, kernel)
        parameters.clear_gradients()
    also = f", so did one of {len(most)} sequences" if len(packs) > 1 else ""
    return f"memory check: the largest microbatch, {sum(longest)} tokens, ran{also}{memory_in_use()}"


def _run_pack(lengths: Sequence[int], model: nn.Module, job: Job, kernel: BlockKernel) -> None:
    kind = max(job.capacities, key=lambda each: job.capacities[each])
    piece = Piece(ranks=(0,), sequences=tuple(range(len(lengths))))
    plan = Plan(
        ranks=1,
        layers=job.model.config.num_hidden_layers,
        capacity=sum(lengths),
        tokens=tuple(lengths),
        microbatches=(Microbatch(pieces=(piece,), recompute=kind),),
    )
    batch = random_batch(lengths, vocab=job.model.config.vocab_size)
    name, at_once = "memory check before the first step", job.logits_at_once
    run_plan(model, plan, batch, SoloTransport(), kernel, name=name, logits_at_once=at_once)


def check_step_end(optimizer: ShardedOptimizer, transport: Transport) -> None:
    """Run the end of a step that changes nothing, as all ranks do at once. Collective.

    Raises:
        MemoryShortage: it does not fit.
    """
    transport.phase = "memory check before the first step, step end"
    with reporting_update(transport):
        optimizer.rehearse()


def largest_pack(job: Job) -> tuple[int, ...]:
    """Return the lengths of the most tokens that one rank can hold in one microbatch of this run.

    As many as the capacity, or as the largest global batch that the data can make, in documents of the longest length.
    """
    total = min(max(job.capacities.values()), job.most_tokens)
    longest = min(int(job.dataset.lengths[job.dataset.ids].max()), total)
    return (longest,) * (total // longest) + ((total % longest,) if total % longest else ())


def pack_of_most(job: Job) -> tuple[int, ...]:
    """Return the lengths of the most sequences that one rank can hold in one microbatch of this run, the shortest.

    A varlen kernel's backward pads every sequence to 128 rows of queries, in fp32.
    """
    lengths = np.sort(job.dataset.lengths[job.dataset.ids])[: job.config.global_batch.sequences]
    return tuple(lengths[lengths.cumsum() <= min(max(job.capacities.values()), job.most_tokens)].tolist())
