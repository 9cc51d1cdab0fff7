"""A rank's part of a step before its end: forward and backward of its microbatches, in plan order."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from torch import nn

from lengthwise.attention import BlockKernel, PlannedAttention
from lengthwise.comm import Transport
from lengthwise.core.plan import Plan
from lengthwise.models import model_loss
from lengthwise.program import lower_plan
from lengthwise.train.batch import StepBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What a rank did: its summed loss, and seconds in which it did not wait for another rank."""

    loss_sum: float
    busy_seconds: float


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

    The loss is divided once, by the loss tokens of the global batch; no collective is issued here, so that a rank can
    never wait in one for another that waits for its next ring message.
    """
    start, waited = time.perf_counter(), transport.clock.waited_seconds
    loss_sum = 0.0
    programs = lower_plan(plan, transport.rank)
    for number, program in enumerate(programs, start=1):
        transport.phase = f"{name}, microbatch {number} of {len(programs)} forward"
        planned = PlannedAttention(program, transport, kernel)
        tensors = batch.tensors(program.segments(transport.rank))
        with torch.set_grad_enabled(train):
            loss = model_loss(model, planned, *tensors)
        if train:
            transport.phase = f"{name}, microbatch {number} of {len(programs)} backward"
            (loss / batch.loss_tokens).backward()
        loss_sum += loss.item()
    waited = transport.clock.waited_seconds - waited
    return Work(loss_sum=loss_sum, busy_seconds=time.perf_counter() - start - waited)
