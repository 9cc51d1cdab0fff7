"""A rank's part of a step where it is a stage of a pipeline: the actions of its stage, tick by tick.

1. `program.stage_turns` says what comes when, the same for all ranks: an action, then one grouped call of messages.
2. A forward takes the hidden states of the stage before and gives its own on; a backward does so with gradients.
3. Rings of an action run among the replicas of the stage, which are all at that action.
4. Before an action it waits for its message, which was posted turns ago, and from time to time for what it sent.

A stage keeps a microbatch from its forward to its backward: at most p - s of them (v = 1), in the store where the plan
offloads. Of hidden states it keeps what autograd saved of them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lengthwise.attention import ActivationPolicy, BlockKernel, PlannedAttention, to_device
from lengthwise.comm import Mesh, Pending, SoloTransport
from lengthwise.core.plan import Microbatch, Piece, Plan
from lengthwise.core.shape import LayerCut
from lengthwise.engine.activations import Offloading
from lengthwise.engine.batch import StepBatch
from lengthwise.engine.memory import SMALLER_MICROBATCHES, reporting_shortage
from lengthwise.engine.objective import ForwardPass, NextToken, Objective
from lengthwise.engine.parameters import Parameters
from lengthwise.engine.stage_graph import KeptForward, given_on, received
from lengthwise.engine.step import RankResult, row_keys
from lengthwise.models import (
    ANY_KEY,
    DropoutKey,
    KeyedDropout,
    LogitsAtOnce,
    ModelStage,
    RouterBalance,
    apply_policy,
    count_choices,
    has_balance_loss,
    has_dropout,
    mixing_of,
    model_router_logits,
    run_chunk,
)
from lengthwise.program import MicrobatchProgram, far_peers, lower_plan
from lengthwise.program.stage_program import StageAction, StageMessage, StageTurn, stage_turns


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """Of which a rank is a stage: its part of the model, and its place."""

    stage: ModelStage
    mesh: Mesh
    cut: LayerCut


_Key = tuple[int, int, bool]  # of an action: microbatch, chunk, whether it is forward
_ONE_TOKEN = Plan(
    ranks=1,
    layers=1,
    capacity=1,
    tokens=(1,),
    microbatches=(Microbatch(pieces=(Piece(ranks=(0,), sequences=(0,)),)),),
    requires=(),
)


def run_stage(
    stage: ModelStage,
    plan: Plan,
    batch: StepBatch,
    mesh: Mesh,
    kernel: BlockKernel,
    *,
    name: str,
    train: bool = True,
    logits_at_once: LogitsAtOnce = "auto",
    objective: Objective | None = None,
    offloading: Offloading | None = None,
    parameters: Parameters | None = None,
    dropout: DropoutKey = ANY_KEY,
    autocast: torch.dtype | None = None,
) -> RankResult:
    """Run the actions of this rank's stage and let gradients add up in the model's parameters.

    As `engine.step.run_plan`, for a plan whose ranks are the replicas of `mesh`; the loss is that of the last stage,
    0 elsewhere. Where routers have a balance loss, all microbatches first pass forward through the stages to be
    counted. `autocast`: what chunks before the last are cast to, as `objective` casts that.

    Raises:
        MemoryShortage: a microbatch does not fit on the device.
    """
    transport = mesh.replicas
    device = next(stage.model.parameters()).device
    if parameters is not None:
        parameters.published()  # no transfer may be posted while values arrive
    interval = transport.clock.start(device)
    copied = 0.0 if offloading is None else offloading.store.waited_seconds
    programs = {program.index: program for program in lower_plan(plan, mesh.replica)}
    transport.phase = f"{name}, connecting"
    transport.connect(far_peers(tuple(programs.values()), mesh.replica, mixing_of(stage.model)))
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
        dropout=dropout if train and has_dropout(stage.model) else None,
        autocast=autocast,
        offloading=offloading,
    )
    if run.dropout is not None:
        run.place_dropout()
    with reporting_shortage(
        lambda: f"rank {mesh.world.rank}, {transport.phase}",
        needs=lambda: f"microbatches of up to {run.most_tokens()} tokens",
        remedy=SMALLER_MICROBATCHES,
    ):
        loss_sum, router_loss = run.run(plan).tolist()
        if train and parameters is not None:
            transport.phase = f"{name}, sum of gradients"
            parameters.begin_reducing()
    spent = interval.stop()
    return RankResult(
        loss_sum=loss_sum,
        router_loss=router_loss,
        busy_seconds=spent.busy_seconds,
        ring_wait_seconds=spent.transfer_seconds,
        offloaded_bytes=run.offloaded_bytes,
        offload_wait_seconds=0.0 if offloading is None else offloading.store.waited_seconds - copied,
    )


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
    dropout: DropoutKey | None
    autocast: torch.dtype | None
    offloading: Offloading | None = None
    offloaded_bytes: int = 0
    _counts: Tensor | None = None  # of what routers choose, while they are counted
    _balance: RouterBalance | None = None
    _arriving: dict[_Key, tuple[Pending, Tensor]] = field(default_factory=dict)
    _attentions: dict[_Key, PlannedAttention] = field(default_factory=dict)
    _kept: dict[tuple[int, int], KeptForward] = field(default_factory=dict)
    _leaving: dict[_Key, Tensor] = field(default_factory=dict)
    _sent: deque[Pending] = field(default_factory=deque)
    _windows: frozenset[int | None] = frozenset()

    def run(self, plan: Plan) -> Tensor:
        """Take all turns of a plan; return (summed loss, part of the router loss), (2,), in fp64."""
        if self.train and has_balance_loss(self.stage.model.config):
            self._count_routers(plan)
        return self._take_turns(plan, forward_only=not self.train)

    def _take_turns(self, plan: Plan, *, forward_only: bool) -> Tensor:
        sums = torch.zeros(2, dtype=torch.float64, device=self.device)
        turns = stage_turns(plan, self.mesh.replica, self.mesh.stage, forward_only=forward_only)
        coming = deque(turn.action for turn in turns if turn.action is not None)
        for turn in turns:
            if turn.action is not None:
                coming.popleft()
                self._enter(turn.action)
                if turn.action.is_forward:
                    self._forward(turn.action, sums)
                else:
                    self._backward(turn.action)
                self._bring_back(list(coming)[:2])
            self._post(turn)
        while self._sent:
            self._sent.popleft().wait()
        return sums

    def _bring_back(self, coming: Sequence[StageAction]) -> None:
        """Begin to load what the first backward among these actions needs first."""
        kept = next((self._kept.get((each.microbatch, each.chunk)) for each in coming if not each.is_forward), None)
        if kept is not None and kept.saver is not None:
            kept.saver.prefetch()

    def _count_routers(self, plan: Plan) -> None:
        """Sum over all ranks what all tokens choose: each counts the routers of its own chunks."""
        self._counts = counts = count_choices(self.stage.model, [])
        self._take_turns(plan, forward_only=True)
        self.mesh.world.phase = f"{self.name}, sum of the routers' counts"
        self.mesh.world.all_reduce(counts)
        self._counts, self._balance = None, RouterBalance(self.stage.model, counts)

    def place_dropout(self) -> None:
        """Count the calls of dropout before each chunk, by one row through each, the first time. Collective."""
        stage, mode = self.stage, self.stage.model.training
        if mode in stage.dropout_calls:
            return
        self.mesh.world.phase = f"{self.name}, counting calls of dropout"
        (program,) = lower_plan(_ONE_TOKEN, 0)
        calls = torch.zeros(len(stage.chunks), dtype=torch.int64, device=self.device)
        for chunk in stage.own:
            planned = PlannedAttention(program, SoloTransport(), self.kernel)
            planned.layers_passed = stage.layers_passed(chunk)
            row = torch.zeros(1, dtype=torch.int64, device=self.device)
            counting = KeyedDropout(torch.zeros(planned.num_rows, dtype=torch.int64, device=self.device))
            hidden = None if stage.is_first(chunk) else self._hidden(planned.num_rows).zero_()
            with torch.no_grad(), stage.running(chunk, hidden), counting:
                run_chunk(stage.model, stage.decoder, planned, row, row)
            calls[chunk] = counting.calls
        self.mesh.world.all_reduce(calls)
        before = (calls.cumsum(0) - calls) // self.mesh.num_replicas
        stage.dropout_calls[mode] = before.tolist()

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

    def _forward(self, action: StageAction, sums: Tensor) -> None:
        """Run a chunk forward; add its loss and its part of the router loss to `sums`."""
        stage, number, chunk = self.stage, action.microbatch, action.chunk
        planned = self._attention(number, chunk)
        del self._attentions[number, chunk, True]
        planned.lower(self._windows, self.device)
        keeps = self.train and self._counts is None
        policy = self._policy(action, planned.num_rows) if keeps else ActivationPolicy()
        hidden, before = None if stage.is_first(chunk) else self._take(action), None
        if hidden is not None and keeps:
            before = list[Tensor]()
            hidden = received(hidden, before)
        routers = list[Tensor]()
        with (
            torch.set_grad_enabled(keeps),
            stage.running(chunk, hidden),
            apply_policy(stage.model, planned, policy, self._dropout(planned, action)),
        ):
            output = self._run_chunk(action, planned, routers)
        self._windows |= planned.windows
        if self._counts is not None:
            self._counts += count_choices(stage.model, routers)
        share = None if self._balance is None or not routers else self._balance.share(routers)
        if keeps:
            after = list[Tensor]()
            self._kept[number, chunk] = KeptForward(
                rows=planned.num_rows,
                end=output if stage.is_last(chunk) else given_on(output, after),
                after=after,
                before=before,
                router_share=share,
                saver=policy.saver,
            )
        if share is not None:
            sums[1] += share.detach()
        if not stage.is_last(chunk):
            self._leaving[number, chunk + 1, True] = output.detach()
        else:
            sums[0] += output.detach()

    def _policy(self, action: StageAction, rows: int) -> ActivationPolicy:
        microbatch, saver = self.programs[action.microbatch].microbatch, None
        if microbatch.offload:
            assert self.offloading is not None, f"nowhere to offload {microbatch.offload} of {action}"
            saver = self.offloading.saver(microbatch, rows, stage=self.stage, chunk=action.chunk)
        return ActivationPolicy(recompute=microbatch.recompute, saver=saver)

    def _run_chunk(self, action: StageAction, planned: PlannedAttention, routers: list[Tensor]) -> Tensor:
        """Return the hidden states of a chunk, or its loss, (); 0 where routers are counted."""
        stage, segments = self.stage, self.programs[action.microbatch].segments(self.mesh.replica)
        tensors = [to_device(each, self.device) for each in self.batch.tensors(segments)]
        collect = routers.extend if self.train and has_balance_loss(stage.model.config) else None
        if stage.is_last(action.chunk) and self._counts is None:
            return self.objective(ForwardPass(stage.model, planned, segments, *tensors, collect_router=collect))
        with torch.autocast(self.device.type, dtype=self.autocast, enabled=self.autocast is not None):
            if not stage.is_last(action.chunk):
                return run_chunk(stage.model, stage.decoder, planned, *tensors[:2], collect_router=collect)
            routers += model_router_logits(stage.model, planned, *tensors[:2])
        return torch.zeros((), device=self.device)

    def _dropout(self, planned: PlannedAttention, action: StageAction) -> KeyedDropout | None:
        """Return what draws in a chunk as if the chunks before it had drawn here; None: nothing is drawn."""
        if self.dropout is None:
            return KeyedDropout(None) if has_dropout(self.stage.model) else None
        segments = self.programs[action.microbatch].segments(self.mesh.replica)
        keys = row_keys(self.dropout, self.batch, segments, planned.num_rows, self.device)
        return KeyedDropout(keys, calls=self.stage.dropout_calls[self.stage.model.training][action.chunk])

    def _backward(self, action: StageAction) -> None:
        number, chunk = action.microbatch, action.chunk
        kept = self._kept.pop((number, chunk))
        ends = [kept.end]
        if self.stage.is_last(chunk):
            ends = [kept.end / self.objective.divisor]
        else:
            kept.after.append(self._take(action))
        if kept.router_share is not None and self._balance is not None:
            ends.append(self._balance.coefficient * kept.router_share)
        ends = [end for end in ends if end.requires_grad]
        if ends:
            torch.autograd.backward(ends)
        if kept.saver is not None:
            self.offloaded_bytes += kept.saver.totals.offloaded_bytes
            kept.saver.end()
        if kept.before is not None:
            self._leaving[number, chunk - 1, False] = (
                kept.before.pop() if kept.before else self._hidden(kept.rows).zero_()
            )

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
        pending = self.mesh.between.exchange(sends, receives)
        self._arriving |= {_key(each): (pending, room) for room, each in rooms}
        self._sent.append(pending)
        while len(self._sent) > 2 * self.mesh.stages:
            self._sent.popleft().wait()

    def _room(self, message: StageMessage) -> Tensor:
        """Make room for hidden states, or for the gradient of what this stage gave on."""
        if not message.is_forward:
            return self._hidden(self._kept[message.microbatch, message.chunk].rows)
        return self._hidden(self._attention(message.microbatch, message.chunk).num_rows)

    def _hidden(self, rows: int) -> Tensor:
        like = next(self.stage.model.parameters())
        return torch.empty(1, rows, self.stage.width, dtype=like.dtype, device=self.device)


def _key(message: StageMessage) -> _Key:
    return message.microbatch, message.chunk, message.is_forward
