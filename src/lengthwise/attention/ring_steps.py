"""One rank's rounds and blocks of a pass by ring step, lowered once per microbatch in O(degree)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from lengthwise.attention.packs import Pack, lengths_of
from lengthwise.program import ALL_HEADS, BlockTask, Content, HeadRange, MicrobatchProgram, RankRound, Transfer

Shard = tuple[int, int]
"""(piece, owner): the tokens of one ring position of one piece."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RingStep:
    """One ring step on one rank. last_used: shards for no later step. packs: packs in place of diagonal tasks."""

    sends: tuple[Transfer, ...]
    receives: tuple[Transfer, ...]
    tasks: tuple[BlockTask, ...]
    last_used: tuple[Shard, ...]
    packs: Mapping[HeadRange, tuple[Pack, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class RingPass:
    """A rank's ring steps of one pass.

    used: shards for blocks or transfers. summed: ranges of heads with blocks or transfers; gradients of other ranges
    come from packs alone. merged: ranges with blocks off the diagonal, whose results are merged.
    """

    steps: tuple[RingStep, ...]
    used: frozenset[Shard]
    summed: frozenset[HeadRange]
    merged: frozenset[HeadRange]


def ring_steps_of(
    program: MicrobatchProgram, rank: int, packing: Callable[..., tuple[Pack, ...]] | None, *, padding: int = 0
) -> tuple[RingPass, RingPass]:
    """Return a rank's (forward, backward) ring steps.

    packing: `pack_documents` with the kernel's and device's arguments, None if the kernel takes no packs. padding: rows
    after the tokens, a document of packs. Steps without work stay, for the order.
    """
    tasks = [program.tasks(rank, number) for number in range(program.ring_steps)]
    packs: dict[HeadRange, tuple[Pack, ...]] = {}
    if packing is not None:
        assert not any(task.causal for each in tasks[1:] for task in each), "a rank's own keys come first"
        ranges = tuple(program.row_starts(rank))
        padded = padding if ranges == (ALL_HEADS,) else 0  # split heads have rows of tokens only
        for heads in ranges:
            lengths = lengths_of([task for task in tasks[0] if task.heads == heads])
            if lengths or padded:
                packs[heads] = packing(lengths, window=program.window, padding=padded)
        tasks[0] = tuple(task for task in tasks[0] if not task.causal)
    passes = (program.forward_rounds_of(rank), program.backward_rounds_of(rank))
    forward, backward = (_ring_pass(rounds, tasks, packs) for rounds in passes)
    return forward, backward


def _ring_pass(
    rounds: Sequence[RankRound], tasks: Sequence[tuple[BlockTask, ...]], packs: Mapping[HeadRange, tuple[Pack, ...]]
) -> RingPass:
    count = max(len(tasks), len(rounds))
    rounds = [*rounds, *[RankRound()] * (count - len(rounds))]
    tasks = [*tasks, *[()] * (count - len(tasks))]
    last_use: dict[Shard, int] = {}
    for number, (each, blocks) in enumerate(zip(rounds, tasks, strict=True)):
        used = (*blocks, *(send for send in each.sends if send.content == Content.KV))
        last_use.update({(one.piece, one.owner): number for one in used})
    last_used: dict[int, list[Shard]] = defaultdict(list)
    for shard, number in last_use.items():
        last_used[number].append(shard)
    blocks = [task for each in tasks for task in each]
    summed = {one.heads for each in rounds for one in (*each.sends, *each.receives)} | {task.heads for task in blocks}
    steps = (
        RingStep(
            sends=each.sends,
            receives=each.receives,
            tasks=tasks[number],
            last_used=tuple(last_used[number]),
            packs={} if number else packs,
        )
        for number, each in enumerate(rounds)
    )
    merged = frozenset(task.heads for task in blocks if not task.causal)
    return RingPass(steps=tuple(steps), used=frozenset(last_use), summed=frozenset(summed), merged=merged)
