"""The batch that `verify` runs: the first global batch, or by default a part of it that takes about a minute.

The part has few sequences, with the long ones cut to their last tokens (where a chat has its loss), and a capacity that
makes packs and a ring of them. If the run leaves a choice to the planner, the plan has every option side by side.
The batch depends on the run file, the data and the number of ranks only, so every rank makes the same.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import cycle

import numpy as np

from lengthwise.core.names import counted
from lengthwise.core.plan import RECOMPUTE_KINDS, STRONGER, LayerKinds, Microbatch, Piece, Plan
from lengthwise.core.shape import UNCUT
from lengthwise.cost import Cost
from lengthwise.cost.memory import DTYPE_BYTES, wide_bytes
from lengthwise.data import NO_LOSS, Batches, Dataset
from lengthwise.data.dataset import DatasetBuilder
from lengthwise.data.image_files import ImageFile
from lengthwise.engine.batch import StepBatch
from lengthwise.models import placeholders
from lengthwise.planner import PACKED_DP
from lengthwise.planner.service.step_planning import StepPlanning
from lengthwise.program import check_plan
from lengthwise.run.job import Job
from lengthwise.session.open import UNMEASURED_TOKENS
from lengthwise.setup import memory_of_settings

SECONDS = 60.0  # of a part, about
_SEQUENCES, _LONGEST = 8, 2  # sequences of a part, and the number of long ones among them
_LEAST = 32  # least tokens of a rank in a long sequence, even if slow
_OVERHEAD = 1.3  # seconds of a plan over seconds of evenly split work
_SPLIT, _OFFLOADED = 2, 0.5  # ranks that share heads, and offloaded share, if the planner may choose


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyBatch:
    """A batch to compare, and its plan.

    job: job with the compared rows and layout. changes: differences from the run. seconds, num_bytes: estimates.
    """

    job: Job
    batch: StepBatch
    plan: Plan
    changes: tuple[str, ...]
    seconds: float
    num_bytes: float


def held_before_measuring(job: Job) -> int:
    """Return the capacity of a rank in tokens: the run's, or one with which the longest sequence fits."""
    given, sharing = job.config.capacity_tokens, 1 if job.config.planner == PACKED_DP else job.replicas
    return max(UNMEASURED_TOKENS, -(-job.longest_tokens // sharing)) if given == "auto" else given


def whole_batch(job: Job, planning: StepPlanning, plan: Plan | None = None) -> VerifyBatch:
    """Return the first global batch of the run. plan: plan to use in place of a new one."""
    batch = next(job.batches())
    return _estimated(job, planning.cost, batch, _planned(job, planning, batch.lengths) if plan is None else plan, ())


def _planned(job: Job, planning: StepPlanning, lengths: Sequence[int]) -> Plan:
    plan = planning.plan(lengths)
    job.refuse_plan(plan)
    return plan


def part_of_batch(job: Job, planning: StepPlanning) -> VerifyBatch:
    """Return a part of the first global batch that takes about a minute. planning: planning of the run's steps."""
    first = next(job.batches())
    rows = _few(first)
    lengths = [int(job.dataset.lengths[row]) for row in rows]
    longest, most_tokens, cost = lengths[0], max(planning.capacities.values()), planning.cost
    while longest > _LEAST * job.replicas:
        added = [longest, longest]
        if _seconds(job, cost, [*_cut(lengths, longest, longest // 4), *added]) <= SECONDS:
            break
        longest //= 2
    cuts = job.replicas > 1 and job.config.planner != PACKED_DP
    capacity = min(most_tokens, max(3 * longest // 4, -(-longest // job.replicas) + 1) if cuts else longest)
    is_cut = longest < lengths[0]
    lengths = _cut(lengths, longest, min(longest // 4 if is_cut else longest, capacity // 2))
    lengths = [_fitted(job, row, length) for row, length in zip(rows, lengths, strict=True)]
    least = -(-max(lengths) // job.replicas) + 1 if cuts else max(lengths)
    capacity = min(most_tokens, max(capacity, least))
    options = replace(planning.options, context_tokens=max(lengths))
    narrower = replace(planning, capacities=dict.fromkeys(planning.capacities, capacity), options=options)
    plan = _planned(job, narrower, lengths)
    shown = next((row for row in rows if job.dataset.images(row)), rows[0])
    more = _what_is_missing(job, plan, shown, rows) if cuts else []
    for _, own in more:
        rows, lengths = [*rows, *[shown] * len(own)], [*lengths, *own]
    part = _with_rows(job, rows, lengths, capacity)
    plan, ways = _with_all_ways(part, _extended(plan, more))
    changes = [f"{len(rows)} of {len(first.ids)} sequences"] if len(rows) < len(first.ids) else []
    changes += [f"cut to at most {max(lengths)} tokens"] if is_cut else []
    changes += [f"capacity_tokens {capacity}"] if capacity != most_tokens else []
    changes += [f"{counted(len(more), 'microbatch')} added, to check what this batch does not do"] if more else []
    batch = StepBatch(part.dataset, range(len(rows)), placeholders=placeholders(job.model.config), sees=job.sees)
    return _estimated(part, cost, batch, plan, (*changes, *ways))


def _with_rows(job: Job, rows: Sequence[int], lengths: Sequence[int], capacity: int) -> Job:
    config = job.config.model_copy(update={"capacity_tokens": capacity})
    steps = Batches(_shortened(job, rows, lengths), config)
    return replace(job, config=config, steps=steps, eval_dataset=None)


def _few(batch: StepBatch) -> list[int]:
    """Return rows of a batch: its longest sequences and some others, from long to short."""
    order = sorted(range(len(batch.ids)), key=lambda index: (-batch.lengths[index], index))
    others = order[_LONGEST:]
    places = np.linspace(0, len(others) - 1, min(len(others), _SEQUENCES - _LONGEST)).round().astype(int)
    return [batch.ids[index] for index in [*order[:_LONGEST], *(others[place] for place in places)]]


def _cut(lengths: Sequence[int], longest: int, most: int) -> list[int]:
    return [min(length, longest if place < _LONGEST else max(1, most)) for place, length in enumerate(lengths)]


def _fitted(job: Job, row: int, length: int) -> int:
    """Return the number of tokens of a row that is cut to `length` tokens, more if the cut meets an image."""
    start, stop, _ = _span(job, row, length)
    return stop - start


def _span(job: Job, row: int, length: int) -> tuple[int, int, Sequence[ImageFile]]:
    """Return tokens [start, stop) of a row, and their images: at least `length`, the last with a loss.

    Images stay whole, and the last one stays, so there may be more tokens.
    """
    dataset = job.dataset
    labels = dataset.read(row, 0, int(dataset.lengths[row]))[1]
    kept = np.flatnonzero(labels != NO_LOSS)
    stop = max(length, int(kept[-1]) + 1) if len(kept) else len(labels)
    start, found = stop - length, None if job.sees is None else job.sees.row(dataset, row)
    if found is None:
        return start, stop, ()
    firsts, ends = found.places[[0, *found.ends[:-1]]], found.places[found.ends - 1] + 1
    stop = max([stop, *ends[(firsts < stop) & (ends > stop)].tolist()])
    whole = np.flatnonzero(ends <= stop)
    if len(whole):
        start = min([start, int(firsts[whole[-1]]), *firsts[(firsts < start) & (ends > start)].tolist()])
    images = dataset.images(row)
    return start, stop, [images[place] for place in whole.tolist() if firsts[place] >= start]


def _shortened(job: Job, rows: Sequence[int], lengths: Sequence[int]) -> Dataset:
    """Return rows cut to `lengths` tokens that end with the last loss token."""
    builder, dataset = DatasetBuilder(), job.dataset
    builder.start_source("data", "data", tuple(dataset.name(row) for row in rows))
    for row, length in zip(rows, lengths, strict=True):
        start, stop, images = _span(job, row, length)
        assert stop - start == length, f"row {row}: {length} tokens asked for, and {stop - start}"
        ids, labels = dataset.read(row, start, stop)
        builder.add(ids, labels, dataset.read_weights(row, start, stop), images)
    return builder.finish()


def _what_is_missing(job: Job, plan: Plan, row: int, rows: Sequence[int]) -> list[tuple[Piece, tuple[int, ...]]]:
    """Return pieces of the kinds that a plan lacks, with the lengths of their sequences.

    The kinds are a pack, a ring that passes keys on and, if the planner may choose it, a ring that splits heads; rings
    have images if some rows do. row: the row that they take. rows: those of the plan.
    """
    pieces = [piece for microbatch in plan.microbatches for piece in microbatch.pieces]
    seeing = {number for number, each in enumerate(rows) if job.dataset.images(each)} or range(len(rows))
    rings = [each for each in pieces if any(number in seeing for number in each.sequences)]
    longest, found = plan.tokens[rows.index(row)], list[tuple[Piece, tuple[int, ...]]]()
    if not any(each.degree == 1 and len(each.sequences) > 1 for each in pieces):
        found.append((Piece(ranks=(0,), sequences=()), (_fitted(job, row, max(1, plan.capacity // 2)),) * 2))
    if not any(each.degree > each.heads for each in rings):
        found.append((Piece(ranks=(0, 1), sequences=()), (longest,)))
    may_split = job.config.heads == "auto" and job.trained.shape.heads % _SPLIT == 0
    if may_split and not any(each.heads > 1 for each in rings):
        found.append((Piece(ranks=(0, 1), sequences=(), heads=_SPLIT), (longest,)))
    return [(piece, own) for piece, own in found if sum(own) <= plan.capacity * piece.degree]


def _extended(plan: Plan, more: Sequence[tuple[Piece, tuple[int, ...]]]) -> Plan:
    """Append each piece as a microbatch of its own, with new sequences."""
    tokens, microbatches, requires = list(plan.tokens), list(plan.microbatches), set(plan.requires)
    for piece, own in more:
        sequences = tuple(range(len(tokens), len(tokens) + len(own)))
        microbatches.append(Microbatch(pieces=(replace(piece, sequences=sequences),)))
        tokens += own
        requires |= {"heads"} if piece.heads > 1 else set()
    return replace(plan, tokens=tuple(tokens), microbatches=tuple(microbatches), requires=tuple(sorted(requires)))


def _with_all_ways(job: Job, plan: Plan) -> tuple[Plan, list[str]]:
    """Return the plan with every option that the run leaves to the planner, and the names of the added ones."""
    config, found = job.config, list(plan.microbatches)
    said = list[str]()
    if config.recompute == "auto" and "layer" in job.trained.kinds:
        kinds = [*RECOMPUTE_KINDS, *_mixes(plan)]
        found = [replace(each, recompute=kind) for each, kind in zip(found, cycle(kinds), strict=False)]
        said.append("recompute " + ", ".join(dict.fromkeys(each.recompute for each in found)))
    offload = config.offload
    if offload is not None and offload.ratio == "auto" and not any(each.offload for each in found):
        found[0] = replace(found[0], offload=_OFFLOADED)
        said.append(f"offload {_OFFLOADED:g}")
    changed = replace(plan, microbatches=tuple(found))
    check_plan(changed)
    job.refuse_plan(changed)
    return changed, said


def _mixes(plan: Plan) -> list[str]:
    """List a mix of each pair of kinds with half of the layers each, where the plan may have them."""
    layers, takes_mixes = plan.layers, plan.cut == UNCUT and not any(each.offload for each in plan.microbatches)
    if layers == 1 or not takes_mixes:
        return []
    return [str(LayerKinds(*pair, layers // 2, layers)) for pair in STRONGER.items()]


def _estimated(job: Job, cost: Cost, batch: StepBatch, plan: Plan, changes: tuple[str, ...]) -> VerifyBatch:
    return VerifyBatch(
        job=job,
        batch=batch,
        plan=plan,
        changes=changes,
        seconds=_seconds(job, cost, batch.lengths),
        num_bytes=_bytes(job, plan),
    )


def _seconds(job: Job, cost: Cost, lengths: Sequence[int]) -> float:
    """Estimate the seconds of planned and plain passes; a bf16 model runs in fp32 too."""
    plain = float(sum(cost.piece_seconds([length], 1) + cost.fixed_seconds for length in lengths))
    rounds = job.config.precision == "bf16"
    at_once = job.ranks if job.gpus else min(job.ranks, os.cpu_count() or 1)
    return plain * (1 + 2 * rounds + (1 + rounds) * _OVERHEAD / at_once)


def _bytes(job: Job, plan: Plan) -> float:
    """Estimate the peak bytes on this machine: of all ranks together, or of rank 0 with plain models and gradients."""
    parameters = job.trained.parameters or 0
    narrow = DTYPE_BYTES[job.config.precision]
    wide, rounds = wide_bytes(narrow), job.config.precision == "bf16"
    memory = memory_of_settings(job.config, job.trained, ranks=job.ranks, on_gpus=job.gpus > 0)
    memory = replace(memory, cut=UNCUT)
    layout = {"ranks": plan.ranks, "parameters": parameters, "trained": None, "shard": "zero1", "offloads": False}
    model = replace(memory, states=0, **layout).state_bytes()
    activations = float(memory.microbatch_bytes(plan.capacity))
    plain = parameters * ((wide if rounds else narrow) + (4 + rounds) * wide)
    return max(plan.ranks * (model + activations), model + plain + float(memory.microbatch_bytes(max(plan.tokens))))
