"""A rank's microbatches of a step: one interpreter of `program.step_program`, for whole models and for stages.

1. The program orders the passes, and the messages after each; a whole model has one chunk and no messages.
2. A forward takes ids or hidden states, and returns the loss or sends hidden states on; a backward does so with
   gradients.
3. Rings of a pass run among the ranks, or among the replicas of a stage, which are all at that pass.

Activations are kept from a microbatch's forward to its backward, in the offload store if the plan says so: of one
microbatch on whole models, of at most p - s on stage s of p (with one chunk a stage). Of hidden states only autograd's
saved tensors are kept.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import KW_ONLY, dataclass, field
from functools import partial

import torch
from torch import Tensor, nn

from lengthwise.attention import ActivationPolicy, BlockKernel, PlannedAttention, to_device
from lengthwise.comm import Mesh
from lengthwise.core.plan import Plan
from lengthwise.engine.batch import StepBatch
from lengthwise.engine.objective import ForwardPass, NextToken, Objective
from lengthwise.engine.offloading import Offloading
from lengthwise.engine.parameters import Parameters
from lengthwise.engine.shortage import SMALLER_MICROBATCHES, reporting_shortage
from lengthwise.engine.stage_messages import (
    KeptForward,
    Messages,
    empty_hidden,
    given_on,
    received,
)
from lengthwise.models import (
    WHOLE,
    Chunk,
    DropoutKey,
    LogitsAtOnce,
    NoDropout,
    RouterBalance,
    apply_policy,
    count_choices,
    drawing,
    has_balance_loss,
    has_dropout,
    mixing_of,
    model_router_logits,
    run_chunk,
    seeing,
    sum_probabilities,
)
from lengthwise.models.images import MicrobatchImages
from lengthwise.program import Segment, far_peers
from lengthwise.program.step_program import Message, Pass, Place, StepProgram, Turn, step_program


@dataclass(frozen=True, slots=True, kw_only=True)
class RankResult:
    """A rank's numbers of a step: summed loss and seconds.

    `busy_seconds` exclude waits for other ranks, in transfers and in collectives. `ring_wait_seconds` are waits for
    transfers that no work hid, `offload_wait_seconds` waits for copies of the `offloaded_bytes` of all its
    microbatches. On a GPU they are seconds of its stream, from the start of the first microbatch to the end of the
    last. The `router_loss` of all ranks sum to the balance loss of the global batch. `loss_check` is the finding about
    a loop's own loss, `saving` the progress of a save in the background.
    """

    loss_sum: float
    busy_seconds: float
    router_loss: float = 0.0
    ring_wait_seconds: float = 0.0
    offloaded_bytes: int = 0
    offload_wait_seconds: float = 0.0
    loss_check: float = 0.0
    saving: float = 0.0


@dataclass(frozen=True, slots=True)
class StepContext:
    """The model and settings with which a rank runs a plan.

    model: the whole model, or a stage's part of it. mesh: the rank's place; with one stage plans name the world's
    ranks. chunks: chunks of layers, by number. name: the step's name in messages. train: True to run backward and
    dropout. objective: the loss, by default the next token's from `logits_at_once` logits at a time. offloading: store
    for plans that offload. parameters: owner of parameters, whose values may still arrive, and whose gradients may be
    summed early, the same on all ranks; or None. dropout: key of dropout's random numbers. autocast: dtype of cast
    forwards; None leaves it to a surrounding torch.autocast.
    """

    model: nn.Module
    mesh: Mesh
    kernel: BlockKernel
    _: KW_ONLY
    name: str
    chunks: Mapping[int, Chunk] = field(default_factory=lambda: {WHOLE.number: WHOLE})
    train: bool = True
    objective: Objective | None = None
    logits_at_once: LogitsAtOnce = "auto"
    offloading: Offloading | None = None
    parameters: Parameters | None = None
    dropout: DropoutKey = field(default_factory=DropoutKey)
    autocast: torch.dtype | None = None

    @property
    def device(self) -> torch.device:
        """The model's device."""
        return next(self.model.parameters()).device

    @property
    def offload_wait_seconds(self) -> float:
        """Seconds spent so far waiting for the store of offloaded activations."""
        return 0.0 if self.offloading is None else self.offloading.store.waited_seconds


def run_part(plan: Plan, batch: StepBatch, context: StepContext) -> RankResult:
    """Run the microbatches of this rank, and add their gradients up in the model's parameters.

    The objective's divisor divides the loss once. In a pipeline only the last stage returns a loss, the others 0. No
    collective over all ranks is posted before this rank's last transfer, so that a rank never waits in one for another
    rank that waits for its ring message. In waves all ranks post both in one order (`engine.wave_order`).

    Raises:
        MemoryShortage: a microbatch does not fit on the device.
    """
    mesh, parameters, transport = context.mesh, context.parameters, context.mesh.replicas
    interval, waited = transport.clock.start(context.device), context.offload_wait_seconds
    program = step_program(
        plan,
        mesh.replica,
        mesh.stage,
        ranks_in_step=1 if parameters is None else parameters.ranks_in_step,
        train=context.train,
        counts_routers=has_balance_loss(context.model.config),
        mutual=batch.mutual(plan),
    )
    transport.phase = f"{context.name}, connecting"
    new_peers = far_peers(tuple(program.microbatches.values()), mesh.replica, mixing_of(context.model))
    if parameters is not None and (new_peers or mesh.stages > 1):
        parameters.published()  # no transfer may be posted while values arrive
    transport.connect(new_peers)
    rank = _RankStep(context=context, batch=batch, program=program)
    with reporting_shortage(
        lambda: f"rank {mesh.world.rank}, {transport.phase}",
        needs=lambda: f"microbatches of up to {rank.most_tokens()} tokens",
        remedy=SMALLER_MICROBATCHES,
    ):
        rank.run()
        if context.train and parameters is not None:
            transport.phase = f"{context.name}, sum of gradients"
            parameters.begin_reducing()
        loss_sum, router_loss = rank.sums.tolist()
    spent = interval.stop()
    return RankResult(
        loss_sum=loss_sum,
        router_loss=router_loss,
        busy_seconds=spent.busy_seconds,
        ring_wait_seconds=spent.transfer_seconds,
        offloaded_bytes=rank.offloaded_bytes,
        offload_wait_seconds=context.offload_wait_seconds - waited,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Prepared:
    """The inputs of a forward pass.

    planned: lowered attention. segments: this rank's segments. tensors: (input_ids, position_ids, shift_labels).
    images: images of which the segments have tokens, or None.
    """

    planned: PlannedAttention
    segments: Sequence[Segment]
    tensors: Sequence[Tensor]
    images: MicrobatchImages | None


class _RankStep:
    """Runs the program of a rank's step. sums: loss and part of the router loss, (2,), in fp64, on the device."""

    def __init__(self, *, context: StepContext, batch: StepBatch, program: StepProgram) -> None:
        self.context, self.program, self.batch = context, program, batch
        self.model, self.mesh, self.chunks, self.device = context.model, context.mesh, context.chunks, context.device
        weight = batch.loss_weight
        self.objective = context.objective or NextToken(
            batch=batch, divisor=weight, logits_at_once=context.logits_at_once
        )
        self.sums = torch.zeros(2, dtype=torch.float64, device=self.device)  # read once, because reading waits
        self.offloaded_bytes = 0
        self._numbers = {index: number for number, index in enumerate(program.microbatches, start=1)}
        self._messages = Messages(mesh=context.mesh, name=context.name)
        self._has_dropout = has_dropout(context.model)
        self._counts_routers = has_balance_loss(context.model.config)
        self._counts: Tensor | None = None  # counts of the routers' choices
        self._probabilities: Tensor | None = None  # sums of them, if nothing trains
        self._balance: RouterBalance | None = None  # set once choices are counted
        self._prepared, self._kept = dict[Place, _Prepared](), dict[Place, KeptForward]()
        self._windows = frozenset[int | None]()  # of the layers that have run; complete after a microbatch

    def run(self) -> None:
        program = self.program
        if self._counts_routers:
            self._counts = count_choices(self.model, [])
        if program.counting is not None:
            self._take(program.counting)
            self._balance = self._balance_of_all()
            for kept in self._kept.values():
                self._add_share(kept)
        self._take(program.turns)
        if self._counts is not None:  # nothing trains, so one pass is enough
            balance = self._balance_of_all()
            if self._probabilities is not None:
                self.sums[1] += balance.share_of(self._probabilities)

    def _balance_of_all(self) -> RouterBalance:
        """Return the balance loss of the choices that all ranks have counted. Collective."""
        counts, self._counts = self._counts, None
        assert counts is not None, "counted before"
        self.mesh.world.phase = f"{self.context.name}, sum of the routers' counts"
        self.mesh.world.all_reduce(counts)
        return RouterBalance(self.model, counts)

    def _take(self, turns: Sequence[Turn]) -> None:
        for turn in turns:
            if turn.action is not None:
                self._run(turn.action)
            if turn.sends or turn.receives:
                self._messages.post(turn, self._room)
        self._messages.end()

    def _run(self, action: Pass) -> None:
        if action.prepares is not None:
            self.prepare(action.prepares)  # while the device is busy
        where = f", stage {self.mesh.stage}, chunk {action.place.chunk}" if self.mesh.stages > 1 else ""
        place = f"microbatch {self._numbers[action.place.microbatch]} of {len(self._numbers)}"
        self.mesh.world.phase = f"{self.context.name}, {place} {action.kind}{where}"
        if action.is_forward:
            self.forward(action)
        else:
            self.backward(action)
        ahead = None if action.reads_ahead is None else self._kept.get(action.reads_ahead)
        if ahead is not None and ahead.saver is not None:
            ahead.saver.prefetch()

    def most_tokens(self) -> int:
        rank, programs = self.mesh.replica, self.program.microbatches.values()
        return max(sum(each.num_tokens for each in program.segments(rank)) for program in programs)

    def prepare(self, place: Place) -> _Prepared:
        """Make the inputs of a forward pass, once, and lower attention for the windows known so far."""
        if place in self._prepared:
            return self._prepared[place]
        context, chunk = self.context, self.chunks[place.chunk]
        program, transport = self.program.microbatches[place.microbatch], self.mesh.replicas
        how = {"rows_beyond": self.objective.rows_beyond, "layers_passed": chunk.layers_passed}
        planned = PlannedAttention(program, transport, context.kernel, **how)
        planned.lower(self._windows, self.device)
        batch, segments = self.batch, program.segments(transport.rank)
        tensors = [to_device(tensor, self.device) for tensor in batch.tensors(segments)]
        images = batch.images(segments)
        if images is not None:
            images = images.to(partial(to_device, device=self.device))
        found = _Prepared(planned=planned, segments=segments, tensors=tensors, images=images)
        self._prepared[place] = found
        return found

    def _dropping(self, place: Place) -> AbstractContextManager[object]:
        """Seed dropout for this forward inside the block; in evaluations nothing drops."""
        if not self._has_dropout:
            return nullcontext()
        if not self.context.train:
            return NoDropout()
        seed = self.context.dropout.at(self.mesh.world.rank, place.microbatch, place.chunk)
        return drawing(seed, self.device)

    def forward(self, action: Pass) -> None:
        """Run a chunk forward, and keep what its backward needs."""
        chunk, keeps = self.chunks[action.place.chunk], self.context.train and action.kind == "forward"
        prepared = self.prepare(action.place)
        planned = prepared.planned
        del self._prepared[action.place]
        self._meet_values(action.place.microbatch)
        policy = self._policy(action, planned.num_rows) if keeps else ActivationPolicy()
        hidden, before, routers = None, None, list[Tensor]()
        if not chunk.is_first:
            hidden = self._messages.take(action.place, True)
            if keeps:
                before = list[Tensor]()
                hidden = received(hidden, before)
        cast = self.context.autocast
        with (
            nullcontext() if cast is None else torch.autocast(self.device.type, dtype=cast),
            torch.set_grad_enabled(keeps),
            chunk.running(hidden),
            seeing(self.model, prepared.images),
            self._dropping(action.place),
            apply_policy(self.model, planned, policy, draws=self._has_dropout),
        ):
            output = self._output(action, chunk, prepared, routers)
        self._windows |= planned.windows
        if self._counts is not None:
            self._counts += count_choices(self.model, routers)
            if routers and not self.context.train:
                sums = sum_probabilities(routers)
                self._probabilities = sums if self._probabilities is None else self._probabilities + sums
        if keeps:
            after = list[Tensor]()
            self._kept[action.place] = kept = KeptForward(
                rows=planned.num_rows,
                end=output if chunk.is_last else given_on(output, after),
                after=after,
                before=before,
                router_logits=routers,
                saver=policy.saver,
            )
            self._add_share(kept)
        if not chunk.is_last:
            self._messages.give(Place(action.place.microbatch, chunk.number + 1), True, output.detach())
        elif action.kind == "forward":
            self.sums[0] += output.detach()

    def _meet_values(self, microbatch: int) -> None:
        """Wait for all values before a microbatch with transfers: none may be posted during a collective."""
        parameters = self.context.parameters
        if parameters is not None and self.program.microbatches[microbatch].shares(self.mesh.replica):
            parameters.published()

    def _policy(self, action: Pass, rows: int) -> ActivationPolicy:
        microbatch, saver = self.program.microbatches[action.place.microbatch].microbatch, None
        if microbatch.offload:
            assert self.context.offloading is not None, f"nowhere to offload {microbatch.offload} of {action}"
            saver = self.context.offloading.saver(microbatch, rows, self.chunks[action.place.chunk])
        return ActivationPolicy(recompute=microbatch.recompute, saver=saver)

    def _output(self, action: Pass, chunk: Chunk, prepared: _Prepared, routers: list[Tensor]) -> Tensor:
        """Return the hidden states of a chunk, or its loss, (), or an empty tensor if only routers are counted."""
        planned, tensors = prepared.planned, prepared.tensors
        collect = routers.extend if self._counts_routers else None
        if not chunk.is_last:
            return run_chunk(self.model, planned, *tensors[:2], collect_router=collect)
        if action.kind == "forward":
            return self.objective(ForwardPass(self.model, planned, prepared.segments, *tensors, collect_router=collect))
        routers += model_router_logits(self.model, planned, *tensors[:2])
        return torch.empty(0)

    def _add_share(self, kept: KeptForward) -> None:
        """Add a forward's part of the router loss, once all choices are counted."""
        if self._balance is not None and kept.router_logits:
            kept.router_share = self._balance.share(kept.router_logits)
            self.sums[1] += kept.router_share.detach()
            kept.router_logits.clear()

    def backward(self, action: Pass) -> None:
        """Run a chunk backward, from its loss or from the gradient of the hidden states that it sent on."""
        chunk, kept, parameters = self.chunks[action.place.chunk], self._kept.pop(action.place), self.context.parameters
        if chunk.is_last:
            ends = [kept.end / self.objective.divisor]
        else:
            ends = [kept.end]
            kept.after.append(self._messages.take(action.place, False))
        if kept.router_share is not None and self._balance is not None:
            ends.append(self._balance.coefficient * kept.router_share)
        trained = [end for end in ends if end.requires_grad]
        if action.sums_early and parameters is not None:
            parameters.reduce_early()
        if trained or chunk.is_last:
            torch.autograd.backward(trained or ends)  # refuses a loss that depends on no parameter
        if kept.saver is not None:
            self.offloaded_bytes += kept.saver.totals.offloaded_bytes
            kept.saver.end()
        if kept.before is not None:
            gradient = kept.before.pop() if kept.before else empty_hidden(self.model, chunk, kept.rows).zero_()
            self._messages.give(Place(action.place.microbatch, chunk.number - 1), False, gradient)

    def _room(self, message: Message) -> Tensor:
        """Return an empty tensor to receive hidden states, or the gradient of hidden states that were sent on."""
        kept = None if message.is_forward else self._kept[message.place]
        rows = self.prepare(message.place).planned.num_rows if kept is None else kept.rows
        return empty_hidden(self.model, self.chunks[message.place.chunk], rows)
