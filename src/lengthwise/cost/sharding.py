"""How parameters lie over the ranks where nobody says it: whole on every rank where that leaves room, else a part.

Whole parameters move less, and ranks then wait only for the partners of a sequence; so they come first. By the formulas
of `cost.memory`: nothing runs, and the same numbers give the same choice on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from lengthwise.core.errors import MemoryShortage
from lengthwise.core.names import counted
from lengthwise.core.plan import RECOMPUTE_KINDS
from lengthwise.core.shape import ModelShape
from lengthwise.cost.capacity import RESERVED, STEP_TOKENS, tokens_within
from lengthwise.cost.memory import StepMemory

LEAST_TOKENS = 2048  # of a rank, below which GEMMs are small and whole parameters are not worth their room
LORA_RANK = 16
ZERO3_ALONE = "shard zero3 has no effect on one rank, which has all parameters"
_MOST_RANKS = 12_288


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardChoice:
    """A layout, and why."""

    shard: Literal["zero1", "zero3"]
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
) -> ShardChoice:
    """Return zero1 where a rank then holds `tokens` in a microbatch, else zero3; on one rank zero1.

    device_bytes: of one rank; None: not known, and zero1 is taken. kinds: of recomputation that may be taken. offload:
    the share that may be. keeps_whole: what allows no zero3.

    Raises:
        MemoryShortage: neither leaves room for 128 tokens.
    """
    if device_bytes is None:
        return ShardChoice(shard="zero1", why="how much memory there is could not be found")
    whole, cut = (replace(memory, shard=shard) for shard in ("zero1", "zero3"))
    room = device_bytes * (1 - RESERVED)
    held = [max(tokens_within(each, room, kind, offload) for kind in kinds) for each in (whole, cut)]
    kept = [f"{(each.state_bytes() + each.gathered_bytes()) / 1e9:.3g} GB" for each in (whole, cut)]
    device = f"{device_bytes / 1e9:.3g} GB a rank"
    can_cut = memory.ranks > 1 and keeps_whole is None
    if held[0] >= tokens or (held[0] and not can_cut) or (held[0] >= held[1] and held[0]):
        why = f"weights, gradients and states take {kept[0]} of {device}, and leave room for {held[0]:,} tokens"
        return ShardChoice(shard="zero1", why=why)
    if not can_cut or not held[1]:
        raise _nothing_fits(whole, cut if can_cut else None, device_bytes, kinds, keeps_whole)
    why = f"zero1 would take {kept[0]} of {device} for weights, gradients and states, and leave room for "
    why += f"{held[0]:,} tokens of the {tokens:,} wanted; zero3 takes {kept[1]}"
    return ShardChoice(shard="zero3", why=why)


def with_adapters(memory: StepMemory) -> StepMemory:
    """Return what LoRA on all linear layers of attention and MLP holds."""
    return replace(memory, trained=lora_params(memory.shape, LORA_RANK))


def lora_params(shape: ModelShape, rank: int) -> int:
    """Count the parameters of LoRA adapters of this rank on all linear layers of attention and MLP."""
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    sides = 2 * (shape.hidden + queries) + 2 * (shape.hidden + keys) + 3 * (shape.hidden + shape.intermediate)
    return shape.layers * rank * sides


def more_ranks(ranks: int) -> list[int]:
    """List twice as many ranks, and so on."""
    found = [ranks * 2]
    while found[-1] * 2 <= _MOST_RANKS:
        found.append(found[-1] * 2)
    return found


def _nothing_fits(
    whole: StepMemory, cut: StepMemory | None, device_bytes: float, kinds: Sequence[str], keeps_whole: str | None
) -> MemoryShortage:
    """Return the error with the bytes of all parts, and what would fit."""
    room = device_bytes * (1 - RESERVED)

    def fits(memory: StepMemory, offload: float = 0.0, kinds: Sequence[str] = kinds) -> bool:
        return any(tokens_within(memory, room, kind, offload) for kind in kinds)

    said = [f"zero1: {_parts(whole)}"] if cut is None else [f"zero1: {_parts(whole)}", f"zero3: {_parts(cut)}"]
    best, remedies = cut or whole, list[str]()
    if keeps_whole is not None and whole.ranks > 1 and fits(replace(whole, shard="zero3")):
        remedies.append(f"no {keeps_whole}, so that shard zero3 can be taken")
    if fits(best, kinds=RECOMPUTE_KINDS):
        remedies.append("recompute: auto")
    if fits(best, 1.0):
        remedies.append("offload: {store: host}")
    if whole.trained is None and fits(with_adapters(best)):
        remedies.append(f"LoRA ({_parts(with_adapters(best))})")
    ranks = [n for n in more_ranks(whole.ranks) if fits(replace(whole, shard="zero3", ranks=n))]
    if ranks and keeps_whole is None:
        remedies.append(f"{ranks[0]} ranks of as much memory each")
    return MemoryShortage(
        f"model {whole.shape.name}",
        expected=f"room for {STEP_TOKENS} tokens on {counted(whole.ranks, 'rank')} of {device_bytes / 1e9:.3g} GB each",
        got="; ".join(said),
        remedy=f"Use {', or '.join([*remedies, 'a smaller model'])}.",
    )


def _parts(memory: StepMemory) -> str:
    """Say what a rank keeps, part by part, in GB."""
    named = [(each / 1e9, name) for name, each in memory.state_parts().items()]
    named.append((memory.gathered_bytes() / 1e9, "gathered units"))
    total = sum(size for size, _ in named)
    return f"{total:.3g} GB ({', '.join(f'{name} {size:.3g}' for size, name in named if size)})"
