"""One rank's rounds and blocks of a pass by ring step, lowered once per microbatch in O(degree)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor

from lengthwise.attention.packs import Pack, PackKernel, joined_pack, lengths_of, rows_of, runs_of, to_device
from lengthwise.program import ALL_HEADS, BlockTask, Content, HeadRange, MicrobatchProgram, RankRound, Transfer

Shard = tuple[int, int]
"""(piece, owner): the tokens of one ring position of one piece."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinedBlocks:
    """Blocks in one call, of their queries and keys `rows` and `cols`, as `BlockTask` counts them.

    causal: True if queries see no later key among `cols`. pack: None for one block, and a kernel without packs.
    """

    piece: int
    owner: int
    heads: HeadRange
    causal: bool
    pack: Pack | None
    rows: slice | Tensor
    cols: slice | Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class RingStep:
    """One ring step on one rank.

    last_used: shards for no later step. packs, joined: in place of diagonal tasks, and of others.
    """

    sends: tuple[Transfer, ...]
    receives: tuple[Transfer, ...]
    tasks: tuple[BlockTask, ...]
    last_used: tuple[Shard, ...]
    packs: Mapping[HeadRange, tuple[Pack, ...]] = field(default_factory=dict)
    joined: tuple[JoinedBlocks, ...] = ()


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
    program: MicrobatchProgram,
    rank: int,
    packing: Callable[..., tuple[Pack, ...]] | None,
    joining: Callable[[Sequence[BlockTask]], tuple[tuple[BlockTask, ...], tuple[JoinedBlocks, ...]]] | None = None,
    *,
    padding: int = 0,
) -> tuple[RingPass, RingPass]:
    """Return a rank's (forward, backward) ring steps.

    packing, joining: `pack_documents` and `join_blocks` with the kernel's and device's arguments; packing is None if
    the kernel takes no packs. padding: rows after the tokens, a document of packs. Steps without work stay, for order.
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
    calls = [(each, ()) if joining is None else joining(each) for each in tasks]
    forward, backward = (_ring_pass(rounds, tasks, calls, packs) for rounds in passes)
    return forward, backward


def _ring_pass(
    rounds: Sequence[RankRound],
    tasks: Sequence[tuple[BlockTask, ...]],
    calls: Sequence[tuple[tuple[BlockTask, ...], tuple[JoinedBlocks, ...]]],
    packs: Mapping[HeadRange, tuple[Pack, ...]],
) -> RingPass:
    count = max(len(tasks), len(rounds))
    rounds = [*rounds, *[RankRound()] * (count - len(rounds))]
    calls = [*calls, *[((), ())] * (count - len(calls))]
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
            tasks=calls[number][0],
            joined=calls[number][1],
            last_used=tuple(last_used[number]),
            packs={} if number else packs,
        )
        for number, each in enumerate(rounds)
    )
    merged = frozenset(task.heads for task in blocks if not task.causal)
    return RingPass(steps=tuple(steps), used=frozenset(last_use), summed=frozenset(summed), merged=merged)


def join_blocks(
    tasks: Sequence[BlockTask], *, device: torch.device, kernel: PackKernel | None
) -> tuple[tuple[BlockTask, ...], tuple[JoinedBlocks, ...]]:
    """Return the blocks of a ring step that stay alone, and calls of several; without packs only those `ahead`.

    Blocks with a mask stay alone. A call has each query and each key once, so that one merge takes its results.
    """
    ahead = _ahead(tasks, device, in_packs=kernel is not None)
    tasks = tuple(task for task in tasks if not task.ahead)
    if kernel is None:
        return tasks, ahead
    alone, sets, full_from = list[BlockTask](), list[list[BlockTask]](), kernel.full_from
    for task in tasks:
        is_long = full_from is not None and min(_sizes(task)) >= full_from
        if is_long or task.causal or task.window is not None:
            alone.append(task)
            continue
        fitting = next((each for each in sets if _follows(each[-1], task)), None)
        if fitting is None:
            sets.append([task])
        else:
            fitting.append(task)
    runs = [[each[number] for number in run] for each in sets for run in runs_of([max(_sizes(one)) for one in each])]
    alone += [run[0] for run in runs if len(run) == 1]
    return tuple(alone), (*(_joined(run, device) for run in runs if len(run) > 1), *ahead)


def _sizes(task: BlockTask) -> tuple[int, int]:
    return task.q_stop - task.q_start, task.kv_stop - task.kv_start


def _follows(before: BlockTask, task: BlockTask) -> bool:
    is_same = (before.piece, before.owner, before.heads) == (task.piece, task.owner, task.heads)
    return is_same and before.q_stop <= task.q_start and before.kv_stop <= task.kv_start


def _joined(tasks: Sequence[BlockTask], device: torch.device) -> JoinedBlocks:
    first, (queries, keys) = tasks[0], zip(*map(_sizes, tasks), strict=True)
    return JoinedBlocks(
        piece=first.piece,
        owner=first.owner,
        heads=first.heads,
        causal=False,
        pack=joined_pack(queries, keys, device),
        rows=_places([range(each.q_start, each.q_stop) for each in tasks], device),
        cols=_places([range(each.kv_start, each.kv_stop) for each in tasks], device),
    )


def _ahead(tasks: Sequence[BlockTask], device: torch.device, *, in_packs: bool) -> tuple[JoinedBlocks, ...]:
    """Return the calls of blocks `ahead`, which are causal ones of their queries and keys in reversed order."""
    calls = defaultdict[object, list[BlockTask]](list)
    for number, task in enumerate(tasks):
        if task.ahead:
            calls[(task.piece, task.heads) if in_packs else number].append(task)
    return tuple(
        JoinedBlocks(
            piece=those[0].piece,
            owner=those[0].owner,
            heads=those[0].heads,
            causal=True,
            pack=joined_pack([_sizes(each)[0] for each in those], None, device) if in_packs else None,
            rows=_reversed([range(each.q_start, each.q_stop) for each in those], device),
            cols=_reversed([range(each.kv_start, each.kv_stop) for each in those], device),
        )
        for those in calls.values()
    )


def _reversed(spans: Sequence[range], device: torch.device) -> Tensor:
    return to_device(torch.tensor([row for span in spans for row in reversed(span)], device="cpu"), device)


def _places(spans: Sequence[range], device: torch.device) -> slice | Tensor:
    """Return the rows of spans: a slice if nothing lies between them."""
    if all(one.stop == other.start for one, other in pairwise(spans)):
        return slice(spans[0].start, spans[-1].stop)
    return to_device(rows_of([each.start for each in spans], [len(each) for each in spans]), device)
