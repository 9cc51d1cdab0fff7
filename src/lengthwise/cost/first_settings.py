"""What a first run file says, from the memory model: the whole model or adapters, and the learning rate.

Learning rates are those with which published recipes of fine-tuning begin.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import inf

from lengthwise.core.errors import ConfigError, MemoryShortage
from lengthwise.core.names import counted
from lengthwise.core.shape import ModelShape
from lengthwise.cost.capacity import recompute_capacities, step_memory
from lengthwise.cost.hardware import Hardware
from lengthwise.cost.layout import ranks_of_node
from lengthwise.cost.memory import StepMemory
from lengthwise.cost.sharding import (
    LayoutSeconds,
    choose_shard,
    more_ranks,
    wanted_tokens,
    with_adapters,
)

_LORA_RATE = 2e-4
_RATES = ((3e9, 2e-5), (2e10, 1e-5), (float("inf"), 5e-6))  # of whole models, by parameters below


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstSettings:
    """What fits on each rank.

    shard: how parameters lie over the ranks. capacities: tokens by kinds of recomputation. state_bytes: kept for a run.
    whole_bytes: the least for the whole model, where adapters are trained.
    """

    adapters: bool
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
    seconds: Callable[[StepMemory], LayoutSeconds] | None = None,
) -> FirstSettings:
    """Choose the whole model where it and the longest row fit on so many ranks, else adapters.

    seconds: what times the layouts of a model that holds so much, as for `choose_shard`.

    Raises:
        ConfigError: not even adapters fit; names the fewest ranks that do, by powers of two.
    """
    whole = _whole(shape, hardware, ranks)
    for memory in (whole, with_adapters(whole)):
        if (found := _fitting(memory, hardware, longest_tokens, batch_tokens, seconds)) is not None:
            laid, capacities = found
            adapters = memory.trained is not None
            rates = (rate for most, rate in _RATES if shape.total_params < most)
            return FirstSettings(
                adapters=adapters,
                shard=laid.shard,
                learning_rate=_LORA_RATE if adapters else next(rates),
                capacities=capacities,
                state_bytes=_kept(laid),
                whole_bytes=min(_kept(whole), _kept(replace(whole, shard="zero3"))),
            )
    cut = [replace(each, shard="zero3") for each in (whole, with_adapters(whole))]
    held = [_kept(each) / 1e9 for each in cut]
    expected = f"room for a row of {longest_tokens} tokens on {counted(ranks, 'rank')} of {hardware.name}, "
    expected += f"{hardware.device_bytes / 1e9:.0f} GB each"
    got = f"{held[0]:.0f} GB on each for the whole model under shard: zero3, {held[1]:.0f} GB with adapters"
    more = next((n for n in more_ranks(ranks) if _fits(shape, hardware, n, longest_tokens)), None)
    remedy = f"{more} of these are enough." if more else "No number of these is enough."
    raise ConfigError("--gpus", expected=expected, got=got, remedy=f"{remedy} Or take a smaller model.")


def _whole(shape: ModelShape, hardware: Hardware, ranks: int) -> StepMemory:
    node = ranks_of_node(None, min(ranks, hardware.ranks_per_node), ranks, is_asked=False)
    return replace(step_memory(shape, hardware, ranks), ranks_per_node=node)


def _kept(memory: StepMemory) -> float:
    return memory.state_bytes() + memory.gathered_bytes()


def _fits(shape: ModelShape, hardware: Hardware, ranks: int, longest_tokens: int) -> bool:
    whole = _whole(shape, hardware, ranks)
    return any(_fitting(each, hardware, longest_tokens) is not None for each in (whole, with_adapters(whole)))


def _fitting(
    memory: StepMemory,
    hardware: Hardware,
    longest_tokens: int,
    batch_tokens: float = inf,
    seconds: Callable[[StepMemory], LayoutSeconds] | None = None,
) -> tuple[StepMemory, Mapping[str, int]] | None:
    """Return the settings that a run chooses, and its capacities; None: it cannot hold the longest row."""
    try:
        tokens = wanted_tokens(memory.ranks, longest=longest_tokens, batch=batch_tokens)
        timed = seconds and seconds(memory)
        choice = choose_shard(memory, hardware.device_bytes, tokens=tokens, seconds=timed)
        laid = replace(memory, shard=choice.shard)
        capacities = recompute_capacities(laid, hardware)
    except (ConfigError, MemoryShortage):
        return None
    return (laid, capacities) if memory.ranks * max(capacities.values()) >= longest_tokens else None
