"""The choice of a layout for `shard: auto`: the fastest that leaves room; and the costs of sharded ranks.

Room is that of the formulas of `cost.memory`, and time is what the caller's plans take: nothing runs, and the same
numbers give the same choice on every rank. Costs of sharded ranks include what a wave gathers and sums and what the
step's end does, on the host if the optimizer is there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Literal, TypeAlias

from lengthwise.core.errors import MemoryShortage
from lengthwise.core.names import counted
from lengthwise.core.plan import RECOMPUTE_KINDS
from lengthwise.core.shape import ModelShape
from lengthwise.cost.analytic import GRADIENT_BYTES
from lengthwise.cost.capacity import RESERVED, STEP_TOKENS, tokens_within
from lengthwise.cost.choices import Choice
from lengthwise.cost.ending import Traffic
from lengthwise.cost.memory import StepMemory
from lengthwise.cost.terms import Cost

LEAST_TOKENS = 2048  # per rank; with fewer, GEMMs are small and whole parameters are not worth their memory
LORA_RANK = 16
ZERO3_ALONE = "shard zero3 has no effect on one rank, which has all parameters"
_MOST_RANKS = 12_288


Shard: TypeAlias = Literal["zero1", "hybrid", "zero3"]
LayoutSeconds: TypeAlias = Callable[[StepMemory], float]
"""Returns the seconds of a step in a layout, inf if it has no plan."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardChoice:
    """A sharding, and the reason for it."""

    shard: Shard
    why: str


def wanted_tokens(ranks: int, *, longest: int = 1, batch: float = float("inf")) -> int:
    """Return the tokens that a rank should hold: its share of the longest sequence, and not too few of a batch."""
    return max(int(min(LEAST_TOKENS, batch)), -(-longest // ranks))


def choose_shard(
    memory: StepMemory,
    device_bytes: float | None,
    *,
    tokens: int,
    kinds: Sequence[str] = RECOMPUTE_KINDS,
    offload: float = 0.0,
    keeps_whole: str | None = None,
    can_offload: bool = False,
    seconds: LayoutSeconds | None = None,
    margin: float = 0.0,
) -> ShardChoice:
    """Return the fastest layout in which a rank holds `tokens` in a microbatch; on one rank zero1.

    Ties go to the first of zero1, hybrid and zero3. If no layout holds `tokens`, the one that holds most is chosen.
    hybrid needs `memory.ranks_per_node`, and several nodes. device_bytes: memory of one rank, None (unknown) for zero1.
    kinds: allowed kinds of recomputation. offload: largest allowed ratio. keeps_whole: the setting that allows only
    zero1, if any. can_offload: True if the optimizer may be offloaded. seconds: function that returns a step's seconds
    in a layout; without it the first that fits is chosen. margin: share of time by which others must be faster than the
    first that fits.

    Raises:
        MemoryShortage: no layout leaves room for 128 tokens.
    """
    if device_bytes is None:
        return ShardChoice(shard="zero1", why="the memory of a rank is not known")
    layouts: dict[Shard, StepMemory] = {shard: replace(memory, shard=shard) for shard in _shards(memory, keeps_whole)}
    room, ways = device_bytes * (1 - RESERVED), [Choice(recompute=kind, offload=offload) for kind in kinds]
    held: dict[Shard, int] = {
        shard: max(tokens_within(laid, room, each) for each in ways) for shard, laid in layouts.items()
    }
    most = max(held, key=lambda shard: held[shard])
    if not held[most]:
        raise _nothing_fits(
            layouts["zero1"], layouts.get("zero3"), device_bytes, kinds, keeps_whole, can_offload=can_offload
        )
    fitting: list[Shard] = [shard for shard in layouts if held[shard] >= tokens] or [most]
    if seconds is not None and len(fitting) > 1:
        took = {shard: seconds(layouts[shard]) for shard in fitting}
        best = min(fitting, key=lambda shard: took[shard] * (1 - margin * (shard == fitting[0])))
        if took[best] < inf:
            others = [f"{shard} {_seconds_text(took[shard])}" for shard in fitting if shard != best]
            why = f"a step takes {_seconds_text(took[best])} by estimate, with {', '.join(others)}"
            return ShardChoice(shard=best, why=why)
    return ShardChoice(shard=fitting[0], why=_why_by_memory(layouts, held, fitting[0], device_bytes, tokens))


def _shards(memory: StepMemory, keeps_whole: str | None) -> list[Shard]:
    """List the allowed layouts that differ here, in order of preference."""
    if memory.ranks == 1 or keeps_whole is not None:
        return ["zero1"]
    has_nodes = 1 < (memory.ranks_per_node or 1) < memory.ranks
    return ["zero1", "hybrid", "zero3"] if has_nodes else ["zero1", "zero3"]


def _why_by_memory(
    layouts: Mapping[Shard, StepMemory], held: Mapping[Shard, int], shard: Shard, device_bytes: float, tokens: int
) -> str:
    kept, device = _kept(layouts["zero1"]), f"{device_bytes / 1e9:.3g} GB a rank"
    if shard == "zero1":
        return f"weights, gradients and states take {kept} of {device}, and leave room for {held[shard]:,} tokens"
    why = f"zero1 would take {kept} of {device} for weights, gradients and states, and leave room for "
    why += f"{held['zero1']:,} tokens of the {tokens:,} wanted"
    if shard == "hybrid":
        node = counted(layouts[shard].ranks_per_node or 1, "rank")
        return f"{why}; hybrid, over {node} of a node, takes {_kept(layouts[shard])}"
    return f"{why}; zero3 takes {_kept(layouts[shard])}"


def _seconds_text(seconds: float) -> str:
    if seconds == inf:
        return "none"
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"


def check_host(memory: StepMemory, ranks_here: int, free_bytes: float, *, key: str) -> None:
    """Refuse an offloaded optimizer of all ranks of a machine with less free memory. free_bytes: 0 if unknown.

    key: name of the setting that offloads it.

    Raises:
        MemoryShortage: the optimizer needs more.
    """
    needed = ranks_here * memory.host_bytes(pins=True)
    if 0 < free_bytes < needed:
        raise MemoryShortage(
            key,
            expected=f"{needed / 1e9:.3g} GB of host memory, for the optimizer of {counted(ranks_here, 'rank')}",
            got=f"{free_bytes / 1e9:.3g} GB free on this machine",
            remedy="Take it out, or use more machines.",
        )


def _kept(memory: StepMemory) -> str:
    return f"{(memory.state_bytes() + memory.gathered_bytes()) / 1e9:.3g} GB"


def with_adapters(memory: StepMemory) -> StepMemory:
    """Return the memory with LoRA on all linear layers of attention and MLP."""
    return replace(memory, trained=lora_params(memory.shape, LORA_RANK))


def lora_params(shape: ModelShape, rank: int) -> int:
    """Return the number of parameters of LoRA adapters of this rank on all linear layers of attention and MLP."""
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    sides = 2 * (shape.hidden + queries) + 2 * (shape.hidden + keys) + 3 * (shape.hidden + shape.intermediate)
    return shape.layers * rank * sides


def more_ranks(ranks: int) -> list[int]:
    """List twice as many ranks, four times as many, and so on."""
    found = [ranks * 2]
    while found[-1] * 2 <= _MOST_RANKS:
        found.append(found[-1] * 2)
    return found


def _nothing_fits(
    whole: StepMemory,
    sharded: StepMemory | None,
    device_bytes: float,
    kinds: Sequence[str],
    keeps_whole: str | None,
    *,
    can_offload: bool,
) -> MemoryShortage:
    room = device_bytes * (1 - RESERVED)

    def fits(memory: StepMemory, offload: float = 0.0, kinds: Sequence[str] = kinds) -> bool:
        return any(tokens_within(memory, room, Choice(recompute=kind, offload=offload)) for kind in kinds)

    said = [f"zero1: {_parts(whole)}"] if sharded is None else [f"zero1: {_parts(whole)}", f"zero3: {_parts(sharded)}"]
    best, remedies = sharded or whole, list[str]()
    if keeps_whole is not None and whole.ranks > 1 and fits(replace(whole, shard="zero3")):
        remedies.append(f"no {keeps_whole}, so that shard zero3 can be taken")
    if fits(best, kinds=RECOMPUTE_KINDS):
        remedies.append("recompute: auto")
    if can_offload and not best.offloads and fits(replace(best, offloads=True)):
        remedies.append("optimizer.offload: true, or of a Session offload_optimizer=True")
    if fits(best, 1.0):
        remedies.append("offload: {store: host}")
    if whole.trained is None and fits(with_adapters(best)):
        remedies.append(f"LoRA ({_parts(with_adapters(best))})")
    ranks = [n for n in more_ranks(whole.ranks) if fits(replace(whole, shard="zero3", ranks=n))]
    if ranks and keeps_whole is None:
        remedies.append(f"{ranks[0]} ranks with the same memory each")
    return MemoryShortage(
        f"model {whole.shape.name}",
        expected=f"room for {STEP_TOKENS} tokens on {counted(whole.ranks, 'rank')} of {device_bytes / 1e9:.3g} GB each",
        got="; ".join(said),
        remedy=f"Use {', or '.join([*remedies, 'a smaller model'])}.",
    )


def _parts(memory: StepMemory) -> str:
    named = [(each / 1e9, name) for name, each in memory.state_parts().items()]
    named.append((memory.gathered_bytes() / 1e9, "gathered units"))
    total = sum(size for size, _ in named)
    return f"{total:.3g} GB ({', '.join(f'{name} {size:.3g}' for size, name in named if size)})"


def sharded_traffic(memory: StepMemory, cost: Cost, *, head_apart: bool = False) -> Traffic:
    """Return the traffic of a sharded model's wave, over the links of `cost` and all `memory.ranks`.

    Parameters travel in the dtype of their gather, gradients in fp32; parameters that do not train have no gradients.
    head_apart: True if an untied head is a unit of its own, as in our engine.
    """
    layer, rest = memory.layer_params()
    words = float(memory.shape.hidden * memory.shape.vocab)
    head = words if head_apart and rest > words else 0.0
    trains = 1.0 if memory.trained is None else memory.trained / (layer * memory.shape.layers)
    trains_rest = memory.trained is None

    ending = replace(cost.ending, **dict.fromkeys(("update_seconds", "clear_seconds"), 0.0))

    def seconds(moved_bytes: float) -> float:
        return replace(cost, reduced_bytes=moved_bytes, ending=ending).step_end_seconds(memory.ranks)

    return Traffic(
        layers=memory.shape.layers,
        gather_seconds=seconds(layer * (memory.layer_bytes or memory.dtype_bytes)),
        reduce_seconds=seconds(layer * trains * GRADIENT_BYTES),
        rest_gather_seconds=seconds((rest - head) * memory.dtype_bytes),
        rest_reduce_seconds=seconds((rest - head) * trains_rest * GRADIENT_BYTES),
        head_gather_seconds=seconds(head * memory.dtype_bytes),
        head_reduce_seconds=seconds(head * trains_rest * GRADIENT_BYTES),
    )


def sharded_cost(cost: Cost, memory: StepMemory, *, group: int | None = None, head_apart: bool = True) -> Cost:
    """Return the costs of ranks whose parameters are sharded over `group` ranks (default: all of `memory.ranks`).

    Sharded over all ranks, nothing is left to reduce at the step's end. Copies of groups are reduced there, as whole
    parameters would be, by all links of a node together. head_apart: see `sharded_traffic`.
    """
    ranks = memory.ranks
    over = ranks if group is None else min(group, ranks)
    if over == 1:
        return cost
    traffic = sharded_traffic(replace(memory, ranks=over), cost, head_apart=head_apart)
    left = cost.reduced_bytes if over < ranks else 0.0
    return replace(cost, traffic=traffic, reduced_bytes=left, version=f"{cost.version} over {over}")


def laid_cost(cost: Cost, memory: StepMemory, *, head_apart: bool = True) -> Cost:
    """Return the costs of ranks in the layout of `memory`. head_apart: see `sharded_traffic`."""
    return offloaded_cost(sharded_cost(cost, memory, group=memory.ranks_in_step, head_apart=head_apart), memory)


def offloaded_cost(cost: Cost, memory: StepMemory) -> Cost:
    """Return the costs of ranks whose optimizer is on the host, if `memory` says it is.

    A lower bound: it assumes that processors update as fast as they read and write, and as hosts exchange with devices.
    """
    if not memory.offloads:
        return cost
    seconds = memory.host_update_bytes() / cost.copy_bytes_per_second * memory.ranks
    return replace(
        cost, ending=replace(cost.ending, update_seconds=seconds), version=f"{cost.version} optimizer on hosts"
    )
