"""How long a piece takes: one record, used alike by planners, score and simulator.

A piece keeps each of its ranks busy for the sum of its passes (`passes`); a microbatch adds fixed seconds. Links,
copies and an exchange of heads are free unless given.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from math import inf

import numpy as np
from numpy.typing import NDArray

from lengthwise.core.errors import PlanError
from lengthwise.cost.blocks import Curve, image_work, seen_blocks, speed_shares
from lengthwise.cost.checks import check_cost
from lengthwise.cost.choices import AS_CUT, Choice, Choices
from lengthwise.cost.ending import Ending, Traffic
from lengthwise.cost.links import Floats, Link, Numbers, Reach, Whole, least_reach, reach_of
from lengthwise.cost.passes import BACKWARD, FORWARD, Part, PassShares, part_seconds, parts_by_shares, passes

_FREE = Link(bytes_per_second=inf)
_NOTHING, _NO_ENDING = Choices(), Ending()
_OF_SPEED = ("quadratic_seconds", "linear_seconds", "cut_seconds", "fixed_seconds")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Seconds of forward and backward through the layers that one device of a rank holds.

    quadratic_seconds: seconds per squared token of attention (a sequence of s tokens counts s x s).
    linear_seconds: seconds per token of all work that grows with tokens: projections, MLP, output head.
    cut_seconds: additional seconds per token of a cut sequence, by scans of layers with states.
    fixed_seconds: seconds per microbatch, on each of its ranks.
    windows: (window in tokens, share of the attention layers with it); the other layers see everything.
    couples_layers: True if ranks of a ring wait for the slowest of them in every layer, as in engines, so that a local
        pack beside a ring delays all of it.
    version: source of the costs, noted in every plan made with them.
    forward, backward: shares of the two passes.
    near, far: links inside a node and between nodes. ranks_per_node: neighbours on the line that share a node.
    uplink_bytes_per_second: rate from a node's ranks together to other nodes; here a ring shares it only with itself.
    crosses_node: True to price unplaced pieces as if each crossed one more border of nodes than it needs.
    block_efficiency, ring_efficiency: curves of `Hardware`; empty if blocks of any size run at full speed, and if rings
        run as documents do.
    ring_bytes, exchange_bytes: bytes per token, all layers, both passes, that a ring passes on, and an all-to-all
        moves.
    sweep_bytes, sweep_messages: bytes of each sequence that a rank passes on per round of a sweep of states, all
        layers, both passes, and the number of messages, in ring steps of a pass.
    heads, kv_heads: heads of one device; groups of u ranks must divide them, and repeat KV heads beyond `kv_heads`.
    copy_bytes: bytes per token that can be offloaded, for each kind of recomputation; empty if unknown.
    copy_bytes_per_second: rate to or from the host, one direction, with the node's other ranks copying too.
    host_bytes: a device's part of the host memory for offload.
    reduced_bytes: bytes of gradients and parameters that the step's end moves per rank. ending: its other costs.
    traffic: collectives of every wave if parameters are sharded, else None.
    stages: pipeline stages of a rank, with coefficients of one stage; 0 for those of any plan.
    stage_bytes: bytes per token of activations sent from a stage to the next, between nodes.
    embedding_seconds, head_seconds: parts of `linear_seconds` of all stages, to cut layers; 0 if not measured.
    image_ratio: seconds of a tower over those of its counted work, in tokens of linear work.
    choices: choices of pieces without a given `Choice`.
    trees: sequences that continue others and count together as one, and those with images (`cost.trees`), by length:
        length, squared tokens inside of its sequences, the tokens of a block of these, the same two between its
        sequences, and `ImageWork`.

    Raises:
        ConfigError: a coefficient that is negative or not finite, all of them zero, or invalid links.
    """

    quadratic_seconds: float = 0.0
    linear_seconds: float = 0.0
    cut_seconds: float = 0.0
    fixed_seconds: float = 0.0
    windows: tuple[tuple[int, float], ...] = ()
    couples_layers: bool = False
    version: str = "given"
    forward: PassShares = FORWARD
    backward: PassShares = BACKWARD
    near: Link = _FREE
    far: Link = _FREE
    ranks_per_node: int = 1
    uplink_bytes_per_second: float = inf
    crosses_node: bool = False
    block_efficiency: Curve = ()
    ring_efficiency: Curve = ()
    ring_bytes: float = 0.0
    exchange_bytes: float = 0.0
    sweep_bytes: float = 0.0
    sweep_messages: float = 0.0
    heads: int = 1
    kv_heads: int = 1
    layers: int = 1
    copy_bytes: Mapping[str, float] = field(default_factory=dict[str, float], hash=False)
    copy_bytes_per_second: float = inf
    host_bytes: float = inf
    reduced_bytes: float = 0.0
    ending: Ending = _NO_ENDING
    traffic: Traffic | None = None
    stages: int = 0
    stage_bytes: float = 0.0
    embedding_seconds: float = 0.0
    head_seconds: float = 0.0
    image_ratio: float = 1.0
    choices: Choices = _NOTHING
    trees: tuple[tuple[float, float, float, float, float, float, float], ...] = ()

    def __post_init__(self) -> None:
        check_cost(self)

    @property
    def chooses(self) -> bool:
        """Whether pieces are priced with their best choices instead of those written in a plan."""
        return self.choices.recompute != "none" or self.chooses_by_degree

    @property
    def chooses_by_degree(self) -> bool:
        """Whether offload or heads are chosen; a piece may then take fewer rank-seconds when it is cut further."""
        return self.choices.offloads or self.choices.splits_heads

    @property
    def shares_uplinks(self) -> bool:
        """Whether the uplink of a node is slower than the far links of its ranks together."""
        return self.uplink_bytes_per_second < self.far.bytes_per_second * self.ranks_per_node

    @property
    def _sweeps(self) -> bool:
        """Whether ranks of a ring pass on states."""
        return self.sweep_messages > 0 or self.sweep_bytes > 0

    def at_speed(self, speed: float) -> Cost:
        """Return the costs of ranks whose arithmetic and overhead are `speed` times as fast; links and copies stay."""
        return replace(self, **{name: getattr(self, name) / speed for name in _OF_SPEED})

    def at_speeds(self, speeds: Floats) -> Cost:
        """Return costs that only price rings, in a row for each speed of a column."""
        several = copy(self)
        for name in _OF_SPEED:
            object.__setattr__(several, name, getattr(self, name) / speeds)
        return several

    def recomputing(self, kind: str) -> Cost:
        """Return the costs of a kind of recomputation, from those of none; the output head counts as run again."""
        if kind in ("none", self.choices.recompute):
            return self
        assert self.choices.recompute == "none", (self.choices.recompute, kind)
        linear = sum(each.linear for each in self.passes(kind))
        return replace(self, fixed_seconds=self.fixed_seconds * linear, choices=replace(self.choices, recompute=kind))

    def choosing(self, choices: Choices) -> Cost:
        """Return the costs of pieces with these choices."""
        return replace(self.recomputing(choices.recompute), choices=choices)

    def without_copies(self) -> Cost:
        """Return the costs as if nothing had to be offloaded: a lower bound for any plan."""
        return replace(self, choices=replace(self.choices, offloads_above_tokens=inf))

    def piece_seconds(
        self,
        lengths: Sequence[int] | Whole | Floats,
        degree: int,
        choice: Choice | None = None,
        *,
        ranks: Sequence[int] | None = None,
        shares: tuple[float, ...] | None = None,
        speeds: Sequence[float] | None = None,
    ) -> float:
        """Return the seconds that a piece keeps each of its ranks busy, without the microbatch's `fixed_seconds`.

        Args:
            lengths: tokens of the sequences of the piece.
            degree: number of ranks over which each sequence is cut.
            choice: settings of the piece (default: the best of `choices`).
            ranks: ranks of the piece, in ring order (default: in as few nodes as possible).
            shares: weight of each rank's part (default: all equal); the slowest rank counts.
            speeds: relative speed of each rank, in ring order (default: 1, that of the costs).

        Raises:
            PlanError: groups of heads that divide neither ranks nor heads.
        """
        is_lone = len(lengths) == 1 and not self.trees  # then all are numbers: arrays take several times as long
        tokens: Numbers = float(lengths[0]) if is_lone else np.asarray(lengths, dtype=np.float64)
        total = tokens if is_lone else float(tokens.sum())
        if choice is None and self.chooses:
            offload = self.choices.offload_needed(total, degree, len(lengths))
            each = (Choice(heads=u, offload=offload, recompute=self.choices.recompute) for u in self._groups(degree))
            return min(self.piece_seconds(lengths, degree, one) for one in each if degree % one.heads == 0)
        choice = choice or AS_CUT
        if degree % choice.heads or self.heads % choice.heads:
            expected = f"a divisor of the {degree} ranks and of the model's {self.heads} heads"
            remedy = "Split heads over fewer ranks."
            raise PlanError("heads", expected=expected, got=str(choice.heads), remedy=remedy)
        attention, diagonal = self._attention(tokens, degree / choice.heads)
        if not is_lone:
            attention, diagonal = float(attention.sum()), float(diagonal.sum())
        own = total
        if shares is not None:
            parts, held = parts_by_shares([int(each) for each in lengths], degree, shares)
            attention, diagonal, own = attention * degree * parts, diagonal * degree * parts, degree * held
        speed: Numbers = 1.0 if speeds is None else np.array(speeds)
        linear = self._linear(own, degree, own * self.linear_ratio(tokens, degree)) / speed
        part = Part(own, attention / speed, diagonal / speed, linear, len(lengths))
        seconds = part_seconds(self, part, total, degree, choice, self.reach(degree, choice.heads, ranks))
        return float(seconds if shares is speeds is None else np.max(seconds))

    def pieces_seconds(self, lengths: Sequence[Whole], ranks: Sequence[tuple[int, ...]], choice: Choice) -> Floats:
        """Return `piece_seconds` of pieces of `lengths[i]` over `ranks[i]`: all have several ring positions, or none.

        choice: settings as arrays; heads divide the degrees and the model's heads.
        """
        placed, counts = list(zip(ranks, choice.heads.tolist(), strict=True)), list(map(len, lengths))
        reaches = {key: self.reach(len(key[0]), key[1], key[0]) for key in set(placed)}
        reach, degrees = Reach(*np.array([reaches[key] for key in placed]).T), np.array(list(map(len, ranks)))
        stops = list(accumulate(counts, initial=0))

        def sums(values: Floats) -> Floats:  # added as `piece_seconds` does, to the last digit
            return values if len(values) == len(ranks) else np.array([values[a:b].sum() for a, b in pairwise(stops)])

        tokens = np.concatenate(lengths).astype(np.float64)
        total = work = sums(tokens)
        if self.trees:
            work = total * (sums(self.linear_tokens(tokens, np.repeat(degrees, counts))) / total)
        attention, diagonal = map(sums, self._attention(tokens, np.repeat(degrees / choice.heads, counts)))
        part = Part(total, attention, diagonal, self._linear(total, degrees, work), np.array(counts))
        return part_seconds(self, part, total, degrees, choice, reach)

    def ring_piece_seconds(self, lengths: Whole, degrees: Whole) -> Floats:
        """Return `piece_seconds` of pieces of `lengths[i]` over `degrees[i]` ranks, in as few nodes as possible."""
        tokens = lengths.astype(np.float64)
        if not self.chooses:
            return self._rings_seconds(tokens, degrees, AS_CUT)
        whole = Choice(offload=self.choices.offload_needed(tokens, degrees), recompute=self.choices.recompute)
        seconds = self._rings_seconds(tokens, degrees, whole)
        for group in self._groups(int(degrees.max(initial=1)))[1:]:
            fitting = np.flatnonzero(degrees % group == 0)
            split = replace(whole, heads=group, offload=whole.offload[fitting])
            own = seconds[..., fitting]
            seconds[..., fitting] = np.minimum(own, self._rings_seconds(tokens[fitting], degrees[fitting], split))
        return seconds

    def compute_seconds(self, lengths: Whole) -> Floats:
        """Return the arithmetic in seconds, entry i of `lengths[i]` on one rank; cutting never reduces the sum."""
        tokens = lengths.astype(np.float64)
        attention, linear = self.attention_seconds(tokens, 1), self.linear_seconds * self.linear_tokens(tokens, 1)
        if not self.chooses:
            return attention + linear
        passes = self.passes(self.choices.recompute)
        return sum(each.attention for each in passes) * attention + sum(each.linear for each in passes) * linear

    def attention_seconds(self, tokens: Floats, positions: Numbers) -> Floats:
        """Return the attention of sequence i in seconds, all ranks together; smaller blocks run slower.

        One of the `positions` ring steps computes diagonals, the others as many squared tokens in blocks below it.
        """
        return self._attention(tokens, positions)[0]

    def _attention(self, tokens: Numbers, positions: Numbers) -> tuple[Numbers, Numbers]:
        """Return `attention_seconds`, and the first ring step's part of it."""
        diagonal, below = self.ring_step_seconds(tokens, positions)
        whole = diagonal if diagonal is below else below + (diagonal - below) / positions
        return whole, diagonal / positions

    def ring_step_seconds(self, tokens: Numbers, positions: Numbers) -> tuple[Numbers, Numbers]:
        """Return the seconds of sequence i if all of it ran as the first ring step does, and as the others do."""
        (pairs, block), *between = seen_blocks(tokens, self.windows, self.trees)
        at = block / positions
        diagonal = below = self._blocks_seconds(pairs, at, self.block_efficiency)
        if self.ring_efficiency and np.count_nonzero(positions > 1):
            below = self._blocks_seconds(pairs, at, self.ring_efficiency)
        for pairs, block in between:  # no diagonals: queries of one sequence, keys of another
            seconds = self._blocks_seconds(pairs, block / positions, self.ring_efficiency or self.block_efficiency)
            diagonal, below = diagonal + seconds, below + seconds
        return diagonal, below

    def _blocks_seconds(self, squared: Numbers, tokens: Numbers, curve: Curve) -> Numbers:
        """Return the seconds of squared tokens in blocks of so many tokens."""
        if not curve:
            return self.quadratic_seconds * squared
        return self.quadratic_seconds * squared / speed_shares(curve, tokens)

    def seen_pairs(self, tokens: Floats) -> Floats:
        """Return the squared tokens of attention, entry i of sequence i: s^2 unless a window is shorter, or a tree."""
        return sum(pairs for pairs, _ in seen_blocks(tokens, self.windows, self.trees))  # type: ignore[return-value] - of arrays

    def hops_seconds(self, degree: int) -> float:
        """Return the part of a plain ring's seconds that depends only on its degree: latency of its ring steps."""
        reach = self.reach(degree)
        link = self.near if reach.ring_near else self.far
        states = float(self.sweep_seconds(degree, reach.far_rounds, sequences=0))
        if self.stages > 1 or self.shares_uplinks:  # latency hides, except the last one of backward
            return states + (link.hop_seconds if degree > 1 else 0.0)
        passes = self.passes(self.choices.recompute)
        return states + sum(link.hop_seconds for each in passes if each.ring) * (degree - 1)

    def sweep_seconds(self, degree: Numbers, far_rounds: Numbers, sequences: Numbers) -> Numbers:
        """Return the seconds of all rounds of the sweeps of states of this many sequences, both passes together.

        far_rounds: number of a sweep's degree - 1 rounds between nodes; in each, one message leaves a node.
        """
        if not self._sweeps:
            return 0.0
        outside = min(self.far.bytes_per_second, self.uplink_bytes_per_second)
        links = (self.near.hop_seconds, self.near.bytes_per_second), (self.far.hop_seconds, outside)
        near, far = (self.sweep_messages * hop + sequences * self.sweep_bytes / rate for hop, rate in links)
        return (degree - 1 - far_rounds) * near + far_rounds * far

    def copy_seconds(self, held: Numbers, choice: Choice) -> Numbers:
        """Return the seconds of copying the offloaded part of `held` tokens one way; two layers stay, in stages none.

        Raises:
            PlanError: these costs do not price copies.
        """
        if choice.recompute not in self.copy_bytes:
            expected, remedy = "costs that price copies", "Take a plan without it, or costs of a model."
            raise PlanError("offload", expected=expected, got=f"costs {self.version}", remedy=remedy)
        layers = max(self.layers, 2)
        goes = (layers - 2) / layers if self.stages <= 1 else 1.0
        return choice.offload * goes * self.copy_bytes[choice.recompute] * held / self.copy_bytes_per_second

    def step_end_seconds(self, ranks: int) -> float:
        """Return the seconds of reducing gradients and gathering parameters over all ranks, once per step."""
        rate = max(self.near.bytes_per_second, self.ending.node_bytes_per_second)
        if ranks > self.ranks_per_node:  # all links of a node carry a part, limited by its uplink
            rate = min(rate, self.far.bytes_per_second * self.ranks_per_node, self.uplink_bytes_per_second)
        return self.ending.seconds(self.reduced_bytes, ranks, rate)

    def wave_seconds(self, seconds: Numbers, recompute: str) -> Numbers:
        """Return the seconds of waves whose slowest ranks compute this long, with exposed gathers."""
        if self.traffic is None:
            return seconds
        share = self.forward_share(recompute)
        return self.traffic.wave_seconds(share * seconds, (1 - share) * seconds)

    def stage_send_seconds(self, held: Floats) -> Floats:
        """Return the seconds of sending the activations of `held` tokens to the next stage, an entry per rank."""
        return self.far.hop_seconds / self.layers + self.stage_bytes * held / self.far.bytes_per_second

    def most_held_tokens(self, capacity_tokens: int) -> int:
        """Return the most tokens of a rank, less one, with all offload that host and plan file allow."""
        layers = self.choices.layers
        if not self.choices.offloads or layers <= 2:
            return capacity_tokens
        hosted = self.host_bytes / max(self.copy_bytes[self.choices.recompute], 1e-300)
        return max(capacity_tokens, int(min(capacity_tokens * layers / 2, capacity_tokens + hosted)) - 1)

    def free_offload(self, lengths: Whole, degrees: Whole) -> Floats:
        """Return the largest ratio whose copies hide behind compute, entry i of sequence i over its degree: Eq. 3."""
        tokens, recompute = lengths.astype(np.float64), self.choices.recompute
        attention = self.attention_seconds(tokens, degrees) / degrees
        linear = self.linear_seconds * self.linear_tokens(tokens, degrees) / degrees
        first, *others = (each.attention * attention + each.linear * linear for each in self.passes(recompute))
        copies = self.copy_seconds(tokens / degrees, Choice(offload=1.0, recompute=recompute))
        return np.minimum(1.0, np.minimum(first, sum(others)) / np.maximum(copies, 1e-300))  # without copies: 1

    def hides_copies(self, lengths: Whole, degrees: Whole) -> NDArray[np.bool_]:
        """Return where needed copies hide behind compute, entry i of `lengths[i]` over `degrees[i]` ranks: Eq. 3."""
        needed = self.choices.offload_needed(lengths.astype(np.float64), degrees)
        return needed <= self.free_offload(lengths, degrees) * (1 + 1e-12)

    def passes(self, recompute: str) -> tuple[PassShares, ...]:
        """List the passes over the layers, forward first."""
        return passes(self.forward, self.backward, recompute)

    def forward_share(self, recompute: str) -> float:
        """Return the first forward pass's share of a microbatch's time, by linear work."""
        return self.forward.linear / sum(each.linear for each in self.passes(recompute))

    def reach(self, degree: Numbers, heads: Numbers = 1, ranks: Sequence[int] | None = None) -> Reach:
        """Return a piece's reach over nodes. ranks: its ranks in ring order (default: in as few nodes as possible).

        Without `ranks`, degree and heads may be arrays with one entry per piece.
        """
        node, shared = self.ranks_per_node, self.shares_uplinks
        if ranks is not None:
            return reach_of(ranks, heads, node, shares_uplinks=shared)
        return least_reach(degree, heads, node, crosses=self.crosses_node, shares_uplinks=shared, sweeps=self._sweeps)

    def _rings_seconds(self, tokens: Floats, degrees: Whole, choice: Choice) -> Floats:
        linear = self._linear(tokens, degrees, self.linear_tokens(tokens, degrees))
        part = Part(tokens, *self._attention(tokens, degrees / choice.heads), linear)
        return part_seconds(self, part, tokens, degrees, choice, self.reach(degrees, choice.heads))

    def linear_tokens(self, tokens: Floats, degree: Numbers) -> Floats:
        """Return the linear work of sequence i, all `degree` ranks together, in tokens; with that on its images."""
        return tokens + self.image_ratio * image_work(tokens, degree, self.trees) if self.trees else tokens

    def linear_ratio(self, tokens: Floats, degree: int) -> float:
        """Return the linear work of sequences over their tokens; 1 without images."""
        return float(self.linear_tokens(tokens, degree).sum() / tokens.sum()) if self.trees else 1.0

    def _linear(self, tokens: Numbers, degree: Numbers, work: Numbers) -> Numbers:
        """Return the seconds of linear work of sequences that are cut over `degree` ranks, or whole, in tokens."""
        linear = self.linear_seconds * work
        return linear + self.cut_seconds * (degree > 1) * tokens if np.count_nonzero(self.cut_seconds) else linear

    def _groups(self, degree: int) -> list[int]:
        most = min(degree, self.heads) if self.choices.splits_heads else 1
        return [group for group in range(1, most + 1) if self.heads % group == 0]
