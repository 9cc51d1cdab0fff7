"""What one stage of one replica does in a step: its actions, and the hidden states that it sends and receives.

The stages of a replica are neighbouring ranks (`rank_of`). Transfers have one order, (tick, 0) for the rings of an
action and (tick, 1) for what a tick sends on, by which each rank posts: one only waits for earlier ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lengthwise.core.plan import Plan
from lengthwise.program.stage_order import stage_order


def rank_of(replica: int, stage: int, stages: int) -> int:
    """Return the rank of a stage of a replica: the stages of a replica are next to each other."""
    return replica * stages + stage


@dataclass(frozen=True, slots=True, kw_only=True)
class StageAction:
    """One pass of a microbatch through a chunk of layers; chunks count over all stages of a replica."""

    microbatch: int
    chunk: int
    is_forward: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class StageMessage:
    """Hidden states of a microbatch, or their gradient, for `chunk` in a pass, to or from `stage`."""

    microbatch: int
    chunk: int
    is_forward: bool
    stage: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTurn:
    """What a stage does at one tick: its action, if it has one, then one grouped call of these messages."""

    tick: int
    action: StageAction | None
    sends: tuple[StageMessage, ...]
    receives: tuple[StageMessage, ...]


def stage_turns(plan: Plan, replica: int, stage: int, *, forward_only: bool = False) -> list[StageTurn]:
    """List what a stage of a replica does, in its order; `forward_only`: no backward passes, as in an evaluation."""
    order, chunks = stage_order([each.ranks for each in plan.microbatches], plan.cut), plan.cut.chunks
    stage_of = order.action_stages.tolist()
    steps = chunks if forward_only else 2 * chunks
    own = [number for number, each in enumerate(plan.microbatches) if replica in each.ranks]
    actions: dict[int, StageAction] = {}
    sends, receives = dict[int, list[StageMessage]](), dict[int, list[StageMessage]]()
    for number in own:
        for step, tick in enumerate(order.ticks[number, :steps].tolist()):
            if stage_of[step] == stage:
                assert tick not in actions, f"stage {stage} of replica {replica} has two actions at tick {tick}"
                actions[tick] = StageAction(microbatch=number, chunk=_chunk(step, chunks), is_forward=step < chunks)
            if step + 1 == steps or stage_of[step] == stage_of[step + 1] or stage not in stage_of[step : step + 2]:
                continue
            is_sender = stage_of[step] == stage
            message = StageMessage(
                microbatch=number,
                chunk=_chunk(step + 1, chunks),
                is_forward=step + 1 < chunks,
                stage=stage_of[step + 1] if is_sender else stage_of[step],
            )
            (sends if is_sender else receives).setdefault(tick, []).append(message)
    return [
        StageTurn(
            tick=tick,
            action=actions.get(tick),
            sends=tuple(sends.get(tick, ())),
            receives=tuple(receives.get(tick, ())),
        )
        for tick in sorted({*actions, *sends, *receives})
    ]


def _chunk(step: int, chunks: int) -> int:
    return step if step < chunks else 2 * chunks - 1 - step


def cut_layers(
    layer_seconds: Sequence[float], chunks: int, *, first_seconds: float = 0.0, last_seconds: float = 0.0
) -> list[range]:
    """Cut layers into chunks, none empty, so that the slowest takes the least time; of equal cuts the last is smallest.

    first_seconds, last_seconds: what the first chunk takes beside its layers (the embedding), and the last one (head
    and loss). Costs chunks x layers^2.
    """
    count = len(layer_seconds)
    assert 1 <= chunks <= count, f"{chunks} chunks of {count} layers"
    sums = np.concatenate(([0.0], np.cumsum(layer_seconds)))
    best = np.full((chunks + 1, count + 1), np.inf)
    best[chunks, count], first = 0.0, np.zeros((chunks, count + 1), dtype=np.int64)
    for chunk in reversed(range(chunks)):
        for start in range(chunk, count - (chunks - chunk) + 1):
            stops = np.arange(start + 1, count - (chunks - chunk - 1) + 1)
            took = sums[stops] - sums[start] + (first_seconds if chunk == 0 else 0.0)
            took = took + (last_seconds if chunk == chunks - 1 else 0.0)
            slowest = np.maximum(took, best[chunk + 1, stops])
            place = len(stops) - 1 - int(np.argmin(slowest[::-1]))
            best[chunk, start], first[chunk, start] = slowest[place], stops[place]
    cuts, start = list[range](), 0
    for chunk in range(chunks):
        stop = int(first[chunk, start])
        cuts.append(range(start, stop))
        start = stop
    return cuts
