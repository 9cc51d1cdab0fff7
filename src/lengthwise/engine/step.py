"""A rank's part of a step before its end: forward and backward of its microbatches, in plan order.

Where the config asks for the routers' balance loss, all microbatches first run forward without gradients, and what all
tokens choose is summed over the ranks (`models.router`). A microbatch that is the last of all its ranks keeps its graph
instead and goes backward first: a rank of n pays for at most n more forward passes and never holds two graphs. Ranks in
lock-step have the same last one.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import zip_longest

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lengthwise.attention import ActivationPolicy, BlockKernel, PlannedAttention, to_device
from lengthwise.comm import Transport
from lengthwise.core.plan import Plan
from lengthwise.engine.activations import Offloading
from lengthwise.engine.batch import StepBatch
from lengthwise.engine.memory import SMALLER_MICROBATCHES, reporting_shortage
from lengthwise.engine.objective import ForwardPass, NextToken, Objective
from lengthwise.engine.parameters import Parameters
from lengthwise.models import (
    ANY_KEY,
    DropoutKey,
    KeyedDropout,
    LogitsAtOnce,
    RouterBalance,
    apply_policy,
    count_choices,
    has_balance_loss,
    has_dropout,
    mixing_of,
    model_router_logits,
    token_keys,
)
from lengthwise.offload import ActivationSaver
from lengthwise.program import MicrobatchProgram, Segment, all_end_alone, far_peers, last_on_all_ranks, lower_plan


@dataclass(frozen=True, slots=True, kw_only=True)
class RankResult:
    """What a rank did: its summed loss, and seconds in which it did not wait for another rank.

    `router_loss` is its part of the routers' balance loss; the parts of all ranks sum to that of the global batch.
    `ring_wait_seconds` is what it waited for transfers that no work hid (`busy_seconds` leave out what it waited in
    collectives, too, for parameters that still arrived, say), `offload_wait_seconds` for copies of the
    `offloaded_bytes` of all its microbatches. On a GPU these are seconds of its stream, from when that came to the
    first microbatch (what the step before left to do is not counted) until it has done the last. `loss_check` is
    what it found of a loop's own loss.
    """

    loss_sum: float
    busy_seconds: float
    router_loss: float = 0.0
    ring_wait_seconds: float = 0.0
    offloaded_bytes: int = 0
    offload_wait_seconds: float = 0.0
    loss_check: float = 0.0


def run_plan(
    model: nn.Module,
    plan: Plan,
    batch: StepBatch,
    transport: Transport,
    kernel: BlockKernel,
    *,
    name: str,
    train: bool = True,
    logits_at_once: LogitsAtOnce = "auto",
    objective: Objective | None = None,
    offloading: Offloading | None = None,
    parameters: Parameters | None = None,
    dropout: DropoutKey = ANY_KEY,
) -> RankResult:
    """Run the microbatches of this rank and let gradients add up in the model's parameters.

    The loss is divided once, by what all loss tokens of the global batch weigh, and made from `logits_at_once` logits
    at a time, or it is what `objective` says. No collective is issued before this rank's
    last transfer: a rank can never wait in one for another that waits for its next ring message. In lock-step ranks
    post both in one order (`engine.wave_order`). `offloading` is what plans that offload need. `parameters`: whose
    values may still arrive, and whose gradients may be summed early, by all ranks alike; None: neither. `dropout`: by
    which entries fall out where the model has dropout; without `train` none does.

    Raises:
        MemoryShortage: a microbatch does not fit on the device.
    """
    interval = transport.clock.start(next(model.parameters()).device)
    copied = 0.0 if offloading is None else offloading.store.waited_seconds
    in_step = 1 if parameters is None else parameters.ranks_in_step
    programs = lower_plan(plan, transport.rank, ranks_in_step=in_step)
    transport.phase = f"{name}, connecting"
    new_peers = far_peers(programs, transport.rank, mixing_of(model))
    if new_peers and parameters is not None:
        parameters.published()
    transport.connect(new_peers)
    rank = _RankStep(
        model,
        batch,
        transport,
        kernel,
        programs,
        name,
        objective or NextToken(batch=batch, divisor=batch.loss_weight, logits_at_once=logits_at_once),
        offloading,
        parameters,
        dropout=dropout if has_dropout(model) else None,
    )
    with reporting_shortage(
        lambda: f"rank {transport.rank}, {transport.phase}",
        needs=lambda: f"microbatches of up to {rank.most_tokens()} tokens",
        remedy=SMALLER_MICROBATCHES,
    ):
        loss_sum, router_loss = rank.run(plan, train=train).tolist()
    spent = interval.stop()
    return RankResult(
        loss_sum=loss_sum,
        router_loss=router_loss,
        busy_seconds=spent.busy_seconds,
        ring_wait_seconds=spent.transfer_seconds,
        offloaded_bytes=rank.offloaded_bytes,
        offload_wait_seconds=0.0 if offloading is None else offloading.store.waited_seconds - copied,
    )


def row_keys(
    key: DropoutKey, batch: StepBatch, segments: Sequence[Segment], num_rows: int, device: torch.device
) -> Tensor:
    """Return what dropout draws by, (rows,): the keys of the tokens of a rank's segments, and zeros for padding."""
    keys = token_keys(key, batch.sequences(segments), batch.positions(segments))
    return to_device(F.pad(keys, (0, num_rows - len(keys))), device)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Forward:
    """A microbatch that has run forward; router logits only of models with a balance loss."""

    loss: Tensor
    router_logits: list[Tensor]
    saver: ActivationSaver | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Prepared:
    """What a microbatch needs before it runs: its lowered attention, and (input_ids, position_ids, shift_labels).

    `keys` of its rows (tokens, and padding) where the model has dropout.
    """

    planned: PlannedAttention
    tensors: Sequence[Tensor]
    keys: Tensor | None

    def dropout(self, *, train: bool) -> KeyedDropout | None:
        """Return what draws in a forward of the microbatch; None: the model has no dropout."""
        return None if self.keys is None else KeyedDropout(self.keys if train else None)


@dataclass(slots=True)
class _RankStep:
    model: nn.Module
    batch: StepBatch
    transport: Transport
    kernel: BlockKernel
    programs: Sequence[MicrobatchProgram]
    name: str
    objective: Objective
    offloading: Offloading | None
    parameters: Parameters | None = None
    dropout: DropoutKey | None = None
    offloaded_bytes: int = 0
    windows: frozenset[int | None] = frozenset()  # of the layers that have run: those of the model after a microbatch

    def run(self, plan: Plan, *, train: bool) -> Tensor:
        """Run all microbatches; return (summed loss, part of the router loss), (2,), in fp64."""
        prepared: _Prepared | None = None
        sums = torch.zeros(2, dtype=torch.float64, device=self._device)  # there: reading them would stop it each time
        todo, kept, balance = list(range(len(self.programs))), dict[int, _Forward](), None
        keeps: Collection[int] = ()
        if train and has_balance_loss(self.model.config):
            keeps = self._keeps(plan)
            balance, kept = self.count_routers(keeps)
            todo = sorted(todo, key=lambda number: number not in kept)
        early = all_end_alone(plan, first=keeps)
        for number, following in zip_longest(todo, todo[1:]):
            done = kept.pop(number) if number in kept else self.forward(number, prepared, train=train)
            prepared = None
            if following is not None and following not in kept:
                prepared = self.prepare(following)  # while the device runs what it was given
            if train:
                objective = done.loss / self.objective.divisor
                if balance is not None:
                    share = balance.share(done.router_logits)
                    objective = objective + balance.coefficient * share
                    sums[1] += share.detach()
                self.enter(number, "backward")
                with self._reducing(early=early and following is None):
                    self._backward(objective, done.saver)
            sums[0] += done.loss.detach()
        if train and self.parameters is not None:
            self.parameters.begin_reducing()
        return sums

    def _keeps(self, plan: Plan) -> Collection[int]:
        """List the microbatches whose graph is kept while routers are counted, one a rank at most."""
        return last_on_all_ranks(plan, ranks_in_step=1 if self.parameters is None else self.parameters.ranks_in_step)

    def _reducing(self, *, early: bool) -> AbstractContextManager[None]:
        """Sum gradients while the backward of a microbatch makes them.

        `early`: it is the last, and no rank ends in transfers: a sum that waits for one in a ring would keep its thread
        blocks from this backward.
        """
        return self.parameters.reducing_early() if early and self.parameters is not None else nullcontext()

    def most_tokens(self) -> int:
        """Count the tokens of this rank's largest microbatch."""
        return max(sum(each.num_tokens for each in program.segments(self.transport.rank)) for program in self.programs)

    @property
    def _device(self) -> torch.device:
        return next(self.model.parameters()).device

    def enter(self, number: int, what: str) -> None:
        """Say in which microbatch this rank is."""
        self.transport.phase = f"{self.name}, microbatch {number + 1} of {len(self.programs)} {what}"

    def forward(self, number: int, prepared: _Prepared | None = None, *, train: bool) -> _Forward:
        self.enter(number, "forward")
        program, router_logits = self.programs[number], list[Tensor]()
        prepared = prepared or self.prepare(number)
        planned = prepared.planned
        self._meet_values(number)
        collect = router_logits.extend if train and has_balance_loss(self.model.config) else None
        policy = self._policy(program, planned.num_rows) if train else ActivationPolicy()
        dropout = prepared.dropout(train=train)
        with torch.set_grad_enabled(train), apply_policy(self.model, planned, policy, dropout):
            loss = self.objective(
                ForwardPass(
                    self.model,
                    planned,
                    program.segments(self.transport.rank),
                    *prepared.tensors,
                    collect_router=collect,
                )
            )
        self.windows |= planned.windows
        return _Forward(loss=loss, router_logits=router_logits, saver=policy.saver)

    def _meet_values(self, number: int) -> None:
        """Have all values before a microbatch with transfers: none is posted while a collective is under way."""
        if self.parameters is not None and self.programs[number].shares(self.transport.rank):
            self.parameters.published()

    def _policy(self, program: MicrobatchProgram, rows: int) -> ActivationPolicy:
        microbatch, saver = program.microbatch, None
        if microbatch.offload:
            assert self.offloading is not None, f"nowhere to offload {microbatch.offload} of microbatch {program.index}"
            saver = self.offloading.saver(microbatch, rows)
        return ActivationPolicy(recompute=microbatch.recompute, saver=saver)

    def _backward(self, objective: Tensor, saver: ActivationSaver | None) -> None:
        objective.backward()
        if saver is not None:
            self.offloaded_bytes += saver.totals.offloaded_bytes
            saver.end()

    def prepare(self, number: int) -> _Prepared:
        """Make a microbatch's tensors, and lower what its layers are known to ask for."""
        program = self.programs[number]
        beyond = self.objective.rows_beyond
        planned = PlannedAttention(program, self.transport, self.kernel, rows_beyond=beyond)
        planned.lower(self.windows, self._device)
        segments = program.segments(self.transport.rank)
        tensors, keys = self.batch.tensors(segments), None
        if self.dropout is not None:
            keys = row_keys(self.dropout, self.batch, segments, planned.num_rows, self._device)
        return _Prepared(planned=planned, tensors=[to_device(tensor, self._device) for tensor in tensors], keys=keys)

    def count_routers(self, keeps: Collection[int]) -> tuple[RouterBalance, dict[int, _Forward]]:
        """Sum over all ranks what all tokens choose, after each rank's last ring; keep graphs of these microbatches."""
        counts, kept = count_choices(self.model, []), dict[int, _Forward]()
        for number, program in enumerate(self.programs):
            if program.index in keeps:
                kept[number] = self.forward(number, train=True)
                counts += count_choices(self.model, kept[number].router_logits)
            else:
                counts += count_choices(self.model, self._router_logits(number))
        self.transport.phase = f"{self.name}, sum of the routers' counts"
        self.transport.all_reduce(counts)
        return RouterBalance(self.model, counts), kept

    @torch.no_grad()
    def _router_logits(self, number: int) -> list[Tensor]:
        self.enter(number, "counting")
        prepared = self.prepare(number)
        self._meet_values(number)
        input_ids, position_ids, _ = prepared.tensors
        with prepared.dropout(train=True) or nullcontext():
            return model_router_logits(self.model, prepared.planned, input_ids, position_ids)
