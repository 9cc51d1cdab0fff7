"""What the stages of pipelines run: their actions in order, and all that their devices are given (`fake_nccl`)."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from itertools import product

from lengthwise.core.plan import Microbatch, Plan
from lengthwise.program.stage_order import StageOrder
from lengthwise.program.stage_program import rank_of
from lengthwise.program.step_program import Message, Pass, step_program
from testing.fake_nccl import Call, Compute, Item, Wait
from testing.order import Operation

Device = tuple[int, int]  # rank, stage
Action = tuple[int, int]  # microbatch, number of the action
Seconds = Callable[[int, int], float]


def device_actions(microbatches: Sequence[Microbatch], order: StageOrder) -> dict[Device, list[Action]]:
    """List what each stage of each rank runs, in its order."""
    stage_of = order.action_stages.tolist()
    actions: dict[Device, list[Action]] = {}
    for numbers, steps in order.together():
        for number, step in zip(numbers.tolist(), steps.tolist(), strict=True):
            for rank in microbatches[number].ranks:
                actions.setdefault((rank, stage_of[step]), []).append((number, step))
    return actions


def stage_items(plan: Plan, forward: Seconds, backward: Seconds, send: Seconds) -> list[list[Item]]:
    """List what the ranks of a plan of kind `pipeline` give their devices, as `engine.step` does.

    Seconds are functions of microbatch and replica: of passes through a chunk, and of a message to the next stage. An
    action of several replicas begins with a ring of them all.
    """
    stages, items = plan.schedule["stages"], list[list[Item]]()
    for replica, stage in product(range(plan.ranks), range(stages)):
        arriving, sent, own = dict[object, Call](), deque[Call](), list[Item]()
        for turn in step_program(plan, replica, stage).turns:
            if turn.action is not None:
                key = named(turn.action)
                own += [Wait(call=arriving.pop(key))] if key in arriving else []
                replicas = plan.microbatches[turn.action.place.microbatch].ranks
                if len(replicas) > 1:
                    peers = [rank_of(each, stage, stages) for each in replicas if each != replica]
                    both = [
                        Operation(kind=kind, peer=peer, size=key, payload=0.0)
                        for kind in ("send", "receive")
                        for peer in peers
                    ]
                    ring = Call(communicator="transfers", operations=both, label=("ring", *key))
                    own += [ring, Wait(call=ring)]
                seconds = forward if turn.action.is_forward else backward
                own.append(Compute(label=key, seconds=seconds(turn.action.place.microbatch, replica)))
            messages = [("send", each) for each in turn.sends] + [("receive", each) for each in turn.receives]
            if messages:
                operations = [
                    Operation(
                        kind=kind,
                        peer=rank_of(replica, each.stage, stages),
                        size=named(each),
                        payload=send(each.place.microbatch, replica),
                    )
                    for kind, each in messages
                ]
                call = Call(communicator="stages", operations=operations, label=("messages of tick", turn.tick))
                arriving |= {named(each): call for each in turn.receives}
                own.append(call)
                sent.append(call)
                if len(sent) > 2 * stages:
                    own.append(Wait(call=sent.popleft()))
        items.append(own)
    return items


def named(each: Pass | Message) -> tuple[int, int, bool]:
    """Return which pass of which chunk this is, or a message is for."""
    return each.place.microbatch, each.place.chunk, each.is_forward
