"""What a rank does in a step, as data: passes of microbatches through chunks of layers, and messages between stages.

A whole model is one stage of one chunk: each microbatch runs forward, then backward, in plan order. With more stages a
rank follows `stage_order`. Transfers have one order, (tick, 0) for the rings of a pass and (tick, 1) for the messages
after it, and each rank posts in this order: a transfer only waits for earlier ones.

If routers have a balance loss, all microbatches first run forward without gradients, and the ranks sum which experts
all tokens choose (`models.router`). A microbatch of whole models that is the last of all its ranks keeps its graph
instead and runs backward first, so that no rank holds two graphs. Ranks in lock-step have the same last microbatch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from typing import Literal, NamedTuple, TypeAlias

from lengthwise.core.plan import Plan
from lengthwise.core.shape import UNCUT
from lengthwise.program.lower import MicrobatchProgram, all_end_alone, last_on_all_ranks, lower_plan
from lengthwise.program.records import MutualSpans
from lengthwise.program.stage_order import stage_order

Kind: TypeAlias = Literal["counting", "forward", "backward"]


class Place(NamedTuple):
    """A microbatch, by its index in the plan, in a chunk of layers; chunks count over all stages of a replica."""

    microbatch: int
    chunk: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """One pass of a microbatch through a chunk of layers.

    prepares: forward pass that the host prepares first, to keep the device busy. reads_ahead: place whose offloaded
    activations return after this pass, for a backward that follows soon. sums_early: True if gradients may be reduced
    during it.
    """

    kind: Kind
    place: Place
    prepares: Place | None
    reads_ahead: Place | None
    sums_early: bool

    @property
    def is_forward(self) -> bool:
        """Whether the pass continues with the next chunk, not with the previous one."""
        return self.kind != "backward"


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """Hidden states, or their gradient, that the pass at `place` needs, to or from `stage`."""

    place: Place
    is_forward: bool
    stage: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """A rank's work at one tick: its pass, if it has one, then one grouped call of these messages."""

    tick: int
    action: Pass | None
    sends: Sequence[Message]
    receives: Sequence[Message]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepProgram:
    """The work of a rank in a step, in order.

    microbatches: microbatches of this rank, by their index in the plan. counting: turns before the ranks sum the
    choices of routers, None without a sum. turns: all other turns.
    """

    microbatches: Mapping[int, MicrobatchProgram]
    counting: Sequence[Turn] | None
    turns: Sequence[Turn]


_Kinds: TypeAlias = Mapping[int, tuple[Kind | None, Kind | None]]
"""The forward and backward passes that each microbatch of a rank runs, in order."""


def step_program(
    plan: Plan,
    replica: int,
    stage: int = 0,
    *,
    ranks_in_step: int = 1,
    train: bool = True,
    counts_routers: bool = False,
    mutual: MutualSpans | None = None,
) -> StepProgram:
    """Return the program of a stage of a replica (a rank, in plans) in a step.

    ranks_in_step, mutual: see `lower_plan`. train: True for backward passes. counts_routers: True with a balance loss.
    """
    lowered = lower_plan(plan, replica, ranks_in_step=ranks_in_step, mutual=mutual)
    microbatches = {each.index: each for each in lowered}
    counting, keeps, is_whole = None, frozenset[int](), plan.cut == UNCUT
    if train and counts_routers:
        keeps = last_on_all_ranks(plan, ranks_in_step=ranks_in_step) if is_whole else keeps
        counted: _Kinds = {each: ("forward" if each in keeps else "counting", None) for each in microbatches}
        counting = _turns(plan, stage, counted)
    kinds: _Kinds = {
        each: (None if each in keeps else "forward", "backward" if train else None)
        for each in sorted(microbatches, key=lambda each: each not in keeps)
    }
    early = train and is_whole and all_end_alone(plan, first=keeps, ranks_in_step=ranks_in_step)
    return StepProgram(microbatches=microbatches, counting=counting, turns=_turns(plan, stage, kinds, sums_early=early))


def _turns(plan: Plan, stage: int, kinds: _Kinds, *, sums_early: bool = False) -> list[Turn]:
    chunks = plan.cut.chunks
    stage_of, ticks = _clock(plan, kinds)
    passes: dict[int, tuple[Kind, Place]] = {}
    sends, receives = dict[int, list[Message]](), dict[int, list[Message]]()
    for (number, of_number), at in zip(kinds.items(), ticks, strict=True):
        steps = [step for step in range(2 * chunks) if of_number[step >= chunks] is not None]
        for step, following in zip_longest(steps, steps[1:]):
            tick, kind = at[step], of_number[step >= chunks]
            if stage_of[step] == stage and kind is not None:
                assert tick not in passes, f"stage {stage} has two passes at tick {tick}"
                passes[tick] = kind, Place(number, _chunk(step, chunks))
            if following is None or stage_of[step] == stage_of[following]:
                continue
            place = Place(number, _chunk(following, chunks))
            message = partial(Message, place=place, is_forward=following < chunks)
            if stage_of[step] == stage:
                sends.setdefault(tick, []).append(message(stage=stage_of[following]))
            elif stage_of[following] == stage:
                receives.setdefault(tick, []).append(message(stage=stage_of[step]))
    actions = dict(zip(sorted(passes), _passes([passes[tick] for tick in sorted(passes)], sums_early), strict=True))
    return [
        Turn(tick=tick, action=actions.get(tick), sends=sends.get(tick, ()), receives=receives.get(tick, ()))
        for tick in sorted({*passes, *sends, *receives})
    ]


def _clock(plan: Plan, kinds: _Kinds) -> tuple[list[int], list[list[int]]]:
    """Return the stage of each action of a microbatch, and the ticks of these microbatches' actions."""
    if plan.cut == UNCUT:  # nobody else goes by the ticks
        return [0, 0], [[2 * place, 2 * place + 1] for place in range(len(kinds))]
    order = stage_order([each.ranks for each in plan.microbatches], plan.cut)
    return order.action_stages.tolist(), order.ticks[list(kinds)].tolist()


def _chunk(step: int, chunks: int) -> int:
    return step if step < chunks else 2 * chunks - 1 - step


def _passes(ordered: Sequence[tuple[Kind, Place]], sums_early: bool) -> list[Pass]:
    """Return passes in order, with the host's work for later ones."""
    found, prepares, backward = list[Pass](), None, deque[Place | None]([None, None], 2)
    for kind, place in reversed(ordered):
        is_backward = kind == "backward"
        found.append(
            Pass(
                kind=kind,
                place=place,
                prepares=prepares if is_backward else None,
                reads_ahead=backward[1] or backward[0],
                sums_early=sums_early and not found,
            )
        )
        backward.append(place if is_backward else None)
        prepares = prepares if is_backward else place
    return found[::-1]
