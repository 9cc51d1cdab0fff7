"""How long a piece takes: one record, used alike by planners, score and simulator.

A piece of d ranks that holds sequences of lengths s_i, with S their sum, keeps each of its ranks busy for

    (q sum s_i^2 + l S) / d  +  max(0, c S (d - 1) / d  -  q sum s_i^2 / d)  +  h (d - 1)

seconds, the last two terms only for d > 1; every microbatch adds g on each of its ranks. The middle term is the part
of the ring's transfers that attention does not hide. q is `quadratic_seconds`, l `linear_seconds`, g `fixed_seconds`,
c `ring_seconds`, h `hop_seconds`: forward and backward of all layers together. Under a sliding window of w tokens a
longer sequence counts 2 s w - w^2 in place of s^2; that such layers also send less is not counted.

Where links are given, `near` and `far`, a ring is r = d / u positions of u ranks that split the heads (u = 1: a plain
ring), and every pass (forward, backward, forward again where activations are recomputed) takes a rank

    A + L + max(0, R - A) + h (r - 1) + X        seconds:

A  attention: q x (pairs seen) / d, divided by the share of its speed that blocks of s / r tokens reach;
L  what grows with tokens: l x tokens / d;
R  keys and values that pass through: bytes x S (r - 1) / d over the slowest link of the ring, hidden behind A;
h  latency of a hop;
X  all-to-all of queries, keys, values and outputs in groups of u ranks, (u - 1) / u of their bytes, hidden by nothing.

Backward has 2.5 x the attention but 3 x the bytes of forward, so it exposes transfers first. Where ranks are pipelines,
or share uplinks, R and h are looked at hop by hop, as the simulator runs them; for others the sums are up to 11 % off
for one ring, either way. Offload at ratio o copies o (L - 2) / L of the activations out under forward and in under what
follows; what is longer than that compute counts. With `choices` a piece takes the offload that it needs, the least o
with h (2 + (1 - o) (L - 2)) / L <= capacity for h tokens held, and the quickest split of heads.

Sources: ByteScale (arXiv 2502.21231) for offload, Ulysses (arXiv 2309.14509) for the all-to-all.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from math import inf
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lengthwise.core.cut import position_chunks
from lengthwise.core.errors import ConfigError, PlanError
from lengthwise.cost.links import Choice, Choices, Link, Numbers, Pass, Reach

_FREE = Link(bytes_per_second=inf)
_AS_CUT, _NOTHING = Choice(), Choices()
# Two products of attention forward and five backward; keys and values in bf16, once more and fp32 gradients backward.
_FORWARD = Pass(attention=2 / 7, linear=1 / 3, ring=1 / 4, exchange=1 / 2)
_BACKWARD = Pass(attention=5 / 7, linear=2 / 3, ring=3 / 4, exchange=1 / 2)


class _Part(NamedTuple):
    """What one rank does of a piece: its attention in seconds, tokens held, and how many times as fast it computes."""

    attention: Numbers
    held: Numbers
    pace: Numbers = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Seconds of forward and backward through the layers that one device of a rank holds.

    The five coefficients alone are what an outside judge computes by hand; all fields from `near` on need links.

    quadratic_seconds: seconds a squared token of attention (a sequence of s tokens counts s x s).
    linear_seconds: seconds a token of everything that grows with tokens: projections, MLP, output head.
    fixed_seconds: seconds a microbatch, on each of its ranks, whatever it holds.
    ring_seconds: seconds to move the keys, values and their gradients of one token over one link; 0 with links.
    hop_seconds: seconds of latency a hop of a ring, transfers of all layers and both passes together; 0 with links.
    windows: (window in tokens, share of the attention layers that have it); the other layers see everything.
    couples_layers: whether ranks of a ring wait for the slowest of them in every layer, as they do in engines: local
        packs beside a ring on some of its ranks then hold up all. False: each rank is busy for its own pieces.
    version: what the costs come from; written into every plan made with them.
    forward, backward: shares of the two passes.
    near, far: links inside a node and between nodes; ranks_per_node: how many neighbours on the line share a node.
    uplink_bytes_per_second: what the ranks of a node send to other nodes together. A ring shares it with itself, as
        one that is alone in its nodes does; other rings that pass the same node at the time are the simulator's matter.
    straddles: price pieces whose place is not told as if each lay across one border of nodes more than it need.
    block_efficiency: as in `Hardware`; empty: blocks of any size run at full speed.
    ring_bytes, exchange_bytes: a token, all layers, both passes: what a ring passes on, what an all-to-all moves.
    heads, kv_heads: of one device; groups of u ranks must divide the heads, and repeat KV heads beyond `kv_heads`.
    copy_bytes: activations of a token that can be offloaded, for each kind of recomputation.
    copy_bytes_per_second: to or from the host, one direction, with the node's other ranks copying too.
    host_bytes: a device's part of the host's memory, for what is offloaded.
    reduced_bytes: gradients and parameters that the step's end moves, a rank.
    stages: pipeline stages of a rank; coefficients are those of one stage.
    stage_bytes: of a token's activations, sent on from a stage to the next, between nodes.
    choices: what pieces may choose whose `Choice` is not told.

    Raises:
        ConfigError: a coefficient that is negative or not finite, all of them zero, or links that cannot be.
    """

    quadratic_seconds: float = 0.0
    linear_seconds: float = 0.0
    fixed_seconds: float = 0.0
    ring_seconds: float = 0.0
    hop_seconds: float = 0.0
    windows: tuple[tuple[int, float], ...] = ()
    couples_layers: bool = False
    version: str = "given"
    forward: Pass = _FORWARD
    backward: Pass = _BACKWARD
    near: Link = _FREE
    far: Link = _FREE
    ranks_per_node: int = 1
    uplink_bytes_per_second: float = inf
    straddles: bool = False
    block_efficiency: tuple[tuple[float, float], ...] = ()
    ring_bytes: float = 0.0
    exchange_bytes: float = 0.0
    heads: int = 1
    kv_heads: int = 1
    layers: int = 1
    copy_bytes: Mapping[str, float] = field(default_factory=dict[str, float], hash=False)
    copy_bytes_per_second: float = inf
    host_bytes: float = inf
    reduced_bytes: float = 0.0
    stages: int = 1
    stage_bytes: float = 0.0
    choices: Choices = _NOTHING

    def __post_init__(self) -> None:
        coefficients = {each.name: getattr(self, each.name) for each in fields(self) if each.name.endswith("_seconds")}
        for name, value in coefficients.items():
            if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
                raise _refused(name, "a finite number of seconds, 0 or more", value, f"Give {name} in seconds.")
        if not any(coefficients.values()):
            remedy = "Give linear_seconds and quadratic_seconds, at least."
            raise _refused("coefficients", "at least one coefficient above 0", list(coefficients.values()), remedy)
        shares = [share for _, share in self.windows]
        if any(window < 1 for window, _ in self.windows) or min(shares, default=0) < 0 or sum(shares) > 1 + 1e-9:
            expected = "windows of at least 1 token, and shares of the layers that sum to at most 1"
            raise _refused("windows", expected, self.windows, "Mend the windows.")
        if self.near == self.far == _FREE:
            return
        if self.ring_seconds or self.hop_seconds:
            got = self.ring_seconds, self.hop_seconds
            raise _refused("ring_seconds, hop_seconds", "0 beside links", got, "Give ring_bytes in place of them.")
        numbers = {f"{name}: bytes_per_second": getattr(self, name).bytes_per_second for name in ("near", "far")}
        names = ("ranks_per_node", "copy_bytes_per_second", "heads", "kv_heads", "stages")
        numbers |= {name: getattr(self, name) for name in names}
        if not self.uplink_bytes_per_second > 0:
            numbers["uplink_bytes_per_second"] = self.uplink_bytes_per_second
        for name, value in numbers.items():
            if not math.isfinite(value) or value <= 0:
                raise _refused(name, "a number above 0", value, f"Mend {name}.")

    # What these costs price.

    @property
    def prices_choices(self) -> bool:
        """Whether links are given, and with them heads, offload, shares and the place of a piece are priced."""
        return self.far.bytes_per_second < inf

    @property
    def chooses(self) -> bool:
        """Whether pieces are priced with the best of their choices instead of those that a plan has written."""
        return self.prices_choices and (self.choices.recompute != "none" or self.chooses_by_degree)

    @property
    def offloads(self) -> bool:
        """Whether a rank may hold more than its device does."""
        return self.choices.offloads_above_tokens < inf

    @property
    def chooses_by_degree(self) -> bool:
        """Whether offload or heads are chosen: what a piece takes of all ranks' time may then fall as it is cut."""
        return self.offloads or self.choices.splits_heads

    @property
    def shares_uplinks(self) -> bool:
        """Whether the uplink of a node is less than the far links of its ranks together."""
        return self.uplink_bytes_per_second < self.far.bytes_per_second * self.ranks_per_node

    # The same costs, changed.

    def at_speed(self, speed: float) -> Cost:
        """Return the costs of ranks that compute and launch `speed` times as fast; links, hops and copies stay."""
        names = ("quadratic_seconds", "linear_seconds", "fixed_seconds")
        return replace(self, **{name: getattr(self, name) / speed for name in names})

    def recomputing(self, kind: str) -> Cost:
        """Return the costs of microbatches whose `recompute` is `kind`; costs of one kind cannot become another's.

        The output head is counted as if it were run again, though it is not.
        """
        if kind in ("none", self.choices.recompute):
            return self
        assert self.choices.recompute == "none", (self.choices.recompute, kind)
        passes, choices = self.passes(kind), replace(self.choices, recompute=kind)
        linear = sum(each.linear for each in passes)
        launched = replace(self, fixed_seconds=self.fixed_seconds * linear, choices=choices)
        if self.prices_choices:
            return launched
        return replace(
            launched,
            linear_seconds=self.linear_seconds * linear,
            quadratic_seconds=self.quadratic_seconds * sum(each.attention for each in passes),
            ring_seconds=self.ring_seconds * sum(each.ring for each in passes),
            hop_seconds=self.hop_seconds * sum(each.ring > 0 for each in passes) / 2,
        )

    def choosing(self, choices: Choices) -> Cost:
        """Return the costs of pieces that may choose so; without links only the recomputation counts."""
        return replace(self.recomputing(choices.recompute), choices=choices)

    def without_copies(self) -> Cost:
        """Return the same costs as if nothing had to be offloaded: less, for any plan."""
        return replace(self, choices=replace(self.choices, offloads_above_tokens=inf)) if self.offloads else self

    # Seconds.

    def piece_seconds(
        self,
        lengths: Sequence[int],
        degree: int,
        choice: Choice | None = None,
        *,
        ranks: Sequence[int] | None = None,
        shares: tuple[float, ...] | None = None,
        speeds: Sequence[float] | None = None,
    ) -> float:
        """Count how long a piece keeps each of its ranks busy, the microbatch's `fixed_seconds` left out.

        Args:
            lengths: of the sequences of the piece.
            degree: over how many ranks each is cut.
            choice: what the piece does (default: the best of `choices`).
            ranks: where the piece is, in ring order (default: in as few nodes as can be).
            shares: weight of each rank's part (default: all equal); the slowest rank counts.
            speeds: how many times as fast each rank computes, in ring order (default: as the costs say).

        Raises:
            PlanError: groups of heads that divide neither ranks nor heads.
        """
        if not self.prices_choices:
            return self._plain_seconds(lengths, degree)
        if choice is None and self.chooses:
            offload = float(self._needed(np.array([float(sum(lengths))]), np.array([degree]), len(lengths))[0])
            each = (Choice(heads=u, offload=offload, recompute=self.choices.recompute) for u in self._groups(degree))
            return min(self.piece_seconds(lengths, degree, one) for one in each if degree % one.heads == 0)
        choice = choice or _AS_CUT
        self._refuse_heads(degree, choice.heads)
        tokens = np.array(lengths, dtype=np.float64)
        attention = float(self.attention_seconds(tokens, degree / choice.heads).sum())
        total = float(tokens.sum())
        parts: Numbers = 1.0 / degree
        held: Numbers = total / degree
        if shares is not None:
            parts, held = _parts(lengths, degree, shares)
        pace: Numbers = 1.0 if speeds is None else np.array(speeds)
        part = _Part(attention * parts / pace, held, pace)
        return float(np.max(self._seconds(part, total, degree, choice, self.reach(degree, choice.heads, ranks))))

    def ring_piece_seconds(
        self, lengths: NDArray[np.int64], degrees: NDArray[np.int64], choice: Choice | None = None
    ) -> NDArray[np.float64]:
        """Do `piece_seconds` for many pieces of one sequence each, each in as few nodes as can be.

        Entry i is of `lengths[i]` over `degrees[i]` ranks. Choosing heads costs about as much again.
        """
        tokens = lengths.astype(np.float64)
        if not self.prices_choices:
            attention = self.quadratic_seconds * self.seen_pairs(tokens)
            transfers = self.ring_seconds * tokens * (degrees - 1)
            exposed = np.where(degrees > 1, np.maximum(0.0, transfers - attention), 0.0)
            return (attention + self.linear_seconds * tokens + exposed) / degrees + self.hop_seconds * (degrees - 1)
        if choice is not None or not self.chooses:
            return self._rings_seconds(tokens, degrees, choice or _AS_CUT)
        whole = Choice(offload=self._needed(tokens, degrees, 1), recompute=self.choices.recompute)
        seconds = self._rings_seconds(tokens, degrees, whole)
        for group in self._groups(int(degrees.max(initial=1)))[1:]:
            some = np.flatnonzero(degrees % group == 0)
            split = replace(whole, heads=group, offload=whole.offload[some])
            seconds[some] = np.minimum(seconds[some], self._rings_seconds(tokens[some], degrees[some], split))
        return seconds

    def compute_seconds(self, lengths: NDArray[np.int64]) -> NDArray[np.float64]:
        """Count the arithmetic of each sequence alone on one rank, in seconds; no cut makes it less in sum."""
        tokens = lengths.astype(np.float64)
        if not self.prices_choices and not self.windows:
            return (self.quadratic_seconds * tokens + self.linear_seconds) * tokens
        attention, linear = self.attention_seconds(tokens, 1), self.linear_seconds * tokens
        if not self.chooses:
            return attention + linear
        passes = self.passes(self.choices.recompute)
        return sum(each.attention for each in passes) * attention + sum(each.linear for each in passes) * linear

    def attention_seconds(self, tokens: NDArray[np.float64], positions: Numbers) -> NDArray[np.float64]:
        """Count the attention of each sequence in seconds, all its ranks together, cut over ring `positions`."""
        seconds = self.quadratic_seconds * self.seen_pairs(tokens)
        if not self.block_efficiency:
            return seconds
        points, shares = zip(*self.block_efficiency, strict=True)
        blocks = tokens / positions
        return seconds / (np.interp(blocks, points, shares) * np.minimum(1.0, blocks / points[0]))

    def seen_pairs(self, tokens: NDArray[np.float64]) -> NDArray[np.float64]:
        """Count what attention sees in each sequence, twice, over all layers: s^2 where no window is shorter."""
        seen = tokens * tokens
        for window, share in self.windows:
            seen = seen - share * np.maximum(0.0, tokens - window) ** 2  # s^2 - (2 s w - w^2)
        return seen

    def hops_seconds(self, degree: int) -> float:
        """Return the part of a plain ring's seconds that depends on its degree alone: the latency of its hops."""
        if not self.prices_choices:
            return self.hop_seconds * (degree - 1)
        link = self.near if degree <= self._inside_ranks else self.far
        if self._prices_hops:  # hops hide, but for the last of backward
            return link.hop_seconds if degree > 1 else 0.0
        return sum(link.hop_seconds for each in self.passes(self.choices.recompute) if each.ring) * (degree - 1)

    def copy_seconds(self, held: Numbers, offload: Numbers, recompute: str) -> Numbers:
        """Return how long one direction of a rank's copies takes for the tokens that it holds.

        Two layers stay on the device as a double buffer.
        """
        layers = max(self.layers, 2)
        return offload * (layers - 2) / layers * self.copy_bytes[recompute] * held / self.copy_bytes_per_second

    def step_end_seconds(self, ranks: int) -> float:
        """Return how long gradients and parameters take to be reduced and gathered over all ranks, once a step.

        Between nodes all links of a node carry their part, as ring collectives do, as far as its uplink allows.
        """
        outside = min(self.far.bytes_per_second * self.ranks_per_node, self.uplink_bytes_per_second)
        together = min(self.near.bytes_per_second, outside)
        rate = self.near.bytes_per_second if ranks <= self.ranks_per_node else together
        return self.reduced_bytes * (ranks - 1) / ranks / rate

    def stage_send_seconds(self, held: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return how long the activations of so many tokens of a rank take from one stage to the next."""
        return self.far.hop_seconds / self.layers + self.stage_bytes * held / self.far.bytes_per_second

    # Memory, where a rank may offload.

    def most_held_tokens(self, capacity_tokens: int) -> int:
        """Count the tokens a rank holds at most, with all offloaded that may be and that the host has room for.

        One token less than the plan file allows where something is offloaded: no rounding then breaks its rule.
        """
        layers = self.choices.layers
        if not self.offloads or layers <= 2:
            return capacity_tokens
        hosted = self.host_bytes / max(self.copy_bytes[self.choices.recompute], 1e-300)
        return max(capacity_tokens, int(min(capacity_tokens * layers / 2, capacity_tokens + hosted)) - 1)

    def free_offload(self, lengths: NDArray[np.int64], degrees: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the largest ratio at which copies hide behind compute, for each sequence over its degree: Eq. 3."""
        tokens, recompute = lengths.astype(np.float64), self.choices.recompute
        attention, linear = self.attention_seconds(tokens, degrees) / degrees, self.linear_seconds * tokens / degrees
        first, *others = (each.attention * attention + each.linear * linear for each in self.passes(recompute))
        whole = self.copy_seconds(tokens / degrees, 1.0, recompute)
        hides = np.minimum(first, sum(others))
        return np.minimum(1.0, hides / np.maximum(whole, 1e-300))  # nothing to copy: any ratio is free

    def hides_copies(self, lengths: NDArray[np.int64], degrees: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return for which sequences over their degree the copies that they need hide behind compute: Eq. 3."""
        needed = self._needed(lengths.astype(np.float64), degrees, 1)
        return needed <= self.free_offload(lengths, degrees) * (1 + 1e-12)

    # Passes and places.

    def passes(self, recompute: str) -> tuple[Pass, ...]:
        """List the sweeps over the layers, forward first."""
        again = {
            "none": (),
            "layer": (self.forward,),
            "all_but_attention": (Pass(attention=0.0, linear=self.forward.linear, ring=0.0, exchange=0.0),),
        }
        return (self.forward, *again[recompute], self.backward)

    def forward_share(self, recompute: str) -> float:
        """Return which share of a microbatch's time is its first forward pass, by its linear work."""
        return self.forward.linear / sum(each.linear for each in self.passes(recompute))

    def crosses(self, ranks: Sequence[int]) -> bool:
        """Return whether these ranks are of more than one node."""
        return min(ranks) // self.ranks_per_node != max(ranks) // self.ranks_per_node

    def reach(self, degree: int, heads: int, ranks: Sequence[int] | None = None) -> Reach:
        """Return how far a piece reaches; `ranks`: as for `piece_seconds`, of which nothing else matters."""
        if ranks is None:
            return self._least_reach(degree, heads)
        groups = (ranks[first : first + heads] for first in range(0, degree, heads))
        ring_near = not self.crosses(ranks)
        groups_near = heads == 1 or not any(self.crosses(group) for group in groups)
        return Reach(ring_near, groups_near, self._flows(ranks, heads) if self.shares_uplinks and not ring_near else 1)

    def _least_reach(self, degree: Numbers, heads: Numbers) -> Reach:
        """Return how far pieces reach where each is in as few nodes as can be, or, with `straddles`, in one more.

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

    # The formulas.

    def _plain_seconds(self, lengths: Sequence[int], degree: int) -> float:
        total = sum(lengths)
        pairs = sum(length * length for length in lengths)
        if self.windows:
            pairs = float(self.seen_pairs(np.array(lengths, dtype=np.float64)).sum())
        attention = self.quadratic_seconds * pairs
        seconds = (attention + self.linear_seconds * total) / degree
        if degree > 1:
            transfers = self.ring_seconds * total * (degree - 1)
            seconds += max(0.0, (transfers - attention) / degree) + self.hop_seconds * (degree - 1)
        return seconds

    def _rings_seconds(
        self, tokens: NDArray[np.float64], degrees: NDArray[np.int64], choice: Choice
    ) -> NDArray[np.float64]:
        attention = self.attention_seconds(tokens, degrees / choice.heads) / degrees
        reach = self._least_reach(degrees, choice.heads)
        return self._seconds(_Part(attention, tokens / degrees), tokens, degrees, choice, reach)

    def _seconds(self, part: _Part, total: Numbers, degree: Numbers, choice: Choice, reach: Reach) -> Numbers:
        """Sum the passes of one rank; `total`: tokens of the whole piece."""
        heads, positions = choice.heads, degree / choice.heads
        ring, hop = self._ring(reach)
        repeated = np.maximum(1.0, heads / self.kv_heads)  # a group wider than the KV heads holds some of them twice
        transfers = ring * repeated * (total * positions - total) / degree
        linear = self.linear_seconds * part.held / part.pace
        outside = min(self.far.bytes_per_second, self.uplink_bytes_per_second / self.ranks_per_node)
        links = np.where(reach.groups_near, self.near.bytes_per_second, outside)
        exchange = self.exchange_bytes * part.held * (heads - 1) / heads / links
        seconds: Numbers = 0.0
        computes = []
        for each in self.passes(choice.recompute):
            hides = each.attention * part.attention
            computes.append(hides + each.linear * linear)
            seconds = seconds + computes[-1] + each.exchange * exchange
            if each.ring and self._prices_hops:
                seconds = seconds + self._exposed_by_hop(each, hides, transfers, hop, positions)
            elif each.ring:
                seconds = seconds + np.maximum(0.0, each.ring * transfers - hides) + hop * (positions - 1)
        if np.any(choice.offload):
            copy = self.copy_seconds(part.held, choice.offload, choice.recompute)
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

    def _groups(self, degree: int) -> list[int]:
        """List the sizes of groups that may split heads, 1 first."""
        most = min(degree, self.heads) if self.choices.splits_heads else 1
        return [group for group in range(1, most + 1) if self.heads % group == 0]

    def _needed(self, tokens: NDArray[np.float64], degrees: NDArray[np.int64], sequences: int) -> NDArray[np.float64]:
        """Return the least ratio at which pieces of so many tokens are held; each cut sequence is allowed a token."""
        layers = self.choices.layers
        if not self.offloads or layers <= 2:
            return np.zeros(len(tokens))
        allowed = self.choices.offloads_above_tokens + np.where(degrees > 1, sequences, 0)
        return np.maximum(0.0, (1 - allowed * degrees / tokens) * (layers / (layers - 2)))

    def _refuse_heads(self, degree: int, heads: int) -> None:
        if degree % heads or self.heads % heads:
            raise PlanError(
                "heads",
                expected=f"a divisor of the {degree} ranks and of the model's {self.heads} heads",
                got=str(heads),
                remedy="Split heads over fewer ranks.",
            )


def _parts(lengths: Sequence[int], degree: int, shares: tuple[float, ...]) -> tuple[Numbers, Numbers]:
    """Return, for each rank of unequal shares, its part of the attention and the tokens that it holds."""
    pairs, held = np.zeros(degree), np.zeros(degree)
    for length in lengths:
        for position in range(degree):
            for start, stop in position_chunks(length, degree, position, shares):
                pairs[position] += float(stop) ** 2 - float(start) ** 2
                held[position] += stop - start
    return pairs / sum(float(length) ** 2 for length in lengths), held


def _refused(name: str, expected: str, got: object, remedy: str) -> ConfigError:
    return ConfigError(f"cost: {name}", expected=expected, got=repr(got), remedy=remedy)
