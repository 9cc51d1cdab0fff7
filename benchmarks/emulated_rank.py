"""One rank of an emulation: sleeps its compute, exchanges the messages of its program, takes them when links deliver.

1. A microbatch is lowered; each layer of each pass is own work, an exchange of split heads, ring steps, an exchange.
2. Work and blocks of attention are slept for what the costs say; messages are posted as training posts them.
3. A message counts as there when its emulated link has delivered it, or, where the link is real, when it came.

Sleeping is not exact and waking takes its turn: a rank that is up to 3 ms late for something sleeps that much less the
next time, and its messages count as posted when they were due; what is later than that counts.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from lengthwise.core.plan import Plan
from lengthwise.cost import Cost, Pass
from lengthwise.program import Content, MicrobatchProgram, Transfer, lower_plan

_LATE_SECONDS = 0.003  # by which a rank may wake late and still catch up; more is real waiting
_LEAD_SECONDS = 0.05  # from the last rank that is ready to the common start
_FLOAT_BYTES = 4
_END_FLOATS = 1024  # that a rank really reduces at the step's end; the rest of it is slept
Posted = tuple[Any, list[tuple[torch.Tensor, Transfer]], float]  # pending, what will arrive, when it was posted


def transfer_bytes(transfer: Transfer, cost: Cost) -> float:
    """Count the bytes of a message in one layer, as costs and simulator do."""
    content, parts = transfer.content, transfer.heads.parts
    if content in (Content.KV, Content.DKV):
        share = cost.forward.ring if content is Content.KV else cost.backward.ring - cost.forward.ring
        repeated = max(1.0, parts / cost.kv_heads) / parts  # groups wider than the KV heads hold some of them twice
        return share * repeated * cost.ring_bytes / cost.layers * transfer.tokens
    passed = cost.forward.exchange if content in (Content.QKV, Content.OUT) else cost.backward.exchange
    inputs = (cost.heads + 2 * cost.kv_heads) / (2 * cost.heads + 2 * cost.kv_heads)  # of queries, keys and values
    share = inputs if content in (Content.QKV, Content.DQKV) else 1 - inputs
    return share * passed * cost.exchange_bytes / cost.layers * transfer.tokens / parts


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One rank in one layer of one pass: seconds to sleep, and its transfers, by stage; before and after: of heads."""

    own_seconds: float
    before: list[Transfer]
    blocks_seconds: list[float]
    transfers: list[list[Transfer]]
    after: list[Transfer]


class EmulatedRank:
    """One rank: sleeps its blocks, exchanges real messages, takes them when the emulated link would deliver them.

    bytes_share: how much of the bytes that the costs count for a message it carries. real_far: messages between nodes
    take what they take, nothing is slept for them.
    """

    def __init__(self, transport: Any, cost: Cost, bytes_share: float, *, real_far: bool = False) -> None:
        self._transport, self._cost, self._bytes_share, self._real_far = transport, cost, bytes_share, real_far
        self._until = 0.0
        self._outgoing, self._incoming = torch.zeros(0), torch.zeros(0)

    def run(self, plan: Plan) -> float:
        """Run one step of `plan`; return the wall-clock seconds from all ranks' start to this one's end."""
        layers = [
            self._layer(program, each)
            for program in lower_plan(plan, self._transport.rank)
            for each in self._cost.passes(program.microbatch.recompute)
        ]
        self._make_room(layers)
        mine, everyone = torch.zeros(_END_FLOATS), torch.zeros(_END_FLOATS * self._transport.world_size)
        start = self._until = self._common_start()
        self._sleep(0.0)
        for layer in layers:
            for _ in range(self._cost.layers):
                self._run_layer(layer)
        self._transport.reduce_scatter(mine, everyone)
        self._transport.all_gather(everyone, mine)
        self._until = self._due()
        self._sleep(self._cost.step_end_seconds(plan.ranks))
        return time.monotonic() - start

    def _common_start(self) -> float:
        """Agree on a point in time, a little later than when the last rank is ready; all share one clock."""
        ready = torch.zeros(self._transport.world_size, dtype=torch.float64)
        ready[self._transport.rank] = time.monotonic()
        self._transport.all_reduce(ready)
        return float(ready.max()) + _LEAD_SECONDS

    def _layer(self, program: MicrobatchProgram, each: Pass) -> Layer:
        rank, cost = self._transport.rank, self._cost
        backward = each is cost.backward
        held = sum(segment.num_tokens for segment in program.segments(rank))
        rounds = [
            [t for t in one.transfers if rank in (t.source, t.target)]
            for one in (program.backward_rounds if backward else program.forward_rounds)
        ]
        stages = max(program.ring_steps, len(rounds))
        before, after = (Content.GRAD_OUT, Content.DQKV) if backward else (Content.QKV, Content.OUT)
        return Layer(
            own_seconds=each.linear * (cost.linear_seconds * held + cost.fixed_seconds) / cost.layers,
            before=self._exchanged(program, before) if each.exchange else [],
            blocks_seconds=[
                self._blocks(program, each, ring_step) if ring_step < program.ring_steps else 0.0
                for ring_step in range(stages)
            ],
            transfers=[*rounds, *([] for _ in range(stages - len(rounds)))] if each.ring else [[]] * stages,
            after=self._exchanged(program, after) if each.exchange else [],
        )

    def _exchanged(self, program: MicrobatchProgram, content: Content) -> list[Transfer]:
        part = program.exchange_of(self._transport.rank, content)
        return [*part.sends, *part.receives]

    def _run_layer(self, layer: Layer) -> None:
        self._sleep(layer.own_seconds)
        self._take(self._post(layer.before))
        for seconds, transfers in zip(layer.blocks_seconds, layer.transfers, strict=True):
            posted = self._post(transfers)
            self._sleep(seconds)
            self._take(posted)
        self._take(self._post(layer.after))

    def _blocks(self, program: MicrobatchProgram, each: Pass, ring_step: int) -> float:
        total = 0.0
        for task in program.tasks(self._transport.rank, ring_step):
            length = program.tokens[task.sequence]
            positions = program.microbatch.pieces[task.piece].degree / task.heads.parts
            whole = float(self._cost.attention_seconds(np.array([float(length)]), positions)[0]) / task.heads.parts
            queries, keys = task.q_stop - task.q_start, task.kv_stop - task.kv_start
            total += whole * (1 if task.causal else 2) * queries * keys / length**2
        return each.attention * total / self._cost.layers

    def _floats(self, transfer: Transfer) -> int:
        return max(1, round(self._bytes_share * transfer_bytes(transfer, self._cost) / _FLOAT_BYTES))

    def _make_room(self, layers: Sequence[Layer]) -> None:
        """Allocate what messages are sent from and received into, so that no clock runs meanwhile."""
        calls = [call for layer in layers for call in (layer.before, *layer.transfers, layer.after)]
        most = max((sum(map(self._floats, call)) for call in calls), default=0)
        self._outgoing, self._incoming = torch.ones(most), torch.ones(most)

    def _post(self, transfers: Sequence[Transfer]) -> Posted | None:
        """Post one grouped call; return it with what will arrive and when it was posted."""
        if not transfers:
            return None
        rank, posted = self._transport.rank, self._due()
        stamp = torch.tensor([posted], dtype=torch.float64)
        sends, receives, arriving, first = [], [], [], 0
        for each in transfers:
            last = first + self._floats(each)
            if each.source == rank:
                sends += [(stamp, each.target), (self._outgoing[first:last], each.target)]
            else:
                arrived = torch.zeros(1, dtype=torch.float64)
                receives += [(arrived, each.source), (self._incoming[first:last], each.source)]
                arriving.append((arrived, each))
            first = last
        return self._transport.exchange(sends, receives), arriving, posted

    def _take(self, call: Posted | None) -> None:
        """Wait for a grouped call, and until the emulated links would have delivered what has come over them."""
        if call is None:
            return
        pending, arriving, posted = call
        pending.wait()
        links: dict[int, float] = {}
        for stamp, each in arriving:
            if self._real_far and self._leaves_node(each):
                self._until = max(self._until, time.monotonic())
                continue
            along_ring = each.content in (Content.KV, Content.DKV)
            link = each.source if along_ring else -1  # an all-to-all shares this rank's own link
            latency = along_ring and link not in links
            links[link] = links.get(link, 0.0) + self._link_seconds(each, latency=latency)
            self._until = max(self._until, max(posted, float(stamp)) + links[link])
        self._sleep(0.0)

    def _leaves_node(self, transfer: Transfer) -> bool:
        return transfer.source // self._cost.ranks_per_node != transfer.target // self._cost.ranks_per_node

    def _link_seconds(self, transfer: Transfer, *, latency: bool) -> float:
        link = self._cost.far if self._leaves_node(transfer) else self._cost.near
        hop_seconds = link.hop_seconds / self._cost.layers if latency else 0.0
        return hop_seconds + transfer_bytes(transfer, self._cost) / link.bytes_per_second

    def _due(self) -> float:
        """Return when what happens now was to happen, where that is a moment ago, in seconds of the clock."""
        return max(self._until, time.monotonic() - _LATE_SECONDS)

    def _sleep(self, seconds: float) -> None:
        """Sleep to a point in time, so that waking late once is made up for by the next sleep."""
        self._until = self._due() + seconds
        left = self._until - time.monotonic()
        if left > 0:
            time.sleep(left)
