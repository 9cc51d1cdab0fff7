"""Costs in which every piece takes the offload that it needs and the split of heads that is quickest: what planners ask
where these are to be chosen together with the degree.

A rank of a piece holds h tokens, which must obey h (2 + (1 - o) (L - 2)) / L <= C: the rule of the plan file for L
layers, capacity C and offload ratio o. So o follows from h, and with it the seconds that copies take beyond what
compute hides. Of the groups of heads that divide degree and heads the quickest is taken, as if the piece were in as few
nodes as can be. Recomputation is one kind for all. What a planner then chooses by these seconds is a degree, as ever;
the ratios and groups are written into the plan afterwards (`planner.offload`, `planner.exchange`).

One question costs about as much as one of `AllTermsCost`, twice that with heads: a group of u is asked for degrees that
u divides only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf

import numpy as np
from numpy.typing import NDArray

from lengthwise.cost.terms import AllTermsCost


@dataclass(frozen=True, slots=True, kw_only=True)
class JointCost:
    """Seconds of forward and backward where a piece has the offload it needs and the best split of heads.

    terms: what one choice costs.
    recompute: of all microbatches.
    splits_heads: whether rings may split heads.
    offloads_above_tokens: the capacity, from which on a rank offloads; inf: it never does.
    layers: of the whole model, by which the plan file counts what stays on the device.
    """

    terms: AllTermsCost
    recompute: str = "none"
    splits_heads: bool = False
    offloads_above_tokens: float = inf
    layers: int = 1

    @property
    def fixed_seconds(self) -> float:
        """Seconds that a microbatch takes on each of its ranks, launches of what is computed again included."""
        return self.terms.fixed_seconds * sum(each.linear for each in self.terms.passes(self.recompute))

    @property
    def ring_seconds(self) -> float:
        """Seconds to pass on one token's keys, values and gradients between nodes."""
        return self.terms.ring_seconds * sum(each.ring for each in self.terms.passes(self.recompute))

    @property
    def couples_layers(self) -> bool:
        """Whether ranks of a ring wait for the slowest of them in every layer."""
        return self.terms.couples_layers

    @property
    def version(self) -> str:
        """What the costs come from."""
        return self.terms.version

    @property
    def stages(self) -> int:
        """Pipeline stages of a rank."""
        return self.terms.stages

    @property
    def offloads(self) -> bool:
        """Whether a rank may hold more than its device does."""
        return self.offloads_above_tokens < inf

    @property
    def ranks_per_node(self) -> int:
        """How many neighbours on the line share a node."""
        return self.terms.ranks_per_node

    def without_copies(self) -> JointCost:
        """Return the same costs as if nothing had to be offloaded: less, for any plan."""
        return replace(self, offloads_above_tokens=inf)

    def at_speed(self, speed: float) -> JointCost:
        """Return the costs of ranks that compute and launch `speed` times as fast; links and copies stay."""
        return replace(self, terms=self.terms.at_speed(speed))

    def most_held_tokens(self, capacity_tokens: int) -> int:
        """Tell how many tokens a rank holds at most, with all offloaded that may be and that the host has room for.

        One token less than the plan file allows where something is offloaded: no rounding then breaks its rule.
        """
        if not self.offloads or self.layers <= 2:
            return capacity_tokens
        hosted = self.terms.host_bytes / max(self.terms.copy_bytes[self.recompute], 1e-300)
        return max(capacity_tokens, int(min(capacity_tokens * self.layers / 2, capacity_tokens + hosted)) - 1)

    def compute_seconds(self, lengths: NDArray[np.int64]) -> NDArray[np.float64]:
        """Tell the arithmetic of each sequence alone on one rank, in seconds."""
        tokens = lengths.astype(np.float64)
        passes = self.terms.passes(self.recompute)
        attention = sum(each.attention for each in passes) * self.terms.attention_seconds(tokens, 1)
        return attention + sum(each.linear for each in passes) * self.terms.work.linear_seconds * tokens

    def hops_seconds(self, degree: int) -> float:
        """Tell the latency of all hops of a plain ring, placed in as few nodes as can be."""
        return self.terms.hops_seconds(degree, recompute=self.recompute)

    def piece_seconds(self, lengths: Sequence[int], degree: int) -> float:
        """Tell how long a piece keeps each of its ranks busy, the microbatch's `fixed_seconds` left out."""
        offload = float(self._needed(np.array([float(sum(lengths))]), np.array([degree]), len(lengths))[0])
        groups = [group for group in self._groups(degree) if degree % group == 0]
        asked = {"offload": offload, "recompute": self.recompute}
        return min(self.terms.piece_seconds(lengths, degree, heads=group, **asked) for group in groups)

    def ring_piece_seconds(self, lengths: NDArray[np.int64], degrees: NDArray[np.int64]) -> NDArray[np.float64]:
        """Do `piece_seconds` for many pieces of one sequence each: entry i is of `lengths[i]` over `degrees[i]`."""
        offload = self._needed(lengths.astype(np.float64), degrees, 1)
        seconds = self.terms.ring_piece_seconds(lengths, degrees, offload=offload, recompute=self.recompute)
        for group in self._groups(int(degrees.max(initial=1)))[1:]:
            some = np.flatnonzero(degrees % group == 0)
            asked = {"heads": group, "offload": offload[some], "recompute": self.recompute}
            split = self.terms.ring_piece_seconds(lengths[some], degrees[some], **asked)
            seconds[some] = np.minimum(seconds[some], split)
        return seconds

    def hides_copies(self, lengths: NDArray[np.int64], degrees: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Tell for which sequences over their degree the copies that they need hide behind compute: Eq. 3."""
        free = self.terms.free_offload(lengths, degrees, recompute=self.recompute)
        return self._needed(lengths.astype(np.float64), degrees, 1) <= free * (1 + 1e-12)

    def _groups(self, degree: int) -> list[int]:
        most = min(degree, self.terms.heads) if self.splits_heads else 1
        return [group for group in range(1, most + 1) if self.terms.heads % group == 0]

    def _needed(self, tokens: NDArray[np.float64], degrees: NDArray[np.int64], sequences: int) -> NDArray[np.float64]:
        """Tell the least ratio at which pieces of so many tokens are held; each cut sequence is allowed a token."""
        if not self.offloads or self.layers <= 2:
            return np.zeros(len(tokens))
        allowed = self.offloads_above_tokens + np.where(degrees > 1, sequences, 0)
        return np.maximum(0.0, (1 - allowed * degrees / tokens) * (self.layers / (self.layers - 2)))
