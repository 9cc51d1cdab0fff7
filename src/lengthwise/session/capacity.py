"""The tokens that a rank holds, by what small passes of the model measure and the memory that is free beside it.

What a microbatch needs is measured by `engine.activations`, for each kind of recomputation that the run may take, on a
rank alone, over a ring and with heads split; a tenth of what is free is left. A stage of a pipeline measures its own
layers, and counts the microbatches that it keeps beside one. The capacity is the least of all ranks,
in steps of 128. Where twice what the largest batch needs without recomputation is free, no more is measured.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lengthwise.attention import BlockKernel
from lengthwise.comm import Mesh, Transport, share_first, share_numbers
from lengthwise.core.errors import MemoryShortage, ModelRefused
from lengthwise.core.plan import RECOMPUTE_KINDS
from lengthwise.cost import RESERVED, STEP_TOKENS, StepBytes, shape_from_config
from lengthwise.engine.activations import WHOLE_MODEL, measure_microbatch
from lengthwise.engine.memory import SMALLER_STATE, free_bytes, reporting_shortage
from lengthwise.engine.small_pass import ALONE, Casting, FallingLine, Layout, Seen, SmallPasses
from lengthwise.models import Chunk, check_recompute
from lengthwise.offload import LEAVING_BYTES
from lengthwise.planner.service.rank_memory import Capacities, RankMemory
from lengthwise.report.figures import count
from lengthwise.session.engine import Engine
from lengthwise.setup import offload_of

if TYPE_CHECKING:
    from lengthwise.session.settings import SessionSettings

_RING_RANKS = 3  # from which on a rank of a ring holds no more: its own keys, those it has, those that arrive
_AMPLE = 2.0  # times what is needed: rings and split heads need less than that more


@dataclass(frozen=True, slots=True, kw_only=True)
class Measuring:
    """Measures what microbatches of a run need, all ranks the same.

    kept_bytes: that the optimizer has yet to take. end_bytes: that the end of a step needs while no microbatch runs.
    kinds: of recomputation, to choose from. heads: as in a run file. most_tokens: of a global batch. offloads,
    leaving_bytes: whether ratios of offload will be asked for, and what their store holds back. casting: the autocast
    of forwards. done: the passes that were run; copies of this record run them no second time. mesh, chunks: the stage
    that the rank is, and its part of the model.
    """

    model: nn.Module
    kernel: BlockKernel
    mesh: Mesh
    device: torch.device
    kept_bytes: float
    end_bytes: float
    kinds: Sequence[str]
    heads: int | str
    most_tokens: int
    logits_at_once: int | None = None
    offloads: bool = False
    leaving_bytes: int = 0
    casting: Casting = nullcontext
    done: dict[object, Seen] = field(default_factory=dict)
    chunks: Mapping[int, Chunk] = field(default_factory=lambda: WHOLE_MODEL)

    @property
    def transport(self) -> Transport:
        """All ranks."""
        return self.mesh.world

    def memory(self) -> RankMemory:
        """Return what was measured of all kinds of recomputation, over rings too. Collective.

        Raises:
            FallingLine: on a rank, of passes of which the longer held less; every rank raises it.
        """
        kinds, leaving = self.kinds, self.leaving_bytes
        first = self._measured(kinds[0], ALONE)
        budget = self._budget()
        ample = RankMemory(budget_bytes=budget / _AMPLE, layouts=dict.fromkeys(kinds, (first,)), leaving_bytes=leaving)
        most = max(STEP_TOKENS, self.most_tokens)
        is_ample = ample.peak_bytes(kinds[0], most) <= ample.budget_bytes
        if least(self.transport, [float(is_ample)])[0]:  # all ranks measure alike: they may gather in their passes
            return RankMemory(budget_bytes=budget, layouts=ample.layouts, leaving_bytes=leaving)
        measured = {}
        for kind in kinds:
            cut = [self._measured(kind, layout) for layout in self._rings()]
            measured[kind] = (first if kind == kinds[0] else self._measured(kind, ALONE), *cut)
        return RankMemory(budget_bytes=self._budget(), layouts=measured, leaving_bytes=leaving)

    def _budget(self) -> float:
        """Return the bytes for a microbatch, the least of all ranks, once passes have run. Collective.

        What these allocated once, as libraries do, is then not free. Where the end of a step does not fit, nothing is.
        """
        free = free_bytes(self.device, self.transport.device_ranks) * (1 - RESERVED) - self.kept_bytes
        return least(self.transport, [free if self.end_bytes <= free else 0.0])[0]

    def capacities(self, *, ratio: float | None = None) -> Capacities:
        """Return the tokens that a rank holds by kind of recomputation, the same on all ranks. Collective.

        ratio: of the offload of every microbatch, where it is given.

        Raises:
            MemoryShortage: not even 128, of any kind.
        """
        found = self.held(ratio=ratio)
        if not found.plain:
            free = count(max(0.0, found.memory.budget_bytes))
            got = f"{free}B free beside the model, its gradients and optimizer, and a tenth left free"
            remedy = (
                "Use more ranks (the optimizer is split over them), a smaller model, recompute: auto, or more memory."
            )
            where = f"rank {self.transport.rank}, start"
            raise MemoryShortage(where, expected=f"room for {STEP_TOKENS} tokens", got=got, remedy=remedy)
        return found

    def held(self, *, ratio: float | None = None) -> Capacities:
        """Return what `capacities` does; of kinds for which there is no room for 128 tokens, nothing. Collective."""
        memory, plain, offloading = self.memory(), dict[str, int](), dict[str, int]()
        for kind in memory.layouts:
            plain[kind] = memory.most_tokens(kind, self.most_tokens, offload=ratio or 0.0)
            offloading[kind] = plain[kind]
            if self.offloads and not ratio:
                offloading[kind] = memory.most_tokens(kind, plain[kind], offload=None)
        found = least(self.transport, [*plain.values(), *offloading.values()])
        plain, offloading = (
            {kind: int(tokens) for kind, tokens in zip(plain, part, strict=True) if tokens}
            for part in (found[: len(plain)], found[len(plain) :])
        )
        return Capacities(plain=plain, offloading=offloading, memory=memory)

    def _rings(self) -> list[Layout]:
        """List how a sequence may lie over several ranks."""
        ranks, heads = self.mesh.num_replicas, self.heads
        config: Any = self.model.config
        degree = min(ranks, _RING_RANKS)
        layouts = [Layout(degree=degree, position=degree - 1)] if ranks > 1 else []
        splits = 2 if heads == "auto" else 1 if heads == "off" else int(heads)
        if 1 < splits <= ranks and shape_from_config(config.to_dict()).heads % splits == 0:
            layouts.append(Layout(degree=splits, position=splits - 1, heads=splits))
        return layouts

    def _measured(self, kind: str, layout: Layout) -> StepBytes:
        """Return what small passes measure. Collective: where that is wrong on one rank, all refuse it."""
        try:
            found, wrong = self._measured_here(kind, layout), dict[str, str]()
        except FallingLine as error:
            found, wrong = None, {kind: error.got}
        shared = share_first(self.transport, wrong)
        if shared:
            raise FallingLine(shared[kind])
        assert found is not None, "else it was shared"
        return found

    def _measured_here(self, kind: str, layout: Layout) -> StepBytes:
        with reporting_shortage(
            lambda: f"rank {self.transport.rank}, {self.transport.phase}",
            needs=lambda: f"a small pass with recompute {kind}",
            remedy=SMALLER_STATE,
        ):
            passes = SmallPasses(
                model=self.model,
                kernel=self.kernel,
                recompute=kind,
                layout=layout,
                done=self.done,
                casting=self.casting,
            )
            return measure_microbatch(
                passes,
                logits_at_once=self.logits_at_once,
                most_rows=self.most_tokens,
                offloads=self.offloads,
                chunks=self.chunks,
                stage=self.mesh.stage,
                stages=self.mesh.stages,
            )


def measuring_of(
    engine: Engine,
    *,
    kinds: Sequence[str],
    heads: int | str,
    most_tokens: int,
    kept_bytes: float = 0.0,
    end_bytes: float,
) -> Measuring:
    """Return what measures an engine's microbatches; the rest as for `Measuring`."""
    offload = engine.offload
    return Measuring(
        model=engine.model,
        kernel=engine.kernel(engine.cast_dtype() or engine.dtype),
        **engine.part(),
        device=engine.device,
        kept_bytes=kept_bytes,
        end_bytes=end_bytes,
        kinds=kinds,
        heads=heads,
        most_tokens=most_tokens,
        logits_at_once=engine.logits_at_once,
        offloads=offload is not None and offload.ratio not in ("off", 0.0),
        leaving_bytes=0 if offload is None else LEAVING_BYTES[offload.store],
        casting=engine.casting(),
        done=engine.measured,
    )


def measured_of(
    engine: Engine, settings: SessionSettings, *, kept_bytes: float, end_bytes: float, trains: bool
) -> tuple[Capacities, Capacities | None]:
    """Measure what a rank of a session holds; kept_bytes, end_bytes: as for `Measuring`. Collective.

    A model that does not train holds less than with all layers computed again, and is measured so.

    Returns what it holds of the session's own loss, and of losses over whole logits, which may be nothing; None: there
    are no such losses.
    """
    ratio, kinds = offload_of(engine.offload if trains else None), kinds_of(engine.config, settings.recompute)
    engine.transport.phase = "start, measuring what fits into memory"
    measuring = measuring_of(
        engine,
        kinds=kinds if trains else ["layer" if "layer" in kinds else kinds[0]],
        heads=settings.asked.heads,
        most_tokens=settings.most_tokens,
        kept_bytes=kept_bytes,
        end_bytes=end_bytes,
    )
    if not trains:  # nothing is kept for backward, which could go away
        measuring = replace(measuring, offloads=False, leaving_bytes=0)
    with (
        engine.attending(),
        torch.autocast(engine.device.type, enabled=False),
        torch.enable_grad(),  # a loop may make a session that evaluates under no_grad
        _in_training(engine.model),
        nullcontext() if trains else _embedding_alone_trains(engine.model),
    ):
        of_all = ratio if isinstance(ratio, float) else None
        found = measuring.capacities(ratio=of_all)
        whole = replace(measuring, logits_at_once=None) if settings.takes_any_loss else None
        return found, whole and whole.held(ratio=of_all)


@contextmanager
def _in_training(model: nn.Module) -> Iterator[None]:
    """Put a model into training mode inside the block: in no other are layers computed again, and entries dropped."""
    before = [(module, module.training) for module in model.modules()]
    model.train()
    try:
        yield
    finally:
        for module, training in before:
            module.training = training


@contextmanager
def _embedding_alone_trains(model: Any) -> Iterator[None]:
    """Let backward reach all layers of a model that nobody trains, with one gradient that is there before."""
    before = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    for parameter, _ in before:
        parameter.requires_grad_(False)
    embedding = list(model.get_input_embeddings().parameters())  # more than one under adapters
    for parameter in embedding:
        parameter.requires_grad_().grad = torch.zeros_like(parameter)
    try:
        yield
    finally:
        for parameter in embedding:
            parameter.grad = None
        for parameter, trains in before:
            parameter.requires_grad_(trains)


def kinds_of(config: Any, asked: str) -> list[str]:
    """List the kinds of recomputation that a run may take: the one asked for, or for `auto` those of the family."""
    if asked != "auto":
        return [asked]
    kinds = []
    for kind in RECOMPUTE_KINDS:
        try:
            check_recompute(config, kind)
        except ModelRefused:  # a family whose layers Hugging Face does not wrap
            continue
        kinds.append(kind)
    return kinds


def capacities_sentence(capacities: Capacities, batch_tokens: int) -> str:
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


def least(transport: Transport, numbers: Sequence[float]) -> list[float]:
    """Return the least of each number over all ranks. Collective."""
    return share_numbers(transport, numbers).amin(0).tolist()
