"""What a run file's training has on a machine that need not be there: its model, and how parameters lie over ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from lengthwise.config import RunConfig
from lengthwise.core.errors import ConfigError
from lengthwise.core.files import read_json_object
from lengthwise.core.host_memory import free_host_bytes
from lengthwise.core.shape import ModelShape
from lengthwise.cost import (
    DTYPE_BYTES,
    Cost,
    Hardware,
    StepMemory,
    check_trained,
    choose_shard_of_run,
    named_shape,
    ranks_of_node,
    shape_from_config,
)
from lengthwise.cost.memory import logits_at_once
from lengthwise.simulator.layouts import layout_seconds_of_run


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How many neighbouring ranks share parameters; what a step holds; why, where the run file left it open."""

    ranks_in_step: int
    memory: StepMemory
    why: str


def layout_of_run(
    config: RunConfig,
    shape: ModelShape,
    hardware: Hardware,
    cost: Cost,
    *,
    ranks: int,
    lengths: Sequence[int] | None,
    longest: int,
    batch: int,
    trained: int | None,
    ties: bool | None,
) -> Layout:
    """Return the layout of a run file: the one named, or the fastest that fits; on CPUs the first by what is free here.

    cost: of whole parameters on every rank. lengths: of the first batch; None: not known. longest, batch: tokens of the
    longest sequence, and at most of a global batch. trained: parameters of adapters; None: all train. ties: whether
    head and embedding are the same; None: as the family usually has it.

    Raises:
        MemoryShortage: the model fits under no layout.
        ConfigError: nodes do not divide the ranks.
    """
    on_gpus = hardware.name != "cpu"
    here = min(ranks, hardware.ranks_per_node) if on_gpus else ranks
    node = ranks_of_node(config.ranks_per_node, here, ranks, is_asked=config.shard == "hybrid")
    memory = StepMemory(
        shape=shape,
        dtype_bytes=DTYPE_BYTES[config.precision_on(gpus=on_gpus)],
        trained=trained,
        ranks=ranks,
        ranks_per_node=node,
        logits_at_once=logits_at_once(shape.vocab, on_gpus=on_gpus) if config.loss == "chunked" else None,
        states=len(config.optimizer.states),
        offloads=config.optimizer.offload and on_gpus,
        ties=ties,
    )
    shard, why = config.shard, ""
    if shard == "auto":
        room = hardware.device_bytes if on_gpus else free_host_bytes() / ranks or None
        seconds = layout_seconds_of_run(config, lengths, cost, room, ranks=ranks) if on_gpus else None
        choice = choose_shard_of_run(
            config, memory, room, longest=longest, batch=batch, on_gpus=on_gpus, seconds=seconds
        )
        shard = choice.shard
        why = f"shard {shard}: {choice.why}" if on_gpus or shard != "zero1" else ""
    within = {"zero1": 1, "zero3": ranks, "hybrid": node or ranks}[shard]
    return Layout(ranks_in_step=within, memory=replace(memory, shard=shard), why=why)


def ties_of(model: str) -> bool | None:
    """Return whether a model's head and embedding are the same; None: it has no config.json here that says so."""
    path = Path(model) / "config.json"
    return read_json_object(str(path)).get("tie_word_embeddings") if path.is_file() else None


def adapters_of(config: RunConfig) -> int | None:
    """Count the parameters that train in place of the model's own, with torch; None: all train."""
    if config.lora is None:
        return None
    from lengthwise.models import check_lora, find_model

    return check_lora(find_model(config.model, weights=config.weights), config.lora)


def shape_of_run(config: RunConfig) -> ModelShape:
    """Read the shape of a run file's model without torch."""
    if config.model == "tiny":
        return named_shape("tiny")
    path = Path(config.model) / "config.json"
    if not path.is_file():
        expected = "tiny, or a local folder with config.json, to know its costs"
        remedy = "Add --model-shape llama-7b --hardware h100, or other named ones."
        raise ConfigError("model", expected=expected, got=config.model, remedy=remedy)
    check_trained(str(path))
    return shape_from_config(read_json_object(str(path)))  # by its family's name, as training calls it
