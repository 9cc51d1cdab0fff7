"""`capacity_tokens: auto`: the tokens that a rank holds beside what it keeps from step to step, measured at the start.

Small passes (`engine.measuring`) tell the bytes of a microbatch for each kind of recomputation that may be taken: on a
rank alone, over a ring, with heads split, and with a prefix computed once. Where another kernel computes long
sequences, what it takes inside is measured alone (`engine.long_kernel`). A stage measures its own layers, and counts
the microbatches that it keeps beside one. A tenth of the free memory stays free. The capacity is the least of all
ranks, in steps of 128 tokens. Where twice the bytes that the largest batch needs without recomputation are free,
nothing more is measured.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lengthwise.comm import Mesh, Transport, share_first, share_numbers
from lengthwise.core.errors import MemoryShortage
from lengthwise.cost import RESERVED, STEP_TOKENS, LongKernelBytes, StepBytes, shape_from_config
from lengthwise.engine.long_kernel import measure_long_kernel
from lengthwise.engine.measuring import ALONE, FallingLine, Layout, SmallPasses, measure_microbatch
from lengthwise.engine.shortage import SMALLER_STATE, free_bytes, reporting_shortage
from lengthwise.models import attention_needs, image_reader, trained_towers
from lengthwise.offload import LEAVING_BYTES
from lengthwise.planner.service.rank_memory import Capacities, RankMemory
from lengthwise.report.figures import count
from lengthwise.session.engine import Engine
from lengthwise.setup import offload_of

if TYPE_CHECKING:
    from lengthwise.session.settings import SessionSettings

_RING_RANKS = 3  # in longer rings a rank holds no more: its own keys, those of the ring step, those that arrive
_AMPLE = 2.0  # times the bytes on a rank alone; other layouts need less than that


@dataclass(frozen=True, slots=True, kw_only=True)
class Measuring:
    """Measures what an engine's microbatches hold, alike on all ranks.

    kinds: kinds of recomputation to choose from. heads: the setting for split heads. most_tokens: most tokens of a
    global batch. logits_at_once: logits per loss chunk, None for all. leaving_bytes: bytes of host copies in flight,
    None without offload. kept_bytes: bytes that the optimizer still has to allocate. end_bytes: bytes that the end of a
    step needs, while no microbatch runs. trains: True if the model trains; without gradients a pass holds no more than
    with recomputed layers, and is measured so. shares: True if plans may compute prefixes once.
    """

    engine: Engine
    kinds: Sequence[str]
    heads: int | str
    most_tokens: int
    logits_at_once: int | None
    leaving_bytes: int | None = None
    kept_bytes: float = 0.0
    end_bytes: float = 0.0
    trains: bool = True
    shares: bool = False

    def memory(self) -> RankMemory:
        """Measure the bytes that every kind of recomputation holds, in all layouts. Collective.

        Raises:
            FallingLine: on a rank, the longer of two passes held less; every rank raises it.
        """
        engine, kinds, leaving = self.engine, self.kinds, self.leaving_bytes or 0
        dtype = engine.cast_dtype() or engine.dtype
        passes = SmallPasses(
            model=engine.model,
            kernel=engine.kernel(dtype),
            recompute=kinds[0],
            done=engine.measured,
            casting=engine.casting(),
            reader=image_reader(engine.model) if self.trains and trained_towers(engine.model) else None,
        )
        with (
            engine.attending(),
            torch.autocast(engine.device.type, enabled=False),
            torch.enable_grad(),  # a loop may make a session that evaluates under no_grad
            _in_training(engine.model),
            nullcontext() if self.trains else _embedding_alone_trains(engine.model),
        ):
            with self._reporting("one layer's attention over a long sequence"):
                needs = attention_needs(engine.model.config, dtype)
                long = measure_long_kernel(passes.kernel, needs, engine.device, most_tokens=self.most_tokens)
            first = self._measured(passes, long)
            budget = self._budget()
            layouts = dict.fromkeys(kinds, (first,))
            ample = RankMemory(budget_bytes=budget / _AMPLE, layouts=layouts, leaving_bytes=leaving)
            most = max(STEP_TOKENS, self.most_tokens)
            is_ample = ample.peak_bytes(kinds[0], most) <= ample.budget_bytes
            if not least(engine.transport, [float(is_ample)])[0]:  # ranks may gather in their passes
                of_kinds = {kind: replace(passes, recompute=kind) for kind in kinds}
                lying = [ALONE, *self._others()]
                layouts = {
                    kind: tuple(self._measured(replace(each, layout=layout), long) for layout in lying)
                    for kind, each in of_kinds.items()
                }
                budget = self._budget()
        return RankMemory(budget_bytes=budget, layouts=layouts, leaving_bytes=leaving)

    def held(self, *, ratio: float | None = None) -> Capacities:
        """Return the tokens that every rank holds, for the kinds of recomputation that leave room for 128. Collective.

        ratio: offloaded share of activations, where it is the same for every microbatch.
        """
        memory, plain, offloading = self.memory(), dict[str, int](), dict[str, int]()
        for kind in memory.layouts:
            plain[kind] = memory.most_tokens(kind, self.most_tokens, offload=ratio or 0.0)
            offloading[kind] = plain[kind]
            if self.leaving_bytes is not None and not ratio:
                offloading[kind] = memory.most_tokens(kind, plain[kind], offload=None)
        found = iter(least(self.engine.transport, [*plain.values(), *offloading.values()]))
        plain, offloading = (
            {kind: int(tokens) for kind, tokens in zip(part, found, strict=False) if tokens}
            for part in (plain, offloading)
        )
        return Capacities(plain=plain, offloading=offloading, memory=memory)

    def _budget(self) -> float:
        """Return the bytes that every rank has free for a microbatch. Collective.

        0 where the end of a step does not fit. Passes run first: bytes that libraries allocate once are then not free.
        """
        transport = self.engine.transport
        free = free_bytes(self.engine.device, transport.device_ranks) * (1 - RESERVED) - self.kept_bytes
        return least(transport, [free if self.end_bytes <= free else 0.0])[0]

    def _others(self) -> list[Layout]:
        """List the layouts of a sequence other than whole on one rank."""
        mesh: Mesh = self.engine.part()["mesh"]
        config: Any = self.engine.model.config
        ranks = mesh.num_replicas
        if ranks == 1:  # blocks of rings hold no less than those of prefixes
            return [replace(ALONE, branches=True)] if self.shares else []
        degree = min(ranks, _RING_RANKS)
        layouts = [Layout(degree=degree, position=degree - 1)]
        splits = 2 if self.heads == "auto" else 1 if self.heads == "off" else int(self.heads)
        if 1 < splits <= ranks and shape_from_config(config.to_dict()).heads % splits == 0:
            layouts.append(Layout(degree=splits, position=splits - 1, heads=splits))
        return layouts

    def _reporting(self, what: str) -> AbstractContextManager[None]:
        transport = self.engine.transport
        where = f"rank {transport.rank}, {transport.phase}"
        return reporting_shortage(lambda: where, needs=lambda: what, remedy=SMALLER_STATE)

    def _measured(self, passes: SmallPasses, long: LongKernelBytes) -> StepBytes:
        """Measure small passes; if one rank refuses its passes, all do. Collective."""
        engine, kind, found, wrong = self.engine, passes.recompute, None, dict[str, str]()
        mesh, chunks = engine.part()["mesh"], engine.part()["chunks"]
        try:
            with self._reporting(f"a small pass with recompute {kind}"):
                found = measure_microbatch(
                    passes,
                    logits_at_once=self.logits_at_once,
                    most_rows=self.most_tokens,
                    chunks=chunks,
                    stage=mesh.stage,
                    stages=mesh.stages,
                )
        except FallingLine as error:
            wrong[kind] = error.got
        shared = share_first(engine.transport, wrong)
        if shared:
            raise FallingLine(shared[kind])
        assert found is not None, "else it was shared"
        of_group = replace(long, least_rows=long.least_rows / passes.layout.heads)  # which has sequences whole
        return replace(found, long_kernel=of_group)


def measuring_of(
    engine: Engine,
    *,
    kinds: Sequence[str],
    heads: int | str,
    most_tokens: int,
    trains: bool = True,
    kept_bytes: float = 0.0,
    end_bytes: float = 0.0,
    shares: bool = False,
) -> Measuring:
    """Make the `Measuring` of an engine's microbatches, from the fields of `Measuring`."""
    offload, leaving = engine.offload, None
    if trains and offload is not None and offload.ratio not in ("off", 0.0):
        leaving = LEAVING_BYTES[offload.store]
    return Measuring(
        engine=engine,
        kinds=kinds if trains else ["layer" if "layer" in kinds else kinds[0]],
        heads=heads,
        most_tokens=most_tokens,
        logits_at_once=engine.logits_at_once,
        leaving_bytes=leaving,
        kept_bytes=kept_bytes,
        end_bytes=end_bytes,
        trains=trains,
        shares=shares,
    )


def measured_of(
    engine: Engine,
    settings: SessionSettings,
    *,
    trains: bool,
    takes_any_loss: bool,
    kept_bytes: float = 0.0,
    end_bytes: float = 0.0,
) -> tuple[Capacities, Capacities | None]:
    """Measure the tokens that a rank of a session or a run holds, from the fields of `Measuring`. Collective.

    takes_any_loss: True if later losses may need whole logits. Returns (capacity with the session's own loss, capacity
    with losses over whole logits). The second may hold no kind; it is None if no other loss can come, or if the
    session's own loss makes whole logits, too.

    Raises:
        MemoryShortage: not even 128 tokens of the session's own loss fit.
    """
    engine.transport.phase = "start, measuring what fits into memory"
    measuring = measuring_of(
        engine,
        kinds=settings.trained.kinds if settings.recompute == "auto" else [settings.recompute],
        heads=settings.asked.heads,
        most_tokens=settings.batch_tokens,
        trains=trains,
        kept_bytes=kept_bytes,
        end_bytes=end_bytes,
        shares=settings.shares_prefixes,
    )
    ratio = offload_of(engine.offload if trains else None)
    of_all = ratio if isinstance(ratio, float) else None
    found = measuring.held(ratio=of_all)
    if not found.plain:
        where, free = f"rank {engine.transport.rank}, start", count(max(0.0, found.memory.budget_bytes))
        got = f"{free}B free beside the model, its gradients and optimizer, and a tenth left free"
        remedy = "Use more ranks (they share the optimizer), a smaller model, recompute: auto, or more memory."
        raise MemoryShortage(where, expected=f"room for {STEP_TOKENS} tokens", got=got, remedy=remedy)
    if measuring.logits_at_once is None or not takes_any_loss:
        return found, None
    return found, replace(measuring, logits_at_once=None).held(ratio=of_all)


@contextmanager
def _in_training(model: nn.Module) -> Iterator[None]:
    """Put a model into training mode inside the block: only there are layers recomputed, and entries dropped."""
    before = [(module, module.training) for module in model.modules()]
    model.train()
    try:
        yield
    finally:
        for module, training in before:
            module.training = training


@contextmanager
def _embedding_alone_trains(model: Any) -> Iterator[None]:
    """Let backward reach all layers of a frozen model inside the block, with one gradient, which exists before."""
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


def capacities_sentence(capacities: Capacities, batch_tokens: int) -> str:
    """Describe the tokens that a rank holds, by kind of recomputation where they differ, and the bytes for them.

    batch_tokens: most tokens of a global batch.
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
