"""A rank's part of a step before its end: forward and backward of its microbatches, in plan order.

A model whose config asks for the routers' balance loss runs its microbatches forward once more before, without
gradients, to count what every token of the global batch chooses (see `models.router`).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lengthwise.attention import BlockKernel, PlannedAttention
from lengthwise.comm import Transport
from lengthwise.core.plan import Plan
from lengthwise.models import RouterBalance, count_choices, has_balance_loss, model_loss, model_router_logits
from lengthwise.program import MicrobatchProgram, lower_plan
from lengthwise.train.batch import StepBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What a rank did: its summed loss, and seconds in which it did not wait for another rank.

    `router_loss` is its part of the routers' balance loss; the parts of all ranks sum to that of the global batch.
    """

    loss_sum: float
    busy_seconds: float
    router_loss: float = 0.0


def run_plan(
    model: nn.Module,
    plan: Plan,
    batch: StepBatch,
    transport: Transport,
    kernel: BlockKernel,
    *,
    name: str,
    train: bool = True,
) -> Work:
    """Run the microbatches of this rank and let gradients add up in the model's parameters.

    The loss is divided once, by the loss tokens of the global batch. Between the first forward and the last backward
    no collective is issued, so that a rank can never wait in one for another that waits for its next ring message.
    """
    start, waited = time.perf_counter(), transport.clock.waited_seconds
    loss_sum = router_loss = 0.0
    programs = lower_plan(plan, transport.rank)
    balance = None
    if train and has_balance_loss(model.config):
        balance = _count_routers(model, programs, batch, transport, kernel, name)
    for number, program in enumerate(programs, start=1):
        transport.phase = f"{name}, microbatch {number} of {len(programs)} forward"
        planned = PlannedAttention(program, transport, kernel)
        tensors, router_logits = batch.tensors(program.segments(transport.rank)), list[Tensor]()
        with torch.set_grad_enabled(train):
            loss = model_loss(model, planned, *tensors, hear_router=router_logits.extend if balance else None)
        if train:
            objective = loss / batch.loss_tokens
            if balance is not None:
                share = balance.share(router_logits)
                objective = objective + balance.coefficient * share
                router_loss += share.item()
            transport.phase = f"{name}, microbatch {number} of {len(programs)} backward"
            objective.backward()
        loss_sum += loss.item()
    waited = transport.clock.waited_seconds - waited
    busy_seconds = time.perf_counter() - start - waited
    return Work(loss_sum=loss_sum, router_loss=router_loss, busy_seconds=busy_seconds)


@torch.no_grad()
def _count_routers(
    model: nn.Module,
    programs: Sequence[MicrobatchProgram],
    batch: StepBatch,
    transport: Transport,
    kernel: BlockKernel,
    name: str,
) -> RouterBalance:
    """Run all microbatches forward, and sum over all ranks what the tokens choose, after each rank's last ring."""
    counts = count_choices(model, [])
    for number, program in enumerate(programs, start=1):
        transport.phase = f"{name}, microbatch {number} of {len(programs)} counting"
        planned = PlannedAttention(program, transport, kernel)
        input_ids, position_ids, _ = batch.tensors(program.segments(transport.rank))
        counts += count_choices(model, model_router_logits(model, planned, input_ids, position_ids))
    transport.phase = f"{name}, sum of the routers' counts"
    transport.all_reduce(counts)
    return RouterBalance(model, counts)
