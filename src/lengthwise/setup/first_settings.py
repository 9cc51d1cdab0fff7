"""Settings for a first run file, from the memory model: whole model, adapters or QLoRA, and the learning rate.

Learning rates are those of published fine-tuning recipes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any

from lengthwise.config import LORA_RATE, TrainingSettings
from lengthwise.core.errors import ConfigError, MemoryShortage
from lengthwise.core.names import counted
from lengthwise.core.shape import ModelShape
from lengthwise.cost import Hardware, StepMemory, all_terms_cost, recompute_capacities
from lengthwise.cost.shard_choice import LORA_RANK, lora_params, more_ranks
from lengthwise.setup.resolve import Machine, TrainedModel, memory_of_settings, resolve

_RATES = ((3e9, 2e-5), (2e10, 1e-5), (float("inf"), 5e-6))  # of whole models, by parameters below


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstSettings:
    """Settings that fit on each rank.

    capacities: tokens per rank, by kind of recomputation. state_bytes: parameters and states per rank. whole_bytes:
    least bytes of the whole model per rank, also if adapters train. quantization: kind of the base under adapters.
    """

    adapters: bool
    quantization: str | None
    shard: str
    learning_rate: float
    capacities: Mapping[str, int]
    state_bytes: float
    whole_bytes: float


def first_settings(
    shape: ModelShape,
    hardware: Hardware,
    ranks: int,
    longest_tokens: int,
    *,
    batch_tokens: float = inf,
    lengths: Sequence[int] | None = None,
) -> FirstSettings:
    """Choose the whole model if it and the longest row fit on these ranks, else adapters, else those on a 4-bit base.

    batch_tokens: largest number of tokens of a step. lengths: lengths of a step, to time layouts; None compares memory
    alone. ConfigError, with the smallest power of two of ranks that suffices: not even a 4-bit base fits.
    """
    models = _models(shape, hardware)
    whole = _memory(models[0], hardware, ranks)
    for model in models:
        found = _fitting(model, hardware, ranks, longest_tokens, batch_tokens, lengths)
        if found is not None:
            laid, capacities = found
            adapters = model.trained is not None
            rates = (rate for most, rate in _RATES if shape.total_params < most)
            return FirstSettings(
                adapters=adapters,
                quantization=model.quantization,
                shard=laid.shard,
                learning_rate=LORA_RATE if adapters else next(rates),
                capacities=capacities,
                state_bytes=_kept(laid),
                whole_bytes=min(_kept(whole), _kept(replace(whole, shard="zero3"))),
            )
    layouts = ["zero3" if each.quantization is None else "zero1" for each in models]
    laid = (replace(_memory(each, hardware, ranks), shard=shard) for each, shard in zip(models, layouts, strict=True))
    gigabytes = [_kept(each) / 1e9 for each in laid]
    expected = f"room for a row of {longest_tokens} tokens on {counted(ranks, 'rank')} of {hardware.name}, "
    expected += f"{hardware.device_bytes / 1e9:.0f} GB each"
    got = f"{gigabytes[0]:.0f} GB on each for the whole model under shard: zero3, {gigabytes[1]:.0f} GB with adapters, "
    got += f"{gigabytes[2]:.0f} GB with adapters on a base in 4 bits"
    more = (n for n in more_ranks(ranks) if any(_fitting(each, hardware, n, longest_tokens) for each in models))
    enough = next(more, None)
    remedy = f"{enough} of them are enough." if enough else "No number of them is enough."
    raise ConfigError("--gpus", expected=expected, got=got, remedy=f"{remedy} Or use a smaller model.")


def _models(shape: ModelShape, hardware: Hardware) -> tuple[TrainedModel, TrainedModel, TrainedModel]:
    """Return the whole model, and LoRA on all linear layers of attention and MLP: on a base as it is, and in nf4."""
    whole = TrainedModel(shape=shape, dtype_bytes=hardware.compute_dtype_bytes)
    adapters = replace(whole, trained=lora_params(shape, LORA_RANK))
    return whole, adapters, replace(adapters, quantization="nf4")


def _memory(model: TrainedModel, hardware: Hardware, ranks: int) -> StepMemory:
    return memory_of_settings(TrainingSettings(), model, ranks=ranks, on_gpus=hardware.name != "cpu")


def _kept(memory: StepMemory) -> float:
    return memory.state_bytes() + memory.gathered_bytes()


def _fitting(
    model: TrainedModel,
    hardware: Hardware,
    ranks: int,
    longest_tokens: int,
    batch_tokens: float = inf,
    lengths: Sequence[int] | None = None,
) -> tuple[StepMemory, Mapping[str, int]] | None:
    """Return the memory and capacities of a run, or None if it cannot hold the longest row.

    Arguments are those of `first_settings`.
    """
    machine = Machine(ranks=ranks, here=min(ranks, hardware.ranks_per_node), on_gpus=hardware.name != "cpu")
    of_model: dict[str, Any] = {"adapters": model.trained, "quantization": model.quantization}
    cost = None if lengths is None else all_terms_cost(model.shape, hardware, **of_model)
    known = {"room_bytes": hardware.device_bytes, "longest": longest_tokens, "batch": batch_tokens, "lengths": lengths}
    try:
        laid = resolve(TrainingSettings(), model, machine, cost, **known).memory
        capacities = recompute_capacities(laid, hardware)
    except (ConfigError, MemoryShortage):
        return None
    return (laid, capacities) if ranks * max(capacities.values()) >= longest_tokens else None
