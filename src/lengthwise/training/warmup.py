"""The largest microbatch, run once before the first step, so that too little memory shows at once and not hours in.

Each rank runs it alone, as a pack that needs no transfers: no two ranks can miss each other. A ring's shard of as many
tokens holds a little more, keys, values and gradients of the layer under way, and fragmentation comes with time: this
finds what cannot work, and does not prove that all will.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

from torch import nn

from lengthwise.attention import BlockKernel
from lengthwise.comm import SoloTransport, Transport
from lengthwise.core.plan import Microbatch, Piece, Plan
from lengthwise.engine.batch import random_batch
from lengthwise.engine.memory import SMALLER_STATE, memory_in_use, reporting_shortage
from lengthwise.engine.optimizer import ShardedAdamW
from lengthwise.engine.parameters import Parameters
from lengthwise.engine.step import run_plan
from lengthwise.training.job import Job


def check_memory(model: nn.Module, parameters: Parameters, job: Job, kernel: BlockKernel) -> str:
    """Run the largest local microbatch forward and backward and discard its gradients; say what was found.

    Raises:
        MemoryShortage: it does not fit.
    """
    lengths, kind = largest_pack(job), max(job.capacities, key=lambda each: job.capacities[each])
    piece = Piece(ranks=(0,), sequences=tuple(range(len(lengths))))
    plan = Plan(
        ranks=1,
        layers=job.model.config.num_hidden_layers,
        capacity=sum(lengths),
        tokens=lengths,
        microbatches=(Microbatch(pieces=(piece,), recompute=kind),),
    )
    batch = random_batch(lengths, vocab=job.model.config.vocab_size)
    name, at_once = "memory check before the first step", job.logits_at_once
    run_plan(model, plan, batch, SoloTransport(), kernel, name=name, logits_at_once=at_once)
    parameters.clear_gradients()
    return f"memory check: the largest microbatch, {sum(lengths)} tokens, ran{memory_in_use()}"


def check_step_end(optimizer: ShardedAdamW, transport: Transport) -> None:
    """Run the end of a step that changes nothing, as all ranks do at once. Collective.

    Raises:
        MemoryShortage: it does not fit.
    """
    transport.phase = "memory check before the first step, step end"
    with reporting_update(transport):
        optimizer.rehearse()


def reporting_update(transport: Transport) -> AbstractContextManager[None]:
    """Raise MemoryShortage where the end of a step inside the block runs out of device memory."""
    return reporting_shortage(
        lambda: f"rank {transport.rank}, {transport.phase}",
        needs=lambda: "the sum of gradients and the update",
        remedy=SMALLER_STATE,
    )


def largest_pack(job: Job) -> tuple[int, ...]:
    """Return the lengths of the most tokens that one rank can hold in one microbatch of this run.

    As many as the capacity, or as the largest global batch that the data can make, in documents of the longest length.
    """
    total = min(max(job.capacities.values()), job.most_tokens)
    longest = min(int(job.dataset.lengths[job.dataset.ids].max()), total)
    return (longest,) * (total // longest) + ((total % longest,) if total % longest else ())
