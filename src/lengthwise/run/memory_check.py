"""Memory before the first step of a run: the longest sequence must fit, and the largest microbatch runs once.

Each rank runs it alone, as packs without transfers: the most tokens, then the most sequences; a stage with as many
microbatches as it keeps. No two ranks wait for each other. The end of a step follows. A ring holds a little more of as
many tokens, and fragmentation comes with time: the check finds what cannot work, and does not prove that all will.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from lengthwise.comm import Transport
from lengthwise.core.errors import DataError
from lengthwise.core.names import counted
from lengthwise.engine.batch import random_batch
from lengthwise.engine.optimizer import SlicedOptimizer
from lengthwise.engine.shortage import memory_in_use, reporting_update
from lengthwise.engine.stage_passes import full_pipeline, lone_stage
from lengthwise.engine.step import StepContext, run_part
from lengthwise.offload import LEAVING_BYTES
from lengthwise.planner import PACKED_DP
from lengthwise.planner.service.rank_memory import Capacities
from lengthwise.run.job import Job
from lengthwise.session.engine import Engine
from lengthwise.session.room import Measuring, least, measuring_of


def check_longest(job: Job, engine: Engine, capacities: Capacities, end_bytes: float) -> None:
    """Refuse data whose longest sequence no plan holds, with the settings that would hold it. Collective.

    end_bytes: as of `Measuring`.

    Raises:
        DataError: the longest sequence does not fit all ranks together.
    """
    longest, held = job.longest_tokens, job.with_capacities(capacities).planning.most_held_tokens
    config, cuts = job.config, job.config.planner != PACKED_DP
    sharing = job.replicas if cuts else 1
    if longest <= held * sharing:
        return
    kinds = job.trained.kinds if config.recompute == "auto" else [config.recompute]
    measuring = measuring_of(engine, kinds=kinds, heads=config.heads, most_tokens=job.most_tokens, end_bytes=end_bytes)
    stages = config.stages
    got = f"{longest} tokens; {counted(job.replicas, 'rank' if stages == 1 else 'replica')} of {held} each (measured)"
    shared = "" if job.gpus else " with as much memory each, on further machines: ranks of one share its memory"
    ranks, tokens = f"{-(-longest // held) * stages} ranks{shared}", -(-longest // sharing)
    last = ranks if cuts else "a planner that cuts sequences (lengthwise)"
    remedies = [*_savers(job, measuring, tokens, capacities), *_smaller_loss(job, measuring, tokens), last]
    remedy = f"Use {', or '.join(remedies)}, or data of at most {held * sharing} tokens (too_long: skip)."
    expected = "sequences that all ranks together hold" if cuts else f"sequences that one rank holds, for {PACKED_DP}"
    raise DataError("data", expected=expected, got=got, remedy=remedy)


def _smaller_loss(job: Job, measuring: Measuring, tokens: int) -> list[str]:
    """Name the loss in chunks if it lets a rank hold `tokens` tokens. Collective."""
    if job.config.loss == "chunked":
        return []
    chunked = replace(job, trained=replace(job.trained, chunked=True))
    memory = replace(measuring, logits_at_once=chunked.logits_at_once).memory()
    held = max(least(measuring.engine.transport, [memory.most_tokens(kind, tokens) for kind in memory.layouts]))
    return [f"loss: chunked (a rank then holds {tokens} tokens)"] if held >= tokens else []


def _savers(job: Job, measuring: Measuring, tokens: int, capacities: Capacities) -> list[str]:
    """List the settings of recomputation and of offload that let a rank hold `tokens` tokens. Collective.

    Of the ranks of different stages the fullest counts.
    """
    transport, can_offload = measuring.engine.transport, job.model.text.num_hidden_layers > 2
    leaving = max(LEAVING_BYTES.values()) if can_offload else None  # whatever store it would be
    memory = replace(measuring, kinds=job.trained.kinds, leaving_bytes=leaving).memory()
    others, remedies = [kind for kind in memory.layouts if kind not in capacities.plain], list[str]()
    held = least(transport, [memory.most_tokens(kind, tokens) for kind in others])
    enough = [kind for kind, most in zip(others, held, strict=True) if most >= tokens]
    if enough:
        remedies.append(f"recompute: auto (a rank holds {tokens} tokens with {enough[0]})")
    if can_offload:
        ways = [(ratio, kind) for kind in memory.layouts for ratio in (0.25, 0.5, 0.75, 1.0)]
        held = least(transport, [memory.most_held(kind, ratio, tokens) for ratio, kind in ways])
        fitting = [way for way, most in zip(ways, held, strict=True) if most >= tokens]
        if fitting:
            ratio, kind = min(fitting, key=lambda each: (each[1] not in capacities.plain, each[0]))
            remedies.append(f"offload: with ratio {ratio:g} and recompute: {kind}")
    return remedies


def check_memory(engine: Engine, job: Job) -> str:
    """Run the largest microbatches of this rank forward and backward, discard their gradients, return a report line.

    Raises:
        MemoryShortage: one does not fit.
    """
    longest, most = largest_pack(job), pack_of_most(job)
    packs = [longest, *([most] if len(most) > len(longest) else [])]
    for lengths in packs:
        with engine.attending():
            _run_pack(lengths, engine, job)
        assert engine.parameters is not None, "it trains"
        engine.parameters.clear_gradients()
    also = f", so did one of {len(most)} sequences" if len(packs) > 1 else ""
    kept = " with those that a stage keeps beside it" if job.config.stages > 1 else ""
    return f"memory check: the largest microbatch, {sum(longest)} tokens, ran{kept}{also}{memory_in_use()}"


def _run_pack(lengths: Sequence[int], engine: Engine, job: Job) -> None:
    kind, layers = max(job.capacities, key=lambda each: job.capacities[each]), job.model.text.num_hidden_layers
    plan, part = full_pipeline(lengths, job.config.cut, layers=layers, recompute=kind), engine.part()
    context = StepContext(
        engine.model,
        lone_stage(part["mesh"].stage, job.config.stages),
        engine.kernel(engine.dtype),
        name="memory check before the first step",
        # All stages together count what dropout draws before a chunk, which a lone stage cannot.
        chunks={number: replace(chunk, dropout_calls={}) for number, chunk in part["chunks"].items()},
        logits_at_once=job.logits_at_once,
    )
    run_part(plan, random_batch(plan.tokens, vocab=job.model.text.vocab_size), context)


def check_step_end(optimizer: SlicedOptimizer, transport: Transport) -> None:
    """Run the end of a step without a change, on all ranks at once. Collective.

    Raises:
        MemoryShortage: it does not fit.
    """
    transport.phase = "memory check before the first step, step end"
    with reporting_update(transport), optimizer.rehearsing():
        optimizer.end_step(0.0, transport)


def largest_pack(job: Job) -> tuple[int, ...]:
    """Return lengths of the most tokens that a rank can hold in one microbatch of this run.

    Documents of the longest length, up to the capacity or to the largest global batch that the data can make.
    """
    total = min(max(job.capacities.values()), job.most_tokens)
    longest = min(int(job.known.lengths[job.known.ids].max()), total)
    return (longest,) * (total // longest) + ((total % longest,) if total % longest else ())


def pack_of_most(job: Job) -> tuple[int, ...]:
    """Return lengths of the most sequences that a rank can hold in one microbatch of this run: the shortest ones.

    Kernels need memory for every sequence: in backward a varlen kernel pads it to 128 rows of queries, in fp32.
    """
    lengths = np.sort(job.known.lengths[job.known.ids])[: job.config.global_batch.sequences]
    return tuple(lengths[lengths.cumsum() <= min(max(job.capacities.values()), job.most_tokens)].tolist())
