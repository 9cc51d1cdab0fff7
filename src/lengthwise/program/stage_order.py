"""Interleaved 1F1B as data: which stage of which pipeline runs what, in one order that holds for all of them.

A rank is a pipeline of p stages; with v virtual ones stage s holds the chunks of layers s, s + p, .. s + (v - 1) p. A
microbatch goes forward through the p v chunks and backward again: 2 p v actions. Each stage of each rank runs its
actions by their ticks: so nothing can deadlock (docs/decisions/stage-order.md). Costs O(microbatches x p v).
Megatron-LM's interleaving (arXiv 2104.04473, section 2.2).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lengthwise.core.errors import PlanError
from lengthwise.core.plan import Microbatch

Whole = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageOrder:
    """The order of a step's actions: `ticks[i, j]` is the tick of action j of microbatch i.

    Actions 0 .. p v - 1 are its forward passes through the chunks, the other p v its backward passes, last chunk first.
    """

    stages: int
    virtual: int
    ticks: Whole

    @property
    def chunks(self) -> int:
        """Chunks of layers of a rank, over all its stages."""
        return self.stages * self.virtual

    @property
    def action_stages(self) -> Whole:
        """The stage at which each of the 2 p v actions of a microbatch runs."""
        return _action_stages(self.stages, self.virtual)

    def together(self) -> list[tuple[Whole, Whole]]:
        """List (microbatches, actions) of each tick, ascending; what shares a tick shares no stage of any rank."""
        flat = self.ticks.ravel()
        order = np.argsort(flat, kind="stable")
        borders = np.flatnonzero(np.diff(flat[order])) + 1
        return [(part // (2 * self.chunks), part % (2 * self.chunks)) for part in np.split(order, borders)]


def _action_stages(stages: int, virtual: int) -> Whole:
    forward = np.arange(stages * virtual) % stages
    return np.concatenate((forward, forward[::-1]))


def stage_order(ranks_of: Sequence[Sequence[int]], stages: int, virtual: int) -> StageOrder:
    """Order the actions of microbatches, given as the ranks of each in the plan's order.

    Slot k of a microbatch is one after the latest slot of its ranks; h = 1 for v = 1, else 2. Ticks:

        forward, stage s, its chunk c    2 n(c) + h s                                n(c) = (k // p) v p + c p + k % p
        backward                         2 n(v - 1 - c) + 2 (v - 1) p + 2 h (p - 1) + 1 - h s
    """
    slots = _slots(ranks_of)
    stride, apart = stages * virtual, 1 if virtual == 1 else 2
    chunk, stage = np.divmod(np.arange(stride), stages)
    first = ((slots // stages) * stride + slots % stages)[:, None]
    forward = 2 * (first + chunk * stages) + apart * stage
    backward = 2 * (first + (virtual - 1 - chunk) * stages) + 2 * (virtual - 1) * stages + 1
    backward += apart * (2 * (stages - 1) - stage)
    return StageOrder(stages=stages, virtual=virtual, ticks=np.concatenate((forward, backward[:, ::-1]), axis=1))


def _slots(ranks_of: Sequence[Sequence[int]]) -> Whole:
    last: dict[int, int] = {}
    slots = np.empty(len(ranks_of), dtype=np.int64)
    for number, ranks in enumerate(ranks_of):
        slots[number] = slot = 1 + max(last.get(rank, -1) for rank in ranks)
        last.update(dict.fromkeys(ranks, slot))
    return slots


Device = tuple[int, int]  # rank, stage
Action = tuple[int, int]  # microbatch, number of the action


def device_actions(microbatches: Sequence[Microbatch], order: StageOrder) -> dict[Device, list[Action]]:
    """List what each stage of each rank runs, in its order."""
    stage_of = order.action_stages.tolist()
    actions: dict[Device, list[Action]] = {}
    for numbers, steps in order.together():
        for number, step in zip(numbers.tolist(), steps.tolist(), strict=True):
            for rank in microbatches[number].ranks:
                actions.setdefault((rank, stage_of[step]), []).append((number, step))
    return actions


def check_stage_actions(
    actions: Mapping[Device, Sequence[Action]], microbatches: Sequence[Microbatch], stages: int, virtual: int
) -> int:
    """Run lists of actions without clocks, under the strictest rules; return how many messages were sent.

    A stage runs its list in order. An action needs all ranks of its microbatch at it, and on each rank the message of
    the action before; messages between two stages arrive in the order in which they were sent.

    Raises:
        PlanError: stages that wait for each other for ever, a message that comes out of order, or one never received.
    """
    steps = 2 * stages * virtual
    stage_of = _action_stages(stages, virtual).tolist()
    places, links, sent = dict.fromkeys(actions, 0), dict[tuple[Device, Device], deque[Action]](), 0

    def head(device: Device) -> Action | None:
        place = places.get(device, 0)
        return actions[device][place] if device in actions and place < len(actions[device]) else None

    def link(rank: int, step: int) -> deque[Action] | None:
        """Find the messages that wait between the stages of two neighbouring actions; None where it is one stage."""
        if not 0 < step < steps or stage_of[step - 1] == stage_of[step]:
            return None
        return links.setdefault(((rank, stage_of[step - 1]), (rank, stage_of[step])), deque())

    waiting = deque(actions)
    while waiting:
        device = waiting.popleft()
        if (action := head(device)) is None:
            continue
        number, step = action
        ranks = microbatches[number].ranks
        inbound = [link(rank, step) for rank in ranks]
        if any(head((rank, stage_of[step])) != action for rank in ranks) or any(box == deque() for box in inbound):
            continue  # looked at again when one of its ranks, or what sends to it, has moved on
        for rank, box in zip(ranks, inbound, strict=True):
            if box is not None and (got := box.popleft()) != action:
                raise _unordered(rank, stage_of[step], f"the message of {_named(action, steps)}", _named(got, steps))
            if step + 1 < steps and (outbound := link(rank, step + 1)) is not None:
                outbound.append((number, step + 1))
                sent += 1
            places[rank, stage_of[step]] += 1
            waiting += [(rank, stage_of[step]), (rank, stage_of[min(step + 1, steps - 1)])]
            waiting += [(other, stage_of[step]) for other in _partners(head((rank, stage_of[step])), microbatches)]
    for rank, stage in actions:
        if (left := head((rank, stage))) is not None:
            raise _unordered(rank, stage, "every action to come up", f"{_named(left, steps)} waiting for ever")
    for (_, (rank, stage)), box in links.items():
        if box:
            raise _unordered(rank, stage, "every message to be received", f"that of {_named(box[0], steps)} left")
    return sent


def _partners(action: Action | None, microbatches: Sequence[Microbatch]) -> tuple[int, ...]:
    return () if action is None else microbatches[action[0]].ranks


def _named(action: Action, steps: int) -> str:
    number, step = action
    return f"the {'forward' if step < steps // 2 else 'backward'} pass of microbatch {number} (action {step})"


def _unordered(rank: int, stage: int, expected: str, got: str) -> PlanError:
    return PlanError(
        f"rank {rank}, stage {stage}", expected=expected, got=got, remedy="Order all stages by `stage_order`."
    )
