"""`capacity_tokens: auto`: the tokens that a rank holds in the memory that is free when its model is there.

What a microbatch needs is measured by `engine.activations`, for each kind of recomputation that the run may take, on a
rank alone, over a ring and with heads split; what is free is asked of the system, and a tenth is left of it. The
capacity is the least of all ranks, in steps of 128. Where twice what the largest batch needs without recomputation is
free, no more is measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from lengthwise.attention import BlockKernel
from lengthwise.comm import Transport
from lengthwise.core.errors import DataError, MemoryShortage, ModelRefused
from lengthwise.core.plan import RECOMPUTE_KINDS
from lengthwise.cost import RESERVED, STEP_TOKENS, MicrobatchBytes
from lengthwise.engine.activations import measure_microbatch
from lengthwise.engine.memory import free_bytes
from lengthwise.engine.optimizer import step_end_bytes
from lengthwise.engine.parameters import Parameters
from lengthwise.engine.small_pass import ALONE, Layout, Seen
from lengthwise.models import check_recompute
from lengthwise.offload import LEAVING_BYTES
from lengthwise.planner import PACKED_DP
from lengthwise.report.figures import count
from lengthwise.steps.rank_memory import Capacities, RankMemory
from lengthwise.training.job import Job

_RING_RANKS = 3  # from which on a rank of a ring holds no more: its own keys, those it has, those that arrive
_AMPLE = 2.0  # times what is needed: rings and split heads need less than that more


def measure_capacities(
    job: Job, model: nn.Module, parameters: Parameters, kernel: BlockKernel, transport: Transport, *, local_ranks: int
) -> Capacities:
    """Return the tokens that a rank holds by kind of recomputation, the same on all ranks. Collective.

    Raises:
        MemoryShortage: not even 128, of any kind.
        DataError: the longest sequence does not fit all ranks together.
    """
    device = next(model.parameters()).device
    budget = free_bytes(device, local_ranks) * (1 - RESERVED)
    if step_end_bytes(parameters, job.config.optimizer) > budget:
        budget = 0.0
    planning = job.planning
    measuring = _Measuring(
        job=job,
        model=model,
        kernel=kernel,
        transport=transport,
        budget=_least(transport, [budget])[0],
        asked=job.config.recompute,
        offloads=planning.options.offload == "auto" or bool(planning.offload_ratio),
    )
    memory = measuring.memory()
    parameters.clear_gradients()
    plain, offloading = ({} for _ in range(2))
    ratio = planning.offload_ratio
    for kind in memory.layouts:
        plain[kind] = memory.most_tokens(kind, job.most_tokens, offload=ratio or 0.0)
        offloading[kind] = plain[kind]
        if measuring.offloads and not ratio:
            offloading[kind] = memory.most_tokens(kind, plain[kind], offload=None)
    found = _least(transport, [*plain.values(), *offloading.values()])
    plain, offloading = (
        {kind: int(tokens) for kind, tokens in zip(plain, part, strict=True) if tokens}
        for part in (found[: len(plain)], found[len(plain) :])
    )
    if not plain:
        got = f"{count(max(0.0, budget))}B free beside the model, its gradients and optimizer, and a tenth left free"
        remedy = "Use more ranks (the optimizer is split over them), a smaller model, recompute: auto, or more memory."
        raise MemoryShortage(
            f"rank {transport.rank}, start", expected=f"room for {STEP_TOKENS} tokens", got=got, remedy=remedy
        )
    capacities = Capacities(plain=plain, offloading=offloading, memory=memory)
    _check_longest(measuring, capacities)
    return capacities


def _least(transport: Transport, numbers: Sequence[float]) -> list[float]:
    """Return the least of each number over all ranks. Collective."""
    rows = torch.empty(transport.world_size * len(numbers), dtype=torch.float64)
    transport.all_gather(rows, torch.tensor(numbers, dtype=torch.float64))
    return rows.view(-1, len(numbers)).amin(0).tolist()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Measuring:
    """Measures what microbatches of a run need, all ranks the same: with this recomputation, offloading or not.

    `done`: the passes that were run; copies of this record run them no second time.
    """

    job: Job
    model: nn.Module
    kernel: BlockKernel
    transport: Transport
    budget: float
    asked: str
    offloads: bool
    done: dict[object, Seen] = field(default_factory=dict)

    def memory(self) -> RankMemory:
        """Return what was measured of all kinds of recomputation, over rings, too, which need little more."""
        kinds, offload = _kinds(self.job, self.asked), self.job.config.offload
        first = self._measured(kinds[0], ALONE)
        leaving = 0 if offload is None else LEAVING_BYTES[offload.store]
        ample = RankMemory(
            budget_bytes=self.budget / _AMPLE, layouts=dict.fromkeys(kinds, (first,)), leaving_bytes=leaving
        )
        most = max(STEP_TOKENS, self.job.most_tokens)
        is_ample = ample.peak_bytes(kinds[0], most) <= ample.budget_bytes
        if _least(self.transport, [float(is_ample)])[0]:  # all ranks measure alike: they may gather in their passes
            return RankMemory(budget_bytes=self.budget, layouts=ample.layouts, leaving_bytes=leaving)
        measured = {}
        for kind in kinds:
            cut = [self._measured(kind, layout) for layout in self._rings()]
            measured[kind] = (first if kind == kinds[0] else self._measured(kind, ALONE), *cut)
        return RankMemory(budget_bytes=self.budget, layouts=measured, leaving_bytes=leaving)

    def _rings(self) -> list[Layout]:
        """List how a sequence may lie over several ranks."""
        ranks, heads = self.job.ranks, self.job.planning.options.heads
        degree = min(ranks, _RING_RANKS)
        layouts = [Layout(degree=degree, position=degree - 1)] if ranks > 1 else []
        splits = 2 if heads == "auto" else 1 if heads == "off" else int(heads)
        if 1 < splits <= ranks and self.job.num_heads % splits == 0:
            layouts.append(Layout(degree=splits, position=splits - 1, heads=splits))
        return layouts

    def _measured(self, kind: str, layout: Layout) -> MicrobatchBytes:
        return measure_microbatch(
            self.model,
            self.kernel,
            kind,
            layout=layout,
            logits_at_once=self.job.logits_at_once,
            most_rows=self.job.most_tokens,
            offloads=self.offloads,
            done=self.done,
        )


def told(capacities: Capacities, batch_tokens: int) -> str:
    """Say what a rank holds, by kind of recomputation where that makes a difference, and what that needs.

    `batch_tokens`: the most that a global batch has.
    """
    plain, memory = capacities.plain, capacities.memory
    needs = {kind: memory.peak_bytes(kind, tokens) for kind, tokens in plain.items()}
    if len(set(plain.values())) == 1:
        said = f"{next(iter(plain.values()))} tokens"
    else:
        said = ", ".join(f"{tokens} tokens with recompute {kind}" for kind, tokens in plain.items())
    if min(plain.values()) >= batch_tokens:
        said += ", all of a global batch"
    return f"{said}; at most {count(max(needs.values()))}B of {count(memory.budget_bytes)}B that are free"


def _kinds(job: Job, asked: str) -> list[str]:
    if asked != "auto":
        return [asked]
    kinds = []
    for kind in RECOMPUTE_KINDS:
        try:
            check_recompute(job.model.config, kind)
        except ModelRefused:  # a family whose layers Hugging Face does not wrap
            continue
        kinds.append(kind)
    return kinds


def _check_longest(measuring: _Measuring, capacities: Capacities) -> None:
    """Refuse data whose longest sequence no plan holds; say what would make it fit."""
    job = measuring.job
    longest, held = job.longest_tokens, job.with_capacities(capacities).planning.most_held_tokens
    cuts = job.config.planner != PACKED_DP
    sharing = job.ranks if cuts else 1
    if longest <= held * sharing:
        return
    got = f"{longest} tokens; {job.ranks} ranks hold {held} each (measured)"
    shared = "" if job.gpus else " with as much memory each, on further machines: ranks of one share its memory"
    ranks, tokens = f"{-(-longest // held)} ranks{shared}", -(-longest // sharing)
    last = ranks if cuts else "a planner that cuts sequences (lengthwise)"
    remedies = [*_savers(measuring, tokens, capacities), *_smaller_loss(measuring, tokens), last]
    remedy = f"Use {', or '.join(remedies)}, or data of at most {held * sharing} tokens (too_long: skip)."
    expected = "sequences that all ranks together hold" if cuts else f"sequences that one rank holds, for {PACKED_DP}"
    raise DataError("data", expected=expected, got=got, remedy=remedy)


def _smaller_loss(measuring: _Measuring, tokens: int) -> list[str]:
    """Name the loss in chunks where that lets a rank hold so many tokens, and whole logits do not."""
    config = measuring.job.config
    if config.loss == "chunked":
        return []
    job = replace(measuring.job, config=config.model_copy(update={"loss": "chunked"}))
    memory = replace(measuring, job=job).memory()
    held = max(memory.most_tokens(kind, tokens) for kind in memory.layouts)
    return [f"loss: chunked (a rank then holds {tokens} tokens)"] if held >= tokens else []


def _savers(measuring: _Measuring, tokens: int, capacities: Capacities) -> list[str]:
    """List what of recomputation and offload would let a rank hold so many tokens, each with what it then holds."""
    layers = measuring.job.model.config.num_hidden_layers
    memory, said = replace(measuring, asked="auto", offloads=layers > 2).memory(), list[str]()
    memory = replace(memory, leaving_bytes=max(LEAVING_BYTES.values()))  # to whatever store it would be
    others = [kind for kind in memory.layouts if kind not in capacities.plain]
    by_kind = {kind: memory.most_tokens(kind, tokens) for kind in others}
    enough = [kind for kind, held in by_kind.items() if held >= tokens]
    if enough:
        said.append(f"recompute: auto (a rank holds {tokens} tokens with {enough[0]})")
    if layers > 2:
        ratios = [
            (ratio, kind)
            for kind in memory.layouts
            for ratio in (0.25, 0.5, 0.75, 1.0)
            if memory.most_held(kind, ratio, tokens) >= tokens
        ]
        if ratios:
            ratio, kind = min(ratios, key=lambda each: (each[1] not in capacities.plain, each[0]))
            said.append(f"offload: with ratio {ratio:g} and recompute: {kind}")
    return said
