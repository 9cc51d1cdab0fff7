"""Orders of pipeline stages run without clocks, under the strictest rules: what `stage_order` is proved with."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

from lengthwise.core.errors import PlanError
from lengthwise.core.plan import Microbatch
from lengthwise.program.stage_order import StageOrder

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
    forward = [chunk % stages for chunk in range(stages * virtual)]
    stage_of, steps = forward + forward[::-1], 2 * stages * virtual
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
