"""A run file on a machine that need not be there: the layout it takes, and what a step of it then holds.

The layout is the one named, or for `shard: auto` the fastest that fits; on CPUs the first that fits, because there
transfers and computing share cores, which costs do not know.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from lengthwise.config import OffloadConfig, RunConfig
from lengthwise.core.plan import RECOMPUTE_KINDS
from lengthwise.core.shape import LayerCut, ModelShape
from lengthwise.cost import (
    DTYPE_BYTES,
    Cost,
    LayoutSeconds,
    ModelLayout,
    StepMemory,
    choose_shard,
    memory_of,
    ranks_of_node,
    wanted_tokens,
)
from lengthwise.simulator.layouts import layout_seconds, usual_lengths


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Ranks, and where they run. here: how many of them a machine has."""

    ranks: int
    here: int
    on_gpus: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedModel:
    """What of a model counts.

    parameters: all of them, adapters too; None: those of the shape. adapters: that train in place of the model's own;
    None: all train. ties: whether head and embedding are the same; None: as the family usually has it. kinds: of
    recomputation that its family can.
    """

    shape: ModelShape
    parameters: int | None = None
    adapters: int | None = None
    ties: bool | None = None
    kinds: Sequence[str] = RECOMPUTE_KINDS


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """A run file with its layout settled, and what a step then holds; why: "" where there was nothing to choose."""

    config: RunConfig
    memory: StepMemory
    why: str = ""


def offload_of(section: OffloadConfig | None) -> str | float:
    """Return what planners take of a section: off, auto, or a ratio of every microbatch."""
    return "off" if section is None else section.ratio


def memory_of_run(config: RunConfig, model: TrainedModel, *, ranks: int, on_gpus: bool) -> StepMemory:
    """Return what a step holds in the layout of a run file; auto is zero1 until it is settled."""
    layout = ModelLayout(
        ranks=ranks // config.stages,
        cut=LayerCut(stages=config.stages, virtual=config.virtual),
        shard="zero1" if config.shard == "auto" else config.shard,
        ranks_per_node=config.ranks_per_node,
        parameters=model.parameters,
        trained=model.adapters,
        states=len(config.optimizer.states),
        offloads=config.optimizer.offload,
        ties=model.ties,
    )
    narrow, chunked = DTYPE_BYTES[config.precision_on(gpus=on_gpus)], config.loss == "chunked"
    return memory_of(model.shape, layout, dtype_bytes=narrow, on_gpus=on_gpus, chunked=chunked)


def resolve(
    config: RunConfig,
    model: TrainedModel,
    machine: Machine,
    cost: Cost,
    *,
    room_bytes: float | None = None,
    lengths: Sequence[int] | None = None,
    longest: int = 1,
    batch: int = 1,
) -> Setup:
    """Return the settled layout of a run file, as it is where nothing is open.

    cost: of whole parameters on every rank. room_bytes: of one rank; None: not known. lengths: of the first global
    batch; None: not known. longest, batch: tokens of the longest sequence, and at most of a global batch.

    Raises:
        MemoryShortage: the model fits under no layout.
        ConfigError: nodes do not divide the ranks.
    """
    ranks, asked = machine.ranks, config.shard
    node = ranks_of_node(config.ranks_per_node, machine.here, ranks, is_asked=asked == "hybrid")
    memory, why = memory_of_run(config, model, ranks=ranks, on_gpus=machine.on_gpus), ""
    if asked == "hybrid":
        config, memory = config.model_copy(update={"ranks_per_node": node}), replace(memory, ranks_per_node=node)
        why = "shard hybrid: all ranks are on one node, where it is zero3" if node == ranks else ""
    if asked != "auto" or config.stages > 1:  # stages have zero1 alone
        return Setup(config=config, memory=memory, why=why)
    memory = replace(memory, ranks_per_node=node)
    capacity = None if config.capacity_tokens == "auto" else config.capacity_tokens
    recompute = config.recompute if capacity is None or config.recompute != "auto" else "none"
    kinds = model.kinds if recompute == "auto" else [recompute]
    seconds: LayoutSeconds | None = None
    if machine.on_gpus and room_bytes is not None and cost.prices_choices:
        seconds = layout_seconds(
            lengths or usual_lengths(ranks, capacity),
            cost,
            room_bytes,
            kinds=kinds,
            capacity_tokens=capacity,
            offload=offload_of(config.offload),
            heads=config.heads,
        )
    choice = choose_shard(
        memory,
        room_bytes,
        tokens=wanted_tokens(ranks, longest=longest, batch=batch) if capacity is None else min(capacity, batch),
        kinds=kinds,
        offload=config.most_offload,
        keeps_whole=config.keeps_whole,
        can_offload=machine.on_gpus,
        seconds=seconds,
    )
    within = node if choice.shard == "hybrid" else None
    return Setup(
        config=config.model_copy(update={"shard": choice.shard, "ranks_per_node": within}),
        memory=replace(memory, shard=choice.shard),
        why=f"shard {choice.shard}: {choice.why}",
    )
