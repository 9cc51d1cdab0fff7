"""What a first run file says, from the memory model: the whole model or adapters, and the learning rate.

Learning rates are those that published recipes of fine-tuning begin with: a start for a search, not a result.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from lengthwise.core.errors import ConfigError
from lengthwise.core.names import counted
from lengthwise.core.shape import ModelShape
from lengthwise.cost.capacity import recompute_capacities, step_memory
from lengthwise.cost.hardware import Hardware
from lengthwise.cost.memory import StepMemory, logits_at_once

LORA_RANK = 16
_LORA_RATE = 2e-4
_RATES = ((3e9, 2e-5), (2e10, 1e-5), (float("inf"), 5e-6))  # of whole models, by parameters below
_MOST_RANKS = 12_288


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstSettings:
    """What fits on each rank.

    shard: how parameters lie over the ranks. capacities: tokens by kinds of recomputation. state_bytes: beside them,
    kept for a run. whole_bytes: the states of the whole model, where adapters are trained.
    """

    adapters: bool
    shard: str
    learning_rate: float
    capacities: Mapping[str, int]
    state_bytes: float
    whole_bytes: float


def first_settings(shape: ModelShape, hardware: Hardware, ranks: int, longest_tokens: int) -> FirstSettings:
    """Choose to train the whole model where it and the longest row fit on so many ranks, else adapters.

    Parameters lie over the ranks where they fit no other way: whole on each they cost less communication.

    Raises:
        ConfigError: not even adapters fit; names the fewest ranks that do, by powers of two.
    """
    whole = _whole(shape, hardware, ranks)
    for memory in _ways(whole):
        capacities = _capacities(memory, hardware)
        if ranks * max(capacities.values(), default=0) >= longest_tokens:
            adapters = memory.trained is not None
            rates = (rate for most, rate in _RATES if shape.total_params < most)
            return FirstSettings(
                adapters=adapters,
                shard=memory.shard,
                learning_rate=_LORA_RATE if adapters else next(rates),
                capacities=capacities,
                state_bytes=memory.state_bytes() + memory.gathered_bytes(),
                whole_bytes=whole.state_bytes(),
            )
    held = [(each.state_bytes() + each.gathered_bytes()) / 1e9 for each in _ways(whole) if each.shard == "zero3"]
    expected = f"room for a row of {longest_tokens} tokens on {counted(ranks, 'rank')} of {hardware.name}, "
    expected += f"{hardware.device_bytes / 1e9:.0f} GB each"
    got = f"{held[0]:.0f} GB on each for the whole model under shard: zero3, {held[1]:.0f} GB with adapters"
    more = next((n for n in _doubled(ranks) if _fits(shape, hardware, n, longest_tokens)), None)
    remedy = f"{more} of these are enough." if more else "No number of these is enough."
    raise ConfigError("--gpus", expected=expected, got=got, remedy=f"{remedy} Or take a smaller model.")


def _doubled(ranks: int) -> list[int]:
    found = [ranks * 2]
    while found[-1] * 2 <= _MOST_RANKS:
        found.append(found[-1] * 2)
    return found


def _fits(shape: ModelShape, hardware: Hardware, ranks: int, longest_tokens: int) -> bool:
    ways = _ways(_whole(shape, hardware, ranks))
    return any(ranks * max(_capacities(each, hardware).values(), default=0) >= longest_tokens for each in ways)


def _whole(shape: ModelShape, hardware: Hardware, ranks: int) -> StepMemory:
    """Return what steps of the whole model hold, the loss in chunks as a run makes them on these devices."""
    at_once = logits_at_once(shape.vocab, on_gpus=hardware.name != "cpu")
    return replace(step_memory(shape, hardware, ranks), logits_at_once=at_once)


def _ways(whole: StepMemory) -> list[StepMemory]:
    """List how a model may be trained, the first that fits before the others."""
    return [replace(memory, shard=shard) for memory in (whole, _with_adapters(whole)) for shard in ("zero1", "zero3")]


def _capacities(memory: StepMemory, hardware: Hardware) -> Mapping[str, int]:
    try:
        return recompute_capacities(memory, hardware)
    except ConfigError:
        return {}


def _with_adapters(memory: StepMemory) -> StepMemory:
    """Return what LoRA on all linear layers of attention and MLP holds."""
    shape = memory.shape
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    sides = 2 * (shape.hidden + queries) + 2 * (shape.hidden + keys) + 3 * (shape.hidden + shape.intermediate)
    return replace(memory, trained=shape.layers * LORA_RANK * sides)
