"""One emulated rank: it sleeps what it would compute, and exchanges real messages by the program that ranks run.

A layer is a list of phases: a grouped call, and what is slept while it is under way. A layer that attends exchanges
heads and goes round the ring; one with a state (every layer of a model has the one or the other) exchanges the halos of
its convolution, scans its spans and sweeps, backward in the other order, where nothing hides behind a block. Bytes are
those that costs count: every message of a sweep is as large as the maps of its sequences, a halo takes the latency of
its link alone.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import starmap, zip_longest
from typing import Any, NamedTuple

import numpy as np
import torch

from lengthwise.core.plan import Plan
from lengthwise.core.shape import ModelShape
from lengthwise.cost import Cost, PassShares, all_terms_cost, named_hardware, named_shape
from lengthwise.cost.analytic import PASSES, SCAN_CUT
from lengthwise.program import Content, MicrobatchProgram, RankRound, Transfer, lower_plan
from lengthwise.program.spans import halo_round_of, sweep_rounds_of

LAYERS, RANKS_PER_NODE = 4, 4
MODELS = ["llama-7b", "qwen3.5-9b"]
WIDTH = 4  # of convolutions before a scan
_LATE_SECONDS = 0.003  # by which a rank may wake late and still catch up; more is real waiting
_LEAD_SECONDS = 0.05  # from the last rank that is ready to the common start
_FLOAT_BYTES = 4
_END_FLOATS = 1024  # that a rank really reduces at the step's end; the rest of it is slept
_BETWEEN_NEIGHBOURS = (Content.KV, Content.DKV, Content.STATE, Content.MAP, Content.HALO)
Posted = tuple[Any, list[tuple[torch.Tensor, Transfer]], float]  # pending, what will arrive, when it was posted


def attention_layers(cost: Cost) -> int:
    """Return how many layers attend; all others have a state."""
    return round(cost.layers / (1 + cost.sweep_messages / PASSES))


def transfer_bytes(transfer: Transfer, cost: Cost) -> float:
    """Count the bytes of a message in one layer, as costs and simulator do."""
    content, parts, attending = transfer.content, transfer.heads.parts, attention_layers(cost)
    if content is Content.HALO:
        return 0.0
    if content in (Content.STATE, Content.MAP):
        return cost.sweep_bytes / PASSES / (cost.layers - attending) * transfer.tokens
    if content in (Content.KV, Content.DKV):
        share = cost.forward.ring if content is Content.KV else cost.backward.ring - cost.forward.ring
        repeated = max(1.0, parts / cost.kv_heads) / parts  # groups wider than the KV heads hold some of them twice
        return share * repeated * cost.ring_bytes / attending * transfer.tokens
    passed = cost.forward.exchange if content in (Content.QKV, Content.OUT) else cost.backward.exchange
    inputs = (cost.heads + 2 * cost.kv_heads) / (2 * cost.heads + 2 * cost.kv_heads)  # of queries, keys and values
    share = inputs if content in (Content.QKV, Content.DQKV) else 1 - inputs
    return share * passed * cost.exchange_bytes / attending * transfer.tokens / parts


class Phase(NamedTuple):
    """What a rank does at a time in a layer: it posts a grouped call, sleeps, and takes what the call brings."""

    transfers: Sequence[Transfer]
    seconds: float

    @classmethod
    def of(cls, call: RankRound | None, seconds: float | None = None) -> Phase:
        """Return the phase of a call and of what is slept beside it, where there are both."""
        return cls((*call.sends, *call.receives) if call else (), seconds or 0.0)


Layer = list[Phase]
"""One rank in one layer of one pass."""


class EmulatedRank:
    """One rank: sleeps its blocks, exchanges real messages, takes them when the emulated link would deliver them.

    bytes_share: how much of the bytes that the costs count for a message it carries. real_far: messages between nodes
    take what they take, nothing is slept for them. world: of all ranks that start together; None: `transport`.
    """

    def __init__(
        self, transport: Any, cost: Cost, bytes_share: float, *, real_far: bool = False, world: Any = None
    ) -> None:
        self._world = world or transport
        self._transport, self._cost, self._bytes_share, self._real_far = transport, cost, bytes_share, real_far
        self._until = 0.0
        self._outgoing, self._incoming = torch.zeros(0), torch.zeros(0)

    def run(self, plan: Plan) -> float:
        """Run one step of `plan`; return the wall-clock seconds from all ranks' start to this one's end."""
        layers = [
            layer
            for program in lower_plan(plan, self._transport.rank)
            for each in self._cost.passes(program.microbatch.recompute)
            for layer in self._layers(program, each)
        ]
        self._make_room(layers)
        mine, everyone = torch.zeros(_END_FLOATS), torch.zeros(_END_FLOATS * self._transport.world_size)
        start = self._until = self._common_start()
        self._sleep(0.0)
        for layer in layers:
            self._run_layer(layer)
        self._transport.reduce_scatter(mine, everyone)
        self._transport.all_gather(everyone, mine)
        self._until = self._due()
        self._sleep(self._cost.step_end_seconds(plan.ranks))
        return time.monotonic() - start

    def _common_start(self) -> float:
        """Agree on a point in time, a little later than when the last rank is ready; all share one clock."""
        ready = torch.zeros(self._world.world_size, dtype=torch.float64)
        ready[self._world.rank] = time.monotonic()
        self._world.all_reduce(ready)
        return float(ready.max()) + _LEAD_SECONDS

    def _layers(self, program: MicrobatchProgram, each: PassShares) -> list[Layer]:
        """Return all layers of a pass: those with states in groups of equally many, each before one that attends."""
        period = self._cost.layers // attention_layers(self._cost)
        with_state = [self._layer_with_state(program, each)] if period > 1 else []
        group = [*(with_state * (period - 1)), self._layer(program, each)]
        return (group[::-1] if each is self._cost.backward else group) * attention_layers(self._cost)

    def _layer(self, program: MicrobatchProgram, each: PassShares) -> Layer:
        rank, backward = self._transport.rank, each is self._cost.backward
        rounds = program.backward_rounds_of(rank) if backward else program.forward_rounds_of(rank)
        blocks = [self._blocks(program, each, ring_step) for ring_step in range(program.ring_steps)]
        contents = (Content.GRAD_OUT, Content.DQKV) if backward else (Content.QKV, Content.OUT)
        of_heads = [Phase.of(program.exchange_of(rank, content) if each.exchange else None) for content in contents]
        ring = starmap(Phase.of, zip_longest(rounds if each.ring else (), blocks, fillvalue=None))
        return [self._own(program, each), of_heads[0], *ring, of_heads[1]]

    def _layer_with_state(self, program: MicrobatchProgram, each: PassShares) -> Layer:
        """Return a layer whose state sweeps through sequences; what is computed again keeps what it received."""
        rank, cost = self._transport.rank, self._cost
        held = sum(segment.num_tokens for segment in program.segments(rank))
        cut = sum(program.shard_tokens(index, at) for index, piece, at in program.pieces_of(rank) if piece.degree > 1)
        seconds = each.linear * cost.cut_seconds * (held / SCAN_CUT + cut) / (cost.layers - attention_layers(cost))
        own, scan = self._own(program, each), Phase((), seconds)
        if not each.states:
            return [own, scan]
        sweep, halo = [Phase.of(one) for one in sweep_rounds_of(program, rank)], halo_round_of(program, rank, WIDTH)
        if each is cost.backward:
            return [own, *sweep, scan, Phase.of(halo.turned())]
        return [own, Phase.of(halo), scan, *sweep]

    def _own(self, program: MicrobatchProgram, each: PassShares) -> Phase:
        """Return the linear work of a layer, without scans, alike in all layers."""
        held, cost = sum(segment.num_tokens for segment in program.segments(self._transport.rank)), self._cost
        a_token = cost.linear_seconds - cost.cut_seconds / SCAN_CUT
        return Phase((), each.linear * (a_token * held + cost.fixed_seconds) / cost.layers)

    def _run_layer(self, layer: Layer) -> None:
        for transfers, seconds in layer:
            posted = self._post(transfers)
            self._sleep(seconds)
            self._take(posted)

    def _blocks(self, program: MicrobatchProgram, each: PassShares, ring_step: int) -> float:
        total = 0.0
        for task in program.tasks(self._transport.rank, ring_step):
            length = program.tokens[task.sequence]
            positions = program.microbatch.pieces[task.piece].degree / task.heads.parts
            of_step = self._cost.ring_step_seconds(np.array([float(length)]), positions)[min(ring_step, 1)]
            whole = float(of_step[0]) / task.heads.parts
            queries, keys = task.q_stop - task.q_start, task.kv_stop - task.kv_start
            total += whole * (1 if task.causal else 2) * queries * keys / length**2
        return each.attention * total / attention_layers(self._cost)

    def _floats(self, transfer: Transfer) -> int:
        return max(1, round(self._bytes_share * transfer_bytes(transfer, self._cost) / _FLOAT_BYTES))

    def _make_room(self, layers: Sequence[Layer]) -> None:
        """Allocate what messages are sent from and received into, so that no clock runs meanwhile."""
        most = max((sum(map(self._floats, each.transfers)) for layer in layers for each in layer), default=0)
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
            along_ring = each.content in _BETWEEN_NEIGHBOURS
            link = each.source if along_ring else -1  # an all-to-all shares this rank's own link
            latency = along_ring and link not in links
            links[link] = links.get(link, 0.0) + self._link_seconds(each, latency=latency)
            self._until = max(self._until, max(posted, float(stamp)) + links[link])
        self._sleep(0.0)

    def _leaves_node(self, transfer: Transfer) -> bool:
        return transfer.source // self._cost.ranks_per_node != transfer.target // self._cost.ranks_per_node

    def _link_seconds(self, transfer: Transfer, *, latency: bool) -> float:
        link = self._cost.far if self._leaves_node(transfer) else self._cost.near
        hop_seconds = link.hop_seconds / attention_layers(self._cost) if latency else 0.0
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


def emulated_cost(slower: float, *, nics: int, model: str = MODELS[0], layers: int = LAYERS, stages: int = 1) -> Cost:
    """Make the costs of the emulated model, of nodes with so many links to others; of one stage where it is cut."""
    fast = named_hardware("h100")
    slowed = {
        "peak_flops_per_second": fast.peak_flops_per_second / slower,
        "link_bytes_per_second": fast.link_bytes_per_second / slower,
        "node_link_bytes_per_second": fast.node_link_bytes_per_second / slower,
        "node_uplink_bytes_per_second": nics * fast.link_bytes_per_second / slower,
    }
    hardware = replace(fast, **slowed, ranks_per_node=stages * RANKS_PER_NODE)
    return all_terms_cost(in_layers(named_shape(model), layers), hardware, stages=stages)


def in_layers(shape: ModelShape, layers: int) -> ModelShape:
    """Return a shape of fewer layers in proportion; they must come out whole, and each attend or have a state."""
    sums = ("attention_layers", "mlp_layers", "state_layers", "mixer_params", "scan_flops", "mixer_kept")
    parts = {name: divmod(value * layers, shape.layers) for name in sums if (value := getattr(shape, name)) is not None}
    cut = replace(shape, layers=layers, **{name: part for name, (part, _) in parts.items()})
    assert not any(rest for _, rest in parts.values()), parts
    assert cut.num_attention + cut.state_layers == layers, cut
    assert layers % cut.num_attention == 0, cut
    return cut


def keys_bytes(cost: Cost) -> float:
    """Count the bytes of the keys and values of a token in one layer."""
    return cost.ring_bytes * cost.forward.ring / attention_layers(cost)
