"""The layout of settings on a machine that need not exist here, and the memory of a step.

The layout is the named one. For `shard: auto` it is the fastest that fits by estimate if lengths are known, else the
first that fits; on CPUs too, because there transfers and computing share cores, which the costs do not model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any, Generic, TypeVar

from lengthwise.config import OffloadConfig, RunConfig, TrainingSettings
from lengthwise.core.plan import RECOMPUTE_KINDS
from lengthwise.core.shape import ModelShape
from lengthwise.cost import (
    DTYPE_BYTES,
    ZERO3_ALONE,
    Cost,
    LayoutSeconds,
    ModelLayout,
    StepMemory,
    choose_shard,
    memory_of,
    ranks_of_node,
    wanted_tokens,
)
from lengthwise.simulator.layouts import layout_seconds

Asked = TypeVar("Asked", bound=TrainingSettings)


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Ranks and their machines. here: number of ranks that share a machine."""

    ranks: int
    here: int
    on_gpus: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedModel:
    """The sizes of a model and its optimizer that count for memory.

    dtype_bytes: bytes of a parameter as forward reads it. parameters: number of all parameters, with adapters; None for
    those of the shape. trained: number of trained ones; None for all. ties: True if head and embedding are tied; None:
    as usual in the family. kinds: kinds of recomputation that the family supports. states: number of optimizer states
    per entry (default 2). offloads: True if states and master weights are in host memory. chunked: True if the loss
    computes logits in chunks. quantization: kind of the linear layers' weights, None for none. frozen_bytes: bytes of
    the frozen parameters; None by the shape. layer_bytes: as in `ModelLayout`.
    """

    shape: ModelShape
    dtype_bytes: int
    parameters: int | None = None
    trained: int | None = None
    ties: bool | None = None
    kinds: Sequence[str] = RECOMPUTE_KINDS
    states: int = 2
    offloads: bool = False
    chunked: bool = True
    quantization: str | None = None
    frozen_bytes: int | None = None
    layer_bytes: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup(Generic[Asked]):
    """Settings with a resolved layout, and the memory of a step. why: reason of the layout, or "" if none is due."""

    settings: Asked
    memory: StepMemory
    why: str = ""


def model_of_run(config: RunConfig, shape: ModelShape, *, on_gpus: bool, **known: Any) -> TrainedModel:
    """Return the sizes of a run file's model. known: fields that the loaded model gives."""
    return TrainedModel(
        shape=shape,
        dtype_bytes=DTYPE_BYTES[config.precision_on(gpus=on_gpus)],
        states=len(config.optimizer.states),
        offloads=config.optimizer.offload,
        chunked=config.loss == "chunked",
        quantization=config.quantization,
        **known,
    )


def lengths_of_a_batch(lengths: Sequence[int], batch_tokens: int) -> list[int]:
    """Return lengths of about one batch: every n-th of the sorted ones."""
    ordered = sorted(lengths)
    every = max(1, -(-sum(ordered) // batch_tokens))
    return ordered[every - 1 :: every] or ordered


def offload_of(section: OffloadConfig | None) -> str | float:
    """Return the `offload` section as planners take it: off, auto, or a ratio of every microbatch."""
    return "off" if section is None else section.ratio


def memory_of_settings(settings: TrainingSettings, model: TrainedModel, *, ranks: int, on_gpus: bool) -> StepMemory:
    """Return the memory of a step in the layout of these settings; auto counts as zero1."""
    layout = ModelLayout(
        ranks=ranks // settings.stages,
        cut=settings.cut,
        shard="zero1" if settings.shard == "auto" else settings.shard,
        ranks_per_node=settings.ranks_per_node,
        parameters=model.parameters,
        trained=model.trained,
        states=model.states,
        offloads=model.offloads,
        ties=model.ties,
        quantization=model.quantization,
        frozen_bytes=model.frozen_bytes,
        layer_bytes=model.layer_bytes,
    )
    return memory_of(model.shape, layout, dtype_bytes=model.dtype_bytes, on_gpus=on_gpus, chunked=model.chunked)


def resolve(
    settings: Asked,
    model: TrainedModel,
    machine: Machine,
    cost: Cost | None,
    *,
    room_bytes: float | None = None,
    lengths: Sequence[int] | None = None,
    longest: int = 1,
    batch: float = inf,
    margin: float = 0.0,
) -> Setup[Asked]:
    """Return these settings with a resolved layout.

    cost: costs with whole parameters on every rank; None compares memory alone. room_bytes: free bytes of one rank, if
    known. lengths: lengths of a global batch; None times no layout. longest: tokens of the longest sequence. batch:
    largest number of tokens of a global batch. margin: share of its time by which another layout must be faster than
    the first that fits. MemoryShortage: no layout fits. ConfigError: nodes do not divide the ranks.
    """
    ranks, asked = machine.ranks, settings.shard
    node = ranks_of_node(settings.ranks_per_node, machine.here, ranks, is_asked=asked == "hybrid")
    memory = memory_of_settings(settings, model, ranks=ranks, on_gpus=machine.on_gpus)
    why = ZERO3_ALONE if asked == "zero3" and ranks == 1 else ""
    if asked == "hybrid":
        settings = settings.model_copy(update={"ranks_per_node": node})
        memory = replace(memory, ranks_per_node=node)
        why = "shard hybrid: all ranks are on one node, where it is zero3" if node == ranks else ""
    if asked != "auto" or settings.stages > 1:  # stages have zero1 alone
        return Setup(settings=settings, memory=memory, why=why)
    memory = replace(memory, ranks_per_node=node)
    capacity = None if settings.capacity_tokens == "auto" else settings.capacity_tokens
    recompute = settings.recompute if capacity is None or settings.recompute != "auto" else "none"
    kinds = model.kinds if recompute == "auto" else [recompute]
    seconds: LayoutSeconds | None = None
    is_timed = machine.on_gpus and model.trained != 0
    if is_timed and lengths and room_bytes is not None and cost is not None:
        seconds = layout_seconds(
            lengths,
            cost,
            room_bytes,
            kinds=kinds,
            capacity_tokens=capacity,
            offload=offload_of(settings.offload),
            heads=settings.heads,
        )
    choice = choose_shard(
        memory,
        room_bytes,
        tokens=wanted_tokens(ranks, longest=longest, batch=batch) if capacity is None else int(min(capacity, batch)),
        kinds=kinds,
        offload=settings.most_offload,
        keeps_whole=settings.keeps_whole(quantization=model.quantization),
        can_offload=machine.on_gpus and model.trained != 0,
        seconds=seconds,
        margin=margin,
    )
    within = node if choice.shard == "hybrid" else None
    is_usual = choice.shard == "zero1" and (ranks == 1 or not machine.on_gpus)
    return Setup(
        settings=settings.model_copy(update={"shard": choice.shard, "ranks_per_node": within}),
        memory=replace(memory, shard=choice.shard),
        why="" if is_usual else f"shard {choice.shard}: {choice.why}",
    )
