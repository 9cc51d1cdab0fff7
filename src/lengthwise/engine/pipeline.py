"""A rank's part of a step where it is a stage of a pipeline: the actions of its stage, tick by tick.

1. `program.stage_turns` says what comes when, the same for all ranks: an action, then one grouped call of messages.
2. A forward takes the hidden states of the stage before and gives its own on; a backward does so with gradients.
3. Rings of an action run among the replicas of the stage, which are all at that action.
4. Before an action it waits for its message, which was posted turns ago; what it sent it waits for once it holds more
   than a pipeline's worth of them.

Of a microbatch a stage keeps what backward needs from its forward to its backward: at most p - s of them (v = 1).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lengthwise.attention import ActivationPolicy, BlockKernel, PlannedAttention, to_device
from lengthwise.comm import Mesh, Pending
from lengthwise.core.plan import Plan
from lengthwise.cost import LOGITS_AT_ONCE
from lengthwise.engine.batch import StepBatch
from lengthwise.engine.memory import SMALLER_MICROBATCHES, reporting_shortage
from lengthwise.engine.objective import NextToken, Objective
from lengthwise.engine.parameters import Parameters
from lengthwise.engine.step import RankResult
from lengthwise.models import ModelStage, apply_policy, run_chunk
from lengthwise.program import MicrobatchProgram, head_peers, lower_plan
from lengthwise.program.stage_program import StageAction, StageMessage, StageTurn, stage_turns


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """Of which a rank is a stage: its part of the model, and its place."""

    stage: ModelStage
    mesh: Mesh
    virtual: int

    @property
    def stages(self) -> int:
        """The stages of each replica."""
        return self.mesh.stages


_Key = tuple[int, int, bool]  # of an action: microbatch, chunk, whether it is forward


def run_stage(
    stage: ModelStage,
    plan: Plan,
    batch: StepBatch,
    mesh: Mesh,
    kernel: BlockKernel,
    *,
    name: str,
    train: bool = True,
    logits_at_once: int | None = LOGITS_AT_ONCE,
    objective: Objective | None = None,
    parameters: Parameters | None = None,
) -> RankResult:
    """Run the actions of this rank's stage and let gradients add up in the model's parameters.

    As `engine.step.run_plan`, for a plan whose ranks are the replicas of `mesh`; the loss is that of the last stage,
    0 elsewhere.

    Raises:
        MemoryShortage: a microbatch does not fit on the device.
    """
    transport = mesh.replicas
    device = next(stage.model.parameters()).device
    if parameters is not None:
        parameters.published()  # no transfer may be posted while values arrive
    interval = transport.clock.start(device)
    programs = {program.index: program for program in lower_plan(plan, mesh.replica)}
    transport.phase = f"{name}, connecting"
    transport.connect(head_peers(tuple(programs.values()), mesh.replica))
    mesh.connect_stages()
    run = _StageStep(
        stage=stage,
        batch=batch,
        mesh=mesh,
        kernel=kernel,
        programs=programs,
        name=name,
        objective=objective or NextToken(batch=batch, divisor=batch.loss_weight, logits_at_once=logits_at_once),
        train=train,
        device=device,
    )
    with reporting_shortage(
        lambda: f"rank {mesh.world.rank}, {transport.phase}",
        needs=lambda: f"microbatches of up to {run.most_tokens()} tokens",
        remedy=SMALLER_MICROBATCHES,
    ):
        loss_sum = run.run(stage_turns(plan, mesh.replica, mesh.stage, forward_only=not train))
        if train and parameters is not None:
            transport.phase = f"{name}, sum of gradients"
            parameters.begin_reducing()
    spent = interval.stop()
    return RankResult(
        loss_sum=loss_sum.item(), busy_seconds=spent.busy_seconds, ring_wait_seconds=spent.transfer_seconds
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kept:
    """What backward needs of a forward: what came in (None: ids), and what it gave on, or its loss."""

    hidden: Tensor | None
    output: Tensor


@dataclass(slots=True, kw_only=True)
class _StageStep:
    stage: ModelStage
    batch: StepBatch
    mesh: Mesh
    kernel: BlockKernel
    programs: dict[int, MicrobatchProgram]
    name: str
    objective: Objective
    train: bool
    device: torch.device
    _arriving: dict[_Key, tuple[Pending, Tensor]] = field(default_factory=dict)
    _attentions: dict[_Key, PlannedAttention] = field(default_factory=dict)
    _kept: dict[tuple[int, int], _Kept] = field(default_factory=dict)
    _leaving: dict[_Key, Tensor] = field(default_factory=dict)
    _sent: deque[Pending] = field(default_factory=deque)
    _windows: frozenset[int | None] = frozenset()

    def run(self, turns: Sequence[StageTurn]) -> Tensor:
        """Take all turns; return the summed loss, (), in fp64."""
        loss_sum = torch.zeros((), dtype=torch.float64, device=self.device)
        for turn in turns:
            if turn.action is not None:
                self._enter(turn.action)
                if turn.action.is_forward:
                    loss_sum += self._forward(turn.action)
                else:
                    self._backward(turn.action)
            self._post(turn)
        while self._sent:
            self._sent.popleft().wait()
        return loss_sum

    def most_tokens(self) -> int:
        """Count the tokens of the largest microbatch of this replica."""
        rank = self.mesh.replica
        return max(sum(each.num_tokens for each in program.segments(rank)) for program in self.programs.values())

    def _enter(self, action: StageAction) -> None:
        what = "forward" if action.is_forward else "backward"
        self.mesh.replicas.phase = (
            f"{self.name}, stage {self.mesh.stage}, microbatch {action.microbatch + 1} of the plan {what}, "
            f"chunk {action.chunk}"
        )

    def _forward(self, action: StageAction) -> Tensor:
        """Run a chunk forward; return its loss, 0 of a chunk that is not the last."""
        stage, number, chunk = self.stage, action.microbatch, action.chunk
        planned = self._attention(number, chunk)
        del self._attentions[number, chunk, True]
        planned.lower(self._windows, self.device)
        segments = self.programs[number].segments(self.mesh.replica)
        tensors = [to_device(each, self.device) for each in self.batch.tensors(segments)]
        hidden = None if stage.is_first(chunk) else self._take(action)
        if hidden is not None and self.train:
            hidden.requires_grad_()
        recompute = self.programs[number].microbatch.recompute if self.train else "none"
        policy = ActivationPolicy(recompute=recompute)
        with (
            torch.set_grad_enabled(self.train),
            stage.running(chunk, hidden),
            apply_policy(stage.model, planned, policy),
        ):
            if stage.is_last(chunk):
                output = self.objective(stage.model, planned, segments, tensors, None)
            else:
                output = run_chunk(stage.model, stage.decoder, planned, *tensors[:2])
        self._windows |= planned.windows
        if self.train:
            self._kept[number, chunk] = _Kept(hidden=hidden, output=output)
        if stage.is_last(chunk):
            return output.detach()
        self._leaving[number, chunk + 1, True] = output.detach()
        return output.new_zeros(())

    def _backward(self, action: StageAction) -> None:
        number, chunk = action.microbatch, action.chunk
        kept = self._kept.pop((number, chunk))
        if self.stage.is_last(chunk):
            (kept.output / self.objective.divisor).backward()
        else:
            gradient = self._take(action)
            if kept.output.requires_grad:
                torch.autograd.backward(kept.output, gradient)
        if kept.hidden is not None:
            made = kept.hidden.grad
            self._leaving[number, chunk - 1, False] = torch.zeros_like(kept.hidden) if made is None else made

    def _attention(self, number: int, chunk: int) -> PlannedAttention:
        """Return the attention of a microbatch in a chunk, made when its message is asked for, or when it runs."""
        key = (number, chunk, True)
        if key not in self._attentions:
            planned = PlannedAttention(
                self.programs[number], self.mesh.replicas, self.kernel, rows_beyond=self.objective.rows_beyond
            )
            planned.layers_passed = self.stage.layers_passed(chunk)
            self._attentions[key] = planned
        return self._attentions[key]

    def _take(self, action: StageAction) -> Tensor:
        """Wait for the message that an action needs."""
        pending, buffer = self._arriving.pop((action.microbatch, action.chunk, action.is_forward))
        pending.wait()
        return buffer

    def _post(self, turn: StageTurn) -> None:
        """Post the messages of a turn in one grouped call."""
        if not turn.sends and not turn.receives:
            return
        self.mesh.world.phase = f"{self.name}, hidden states between stages at tick {turn.tick}"
        sends = [
            (self._leaving.pop(_key(each)).contiguous(), self.mesh.rank_of_stage(each.stage)) for each in turn.sends
        ]
        rooms = [(self._room(each), each) for each in turn.receives]
        receives = [(room, self.mesh.rank_of_stage(each.stage)) for room, each in rooms]
        pending = self.mesh.world.exchange(sends, receives)
        self._arriving |= {_key(each): (pending, room) for room, each in rooms}
        self._sent.append(pending)
        while len(self._sent) > 2 * self.mesh.stages:
            self._sent.popleft().wait()

    def _room(self, message: StageMessage) -> Tensor:
        """Make room for hidden states, or for the gradient of what this stage gave on."""
        if not message.is_forward:
            return torch.empty_like(self._kept[message.microbatch, message.chunk].output)
        rows = self._attention(message.microbatch, message.chunk).num_rows
        like = next(self.stage.model.parameters())
        return torch.empty(1, rows, self.stage.width, dtype=like.dtype, device=self.device)


def _key(message: StageMessage) -> _Key:
    return message.microbatch, message.chunk, message.is_forward
