"""Costs with all terms: forward and backward apart, two kinds of link, block sizes, heads, offload, recomputation.

A piece of d ranks is a ring of r = d / u positions, each of them u ranks that split the heads (u = 1: a plain ring).
Every pass over the layers (forward, backward, and forward again where activations are recomputed) takes a rank

    A + L + max(0, R - A) + h (r - 1) + X        seconds:

A  attention: q x (pairs seen) / d, divided by the share of its speed that blocks of s / r tokens reach;
L  what grows with tokens: l x tokens / d;
R  keys and values that pass through: bytes x S (r - 1) / d over the slowest link of the ring, hidden behind A;
h  latency of a hop;
X  all-to-all of queries, keys, values and outputs in groups of u ranks, (u - 1) / u of their bytes, hidden by nothing.

Where ranks are pipelines, or share uplinks, R and h are looked at hop by hop, as the simulator runs them
(`_exposed_by_hop`): a stage waits for those beside it, and a few per cent on a narrow ring decide which plan ends
first. For other ranks the sums above stay, by which the other plans of docs/benchmarks.md were made: up to 11 % off for
one ring, either way.

Backward has 2.5 x the attention but 3 x the bytes of forward (bf16 keys and values again, fp32 gradients), so it
exposes transfers first. Offload at ratio o copies o (L - 2) / L of the activations out under forward and in under what
follows it; only what is longer than that compute counts. A ring inside one node takes the near link; one that crosses
nodes is as slow as its far hops, each over its part of the uplink where a node's ranks share one.
Sources: ByteScale (arXiv 2502.21231) for offload, Ulysses (arXiv 2309.14509) for the all-to-all. With every extra term
off this is `CostModel`, to the last rounding.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from lengthwise.core.cut import position_chunks
from lengthwise.core.errors import ConfigError, PlanError
from lengthwise.cost.links import Link, Numbers, Pass, Reach
from lengthwise.cost.model import CostModel


@dataclass(frozen=True, slots=True, kw_only=True)
class AllTermsCost:
    """Seconds of forward and backward through the layers that one device of a rank holds.

    work: attention, linear work, launches and windows; its own ring and hop terms are not used.
    block_efficiency: as in `Hardware`; empty: blocks of any size run at full speed.
    forward, backward: shares of the two passes.
    near, far: links inside a node and between nodes; ranks_per_node: how many neighbours on the line share a node.
    uplink_bytes_per_second: what the ranks of a node send to other nodes together. A ring shares it with itself, as
        one that is alone in its nodes does; other rings that pass the same node at the time are the simulator's matter.
    straddles: price pieces whose place is not told as if each lay across one border of nodes more than it need.
    ring_bytes, exchange_bytes: a token, all layers, both passes: what a ring passes on, what an all-to-all moves.
    heads, kv_heads: of one device; groups of u ranks must divide the heads, and repeat KV heads beyond `kv_heads`.
    copy_bytes: activations of a token that can be offloaded, for each kind of recomputation.
    copy_bytes_per_second: to or from the host, one direction, with the node's other ranks copying too.
    host_bytes: a device's part of the host's memory, for what is offloaded.
    reduced_bytes: gradients and parameters that the step's end moves, a rank.
    stages: pipeline stages of a rank; coefficients are those of one stage.
    stage_bytes: of a token's activations, sent on from a stage to the next, between nodes.
    """

    work: CostModel
    block_efficiency: tuple[tuple[float, float], ...] = ()
    forward: Pass
    backward: Pass
    near: Link
    far: Link
    ranks_per_node: int
    ring_bytes: float
    exchange_bytes: float
    heads: int
    kv_heads: int
    layers: int
    copy_bytes: Mapping[str, float]
    copy_bytes_per_second: float
    reduced_bytes: float
    host_bytes: float = math.inf
    stages: int = 1
    stage_bytes: float = 0.0
    uplink_bytes_per_second: float = math.inf
    straddles: bool = False
    version: str = "given"

    @property
    def fixed_seconds(self) -> float:
        """Seconds that a microbatch takes on each of its ranks, whatever it holds."""
        return self.work.fixed_seconds

    @property
    def couples_layers(self) -> bool:
        """Whether ranks of a ring wait for the slowest of them in every layer: yes, as in the simulator."""
        return True

    @property
    def ring_seconds(self) -> float:
        """Seconds to pass on one token's keys, values and gradients between nodes."""
        return self.ring_bytes / self.far.bytes_per_second

    @property
    def shares_uplinks(self) -> bool:
        """Whether the uplink of a node is less than the far links of its ranks together."""
        return self.uplink_bytes_per_second < self.far.bytes_per_second * self.ranks_per_node

    def hops_seconds(self, degree: int, *, recompute: str = "none") -> float:
        """Tell the latency of all hops of a ring of `degree` positions, placed in as few nodes as can be."""
        link = self.near if degree <= self._inside_ranks else self.far
        if self._prices_hops:  # hops hide, but for the last of backward
            return link.hop_seconds if degree > 1 else 0.0
        return sum(link.hop_seconds for each in self.passes(recompute) if each.ring) * (degree - 1)

    def at_speed(self, speed: float) -> AllTermsCost:
        """Return the costs of ranks that compute and launch `speed` times as fast; links and copies stay."""
        return replace(self, work=self.work.at_speed(speed))

    def compute_seconds(self, lengths: NDArray[np.int64]) -> NDArray[np.float64]:
        """Tell the arithmetic of each sequence alone on one rank, in seconds."""
        tokens = lengths.astype(np.float64)
        return self.attention_seconds(tokens, 1) + self.work.linear_seconds * tokens

    def piece_seconds(
        self,
        lengths: Sequence[int],
        degree: int,
        *,
        ranks: Sequence[int] | None = None,
        heads: int = 1,
        offload: float = 0.0,
        recompute: str = "none",
        shares: tuple[float, ...] | None = None,
        speeds: Sequence[float] | None = None,
    ) -> float:
        """Tell how long a piece keeps each of its ranks busy, the microbatch's `fixed_seconds` left out.

        Args:
            lengths: of the sequences of the piece.
            degree: over how many ranks each is cut.
            ranks: where the piece is, in ring order (default: in as few nodes as can be).
            heads: ranks of a group that splits heads; divides `degree` and the model's heads.
            offload: ratio of the microbatch, 0 to 1.
            recompute: kind of the microbatch, see `core.plan.RECOMPUTE_KINDS`.
            shares: weight of each rank's part (default: all equal); the slowest rank counts.
            speeds: how many times as fast each rank computes, in ring order (default: as the costs say).

        Raises:
            PlanError: groups of heads that divide neither.
        """
        self._refuse_heads(degree, heads)
        tokens = np.array(lengths, dtype=np.float64)
        attention, total = float(self.attention_seconds(tokens, degree / heads).sum()), float(tokens.sum())
        parts: Numbers = 1.0 / degree
        held: Numbers = total / degree
        if shares is not None:
            parts, held = _parts(lengths, degree, shares)
        pace: Numbers = 1.0 if speeds is None else np.array(speeds)
        reach, work = self.reach(degree, heads, ranks), attention * parts / pace
        seconds = self._seconds(work, held, total, degree, heads, reach, offload, recompute, pace)
        return float(np.max(seconds))

    def ring_piece_seconds(
        self,
        lengths: NDArray[np.int64],
        degrees: NDArray[np.int64],
        *,
        heads: NDArray[np.int64] | int = 1,
        offload: NDArray[np.float64] | float = 0.0,
        recompute: str = "none",
    ) -> NDArray[np.float64]:
        """Do `piece_seconds` for many pieces of one sequence each, each in as few nodes as can be.

        Entry i is of `lengths[i]` over `degrees[i]` ranks; heads and offload may be one for all, or arrays.
        """
        tokens = lengths.astype(np.float64)
        attention = self.attention_seconds(tokens, degrees / heads) / degrees
        reach = self._least_reach(degrees, heads)
        return self._seconds(attention, tokens / degrees, tokens, degrees, heads, reach, offload, recompute)

    def free_offload(
        self, lengths: NDArray[np.int64], degrees: NDArray[np.int64], *, recompute: str = "none"
    ) -> NDArray[np.float64]:
        """Tell the largest ratio at which copies hide behind compute, for each sequence over its degree: Eq. 3."""
        tokens = lengths.astype(np.float64)
        attention, linear = (
            self.attention_seconds(tokens, degrees) / degrees,
            self.work.linear_seconds * tokens / degrees,
        )
        first, *others = (each.attention * attention + each.linear * linear for each in self.passes(recompute))
        whole = self.copy_seconds(tokens / degrees, 1.0, recompute)
        hides = np.minimum(first, sum(others))
        return np.minimum(1.0, hides / np.maximum(whole, 1e-300))  # nothing to copy: any ratio is free

    def step_end_seconds(self, ranks: int) -> float:
        """Tell how long gradients and parameters take to be reduced and gathered over all ranks, once a step.

        Between nodes all links of a node carry their part, as ring collectives do, as far as its uplink allows.
        """
        outside = min(self.far.bytes_per_second * self.ranks_per_node, self.uplink_bytes_per_second)
        together = min(self.near.bytes_per_second, outside)
        rate = self.near.bytes_per_second if ranks <= self.ranks_per_node else together
        return self.reduced_bytes * (ranks - 1) / ranks / rate

    def stage_send_seconds(self, held: NDArray[np.float64]) -> NDArray[np.float64]:
        """Tell how long the activations of so many tokens of a rank take from one stage to the next."""
        return self.far.hop_seconds / self.layers + self.stage_bytes * held / self.far.bytes_per_second

    def crosses(self, ranks: Sequence[int]) -> bool:
        """Tell whether these ranks are of more than one node."""
        return min(ranks) // self.ranks_per_node != max(ranks) // self.ranks_per_node

    def reach(self, degree: int, heads: int, ranks: Sequence[int] | None = None) -> Reach:
        """Tell how far a piece reaches; `ranks`: as for `piece_seconds`, of which nothing else matters."""
        if ranks is None:
            return self._least_reach(degree, heads)
        groups = (ranks[first : first + heads] for first in range(0, degree, heads))
        ring_near = not self.crosses(ranks)
        groups_near = heads == 1 or not any(self.crosses(group) for group in groups)
        return Reach(ring_near, groups_near, self._flows(ranks, heads) if self.shares_uplinks and not ring_near else 1)

    def _least_reach(self, degree: Numbers, heads: Numbers) -> Reach:
        """Tell how far pieces reach where each is in as few nodes as can be, or, with `straddles`, in one more.

        A ring passes every border between nodes once in each direction, with as many messages as groups have ranks.
        """
        node, inside = self.ranks_per_node, self._inside_ranks
        flows: Numbers = 1
        if self.shares_uplinks:
            borders = np.ceil(degree / node) - 1 + self.straddles
            flows = np.maximum(1, np.minimum(node, heads * np.minimum(2, borders)))
        return Reach(degree <= inside, (degree <= inside) | (heads <= inside), flows)

    @property
    def _inside_ranks(self) -> int:
        return 1 if self.straddles else self.ranks_per_node

    @property
    def _prices_hops(self) -> bool:
        """Whether transfers are looked at hop by hop."""
        return self.stages > 1 or self.shares_uplinks

    def _flows(self, ranks: Sequence[int], heads: int) -> int:
        """Count what leaves, or comes into, the busiest node at once: all of a group sends where any of it must."""
        nodes = np.array(ranks).reshape(-1, heads) // self.ranks_per_node
        into = np.roll(nodes, -1, axis=0)
        far = np.any(nodes != into, axis=1)
        return max(int(np.unique(each[far], return_counts=True)[1].max(initial=1)) for each in (nodes, into))

    def passes(self, recompute: str) -> tuple[Pass, ...]:
        """List the sweeps over the layers, forward first."""
        again = {
            "none": (),
            "layer": (self.forward,),
            "all_but_attention": (Pass(attention=0.0, linear=self.forward.linear, ring=0.0, exchange=0.0),),
        }
        return (self.forward, *again[recompute], self.backward)

    def attention_seconds(self, tokens: NDArray[np.float64], positions: Numbers) -> NDArray[np.float64]:
        """Tell the attention of each sequence in seconds, all its ranks together, cut over ring `positions`."""
        seconds = self.work.quadratic_seconds * self.work.seen_pairs(tokens)
        if not self.block_efficiency:
            return seconds
        points, shares = zip(*self.block_efficiency, strict=True)
        blocks = tokens / positions
        return seconds / (np.interp(blocks, points, shares) * np.minimum(1.0, blocks / points[0]))

    def copy_seconds(self, held: Numbers, offload: Numbers, recompute: str) -> Numbers:
        """Tell how long one direction of a rank's copies takes for the tokens that it holds.

        Two layers stay on the device as a double buffer.
        """
        layers = max(self.layers, 2)
        return offload * (layers - 2) / layers * self.copy_bytes[recompute] * held / self.copy_bytes_per_second

    def _seconds(
        self,
        attention: Numbers,
        held: Numbers,
        total: Numbers,
        degree: Numbers,
        heads: Numbers,
        reach: Reach,
        offload: Numbers,
        recompute: str,
        pace: Numbers = 1.0,
    ) -> Numbers:
        """Sum the passes of one rank: its attention in seconds, the tokens it holds, and those of the whole piece.

        `pace`: how many times as fast it computes; `attention` is that of the rank at its pace.
        """
        positions = degree / heads
        ring, hop = self._ring(reach)
        repeated = np.maximum(1.0, heads / self.kv_heads)  # a group wider than the KV heads holds some of them twice
        transfers = ring * repeated * (total * positions - total) / degree
        linear = self.work.linear_seconds * held / pace
        outside = min(self.far.bytes_per_second, self.uplink_bytes_per_second / self.ranks_per_node)
        links = np.where(reach.groups_near, self.near.bytes_per_second, outside)
        exchange = self.exchange_bytes * held * (heads - 1) / heads / links
        seconds: Numbers = 0.0
        computes = []
        for each in self.passes(recompute):
            hides = each.attention * attention
            computes.append(hides + each.linear * linear)
            seconds = seconds + computes[-1] + each.exchange * exchange
            if each.ring and self._prices_hops:
                seconds = seconds + self._exposed_by_hop(each, hides, transfers, hop, positions)
            elif each.ring:
                seconds = seconds + np.maximum(0.0, each.ring * transfers - hides) + hop * (positions - 1)
        if np.any(offload):
            copy = self.copy_seconds(held, offload, recompute)
            seconds = seconds + np.maximum(0.0, copy - computes[0]) + np.maximum(0.0, copy - sum(computes[1:]))
        return seconds

    def _exposed_by_hop(
        self, each: Pass, hides: Numbers, transfers: Numbers, hop: Numbers, positions: Numbers
    ) -> Numbers:
        """Sum what each hop of a pass takes beyond the block that it runs beside, as the simulator runs them.

        Keys go under all blocks but the last. In backward gradients follow two hops behind, the last under nothing.
        """
        hops = np.maximum(positions - 1, 1)
        block, keys = hides / positions, self.forward.ring * transfers / hops + hop
        if each is not self.backward:
            return np.where(positions > 1, hops * np.maximum(0.0, keys - block), 0.0)
        gradients = (each.ring - self.forward.ring) * transfers / hops
        exposed = (
            np.minimum(2, hops) * np.maximum(0.0, keys - block)
            + np.maximum(0, positions - 3) * np.maximum(0.0, keys + gradients - block)
            + (positions >= 3) * np.maximum(0.0, gradients + hop - block)
            + gradients
            + hop
        )
        return np.where(positions > 1, exposed, 0.0)

    def _ring(self, reach: Reach) -> tuple[Numbers, Numbers]:
        """Return seconds to pass one token on, and of a hop in one pass, over the near or the far link."""
        far: Numbers = self.far.bytes_per_second
        if self.shares_uplinks:
            far = np.minimum(far, self.uplink_bytes_per_second / reach.flows)
        rate = np.where(reach.ring_near, self.near.bytes_per_second, far)
        return self.ring_bytes / rate, np.where(reach.ring_near, self.near.hop_seconds, self.far.hop_seconds)

    def _refuse_heads(self, degree: int, heads: int) -> None:
        if degree % heads or self.heads % heads:
            raise PlanError(
                "heads",
                expected=f"a divisor of the {degree} ranks and of the model's {self.heads} heads",
                got=str(heads),
                remedy="Split heads over fewer ranks.",
            )

    def __post_init__(self) -> None:
        numbers = {
            "near: bytes_per_second": self.near.bytes_per_second,
            "far: bytes_per_second": self.far.bytes_per_second,
            "ranks_per_node": self.ranks_per_node,
            "copy_bytes_per_second": self.copy_bytes_per_second,
            "heads": self.heads,
            "kv_heads": self.kv_heads,
            "stages": self.stages,
        }
        if self.uplink_bytes_per_second <= 0 or math.isnan(self.uplink_bytes_per_second):
            numbers["uplink_bytes_per_second"] = self.uplink_bytes_per_second
        for name, value in numbers.items():
            if not math.isfinite(value) or value <= 0:
                raise ConfigError(f"cost: {name}", expected="a number above 0", got=repr(value), remedy=f"Mend {name}.")


def _parts(lengths: Sequence[int], degree: int, shares: tuple[float, ...]) -> tuple[Numbers, Numbers]:
    """Tell, for each rank of unequal shares, its part of the attention and the tokens that it holds."""
    pairs, held = np.zeros(degree), np.zeros(degree)
    for length in lengths:
        for position in range(degree):
            for start, stop in position_chunks(length, degree, position, shares):
                pairs[position] += float(stop) ** 2 - float(start) ** 2
                held[position] += stop - start
    return pairs / sum(float(length) ** 2 for length in lengths), held
