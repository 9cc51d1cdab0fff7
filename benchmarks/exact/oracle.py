"""The best plan there is, for tiny steps: an exact mixed-integer program, the yardstick of the planners.

`bounds.bound_seconds` says what no plan can beat; where few sequences share few ranks, often none reaches it. This
tells how far a planner really is from the best. HiGHS solves it (`milp`).

Plans considered: every set of microbatches of one piece each. A piece holds any sequences over any number of ranks that
hold them by the rule of the plan file (so must each of its sequences, and each with the longest of them, without the
tokens that the rule allows the others): lone rings, packs on one rank, packs cut over a ring. A piece takes any ranks,
not only neighbours, and waits for all of them: so the price of intervals is part of a planner's gap. A
pack of one rank may also stand beside a ring in its microbatch: it runs on one of the ring's ranks, right after the
ring, and pays no launch; at most one a rank, which holds it together with the fullest share of the ring. Not
considered: rings that overlap in one microbatch, `shares`, `heads`, offload and recompute.

Ranks are alike, so where a piece runs need not be chosen: pieces with fixed times fit on N ranks exactly if no more
than N are busy at once. Microbatch j is led by sequence j, the longest that it holds. For each possible (leader j,
degree d) and each i that j may lead (not longer):

    w[i,j,d]  sequence i is in the microbatch that j leads, at degree d
    z[j,d]    that microbatch exists: w[j,j,d]; every w <= z
    e[j,d]    what attention does not hide of its transfers, d times its share on a rank
    p[j]      its seconds, S[j] its start
    o[j,k]    j ends before k starts: S[k] >= S[j] + p[j] - M (1 - o[j,k])
    f[j,k]    ranks that j hands on to k, at most N o[j,k]
    b[j,k]    pack j joins the microbatch of ring k: k hands it a rank, and no launch is paid

Each microbatch takes as many ranks as it hands on, the source has N. The makespan T is at least every S + p, and
N T at least the seconds of all ranks together. All times are in units of the incumbent's makespan, which is M and an
upper bound of T: only plans that are better are looked for.

10 sequences on 8 ranks take seconds to minutes; the size grows with n^2 N choices and n^2 orders.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from exact.milp import Program
from lengthwise.core.errors import PlanError
from lengthwise.core.held import held_tokens
from lengthwise.core.plan import Microbatch, Piece, Plan
from lengthwise.core.shape import Cluster
from lengthwise.cost import Cost
from lengthwise.planner import CUTTING_PLANNERS, PlanOptions, plan_step
from lengthwise.planner.problem.score import score
from lengthwise.program.plan_rules import check_plan

MOST_RANKS, MOST_SEQUENCES = 8, 10
_SLACK = 1e-7  # rounding allowed where a plan is as good as the incumbent
_CHOSEN = 0.5  # a solved 0-1 variable above this is 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Best:
    """The best plan found, its makespan, and the least that any considered plan could have.

    The plan may be one of a planner's; then no considered plan is better, and the bound may be its makespan.
    """

    plan: Plan
    makespan_seconds: float
    bound_seconds: float


def plan_oracle(
    tokens: Sequence[int], cluster: Cluster, cost: Cost, *, relative_gap: float = 1e-3, most_nodes: int = 20_000
) -> Best:
    """Find the best plan of a tiny step, to within `relative_gap` or as far as `most_nodes` of search go.

    Raises:
        ConfigError: highspy is not installed.
        PlanError: more ranks or sequences than is tiny, or lengths that `plan_step` refuses.
    """
    if cluster.ranks > MOST_RANKS or len(tokens) > MOST_SEQUENCES:
        raise PlanError(
            "oracle",
            expected=f"at most {MOST_RANKS} ranks and {MOST_SEQUENCES} sequences",
            got=f"{cluster.ranks} ranks and {len(tokens)} sequences",
            remedy="Compare larger steps with bound_seconds.",
        )
    plans = [plan_step(tokens, cluster, cost, PlanOptions(planner=name)) for name in CUTTING_PLANNERS]
    incumbent = min(plans, key=lambda plan: score(plan, cost).makespan_seconds)
    unit = score(incumbent, cost).makespan_seconds
    model = _Model(incumbent, cost, unit)
    answer = model.program.solve(relative_gap=relative_gap, most_nodes=most_nodes)
    found = [incumbent] if answer.values is None else [incumbent, model.read(answer.values)]
    best = min(found, key=lambda plan: score(plan, cost).makespan_seconds)
    check_plan(best)
    makespan = score(best, cost).makespan_seconds
    return Best(plan=best, makespan_seconds=makespan, bound_seconds=min(makespan, answer.bound * unit))


class _Model:
    """The program of one step, its sequences longest first, times in units of the incumbent's makespan."""

    def __init__(self, incumbent: Plan, cost: Cost, unit: float) -> None:
        self.incumbent, self.ranks, self.capacity = incumbent, incumbent.ranks, incumbent.capacity
        self.sequences = sorted(range(len(incumbent.tokens)), key=lambda i: (-incumbent.tokens[i], i))
        lengths = np.array([incumbent.tokens[i] for i in self.sequences], dtype=np.int64)
        self.lengths = lengths
        self.compute = cost.compute_seconds(lengths) / unit
        self.attention = self.compute - cost.linear_seconds * lengths / unit
        self.transfers = cost.ring_bytes / cost.far.bytes_per_second * lengths / unit
        self.launch, self.hop = cost.fixed_seconds / unit, 2 * cost.far.hop_seconds / unit
        self.held = {(i, d): held_tokens([int(lengths[i])], d) for i in self._numbers() for d in self._degrees()}
        self.program = Program()
        self.makespan = self.program.add_variable(0.0, 1.0 + _SLACK, cost=1.0)
        self.members: dict[tuple[int, int], dict[int, int]] = {}  # (j, d): w[i,j,d] by i
        self.exposed: dict[tuple[int, int], int] = {}
        self.degrees: dict[int, list[int]] = {}  # of each leader
        self.start: dict[int, int] = {}
        self.seconds: dict[int, int] = {}
        self.beside: dict[tuple[int, int], int] = {}  # (pack, ring)
        self._add_microbatches()
        self._add_order()
        self._add_work()

    def _numbers(self) -> range:
        return range(len(self.lengths))

    def _degrees(self) -> range:
        return range(1, self.ranks + 1)

    def _fits(self, sequences: Sequence[int], degree: int) -> bool:
        allowed = self.capacity + (len(sequences) if degree > 1 else 0)
        return int(np.sum([self.held[i, degree] for i in sequences], axis=0).max()) <= allowed

    def _overhead(self, degree: int) -> float:
        return self.launch + self.hop * (degree - 1)

    def _add_microbatches(self) -> None:
        """Add w, z and e, that each sequence is in one microbatch, and what its ranks hold."""
        program = self.program
        for j in self._numbers():
            quick = [d for d in self._degrees() if self.compute[j] / d + self._overhead(d) <= 1.0 + _SLACK]
            self.degrees[j] = [d for d in quick if self._fits([j], d)]
            for d in self.degrees[j]:
                exists = program.add_choice()
                led = [i for i in self._numbers() if i > j and self._fits([j, i], d)]
                members = self.members[j, d] = {j: exists, **{i: program.add_choice() for i in led}}
                for i in led:
                    program.add_row({members[i]: 1.0, exists: -1.0}, at_most=0.0)
                spared = 1 if d > 1 else 0
                for position in range(d):
                    held = {members[i]: float(self.held[i, d][position] - spared) for i in members}
                    program.add_row(held, at_most=self.capacity)
                if d > 1:
                    hidden = {members[i]: self.attention[i] - self.transfers[i] * (d - 1) for i in members}
                    self.exposed[j, d] = program.add_variable()
                    program.add_row({self.exposed[j, d]: 1.0, **hidden}, at_least=0.0)
        for i in self._numbers():
            places = {members[i]: 1.0 for members in self.members.values() if i in members}
            program.add_row(places, at_least=1.0, at_most=1.0)

    def _exists(self, j: int, least: int = 1) -> dict[int, float]:
        """Sum over degrees of at least `least`: whether j leads a microbatch of such a degree."""
        return {self.members[j, d][j]: 1.0 for d in self.degrees[j] if d >= least}

    def _pairs(self) -> Iterator[tuple[int, int]]:
        yield from ((j, k) for j in self._numbers() for k in self._numbers() if j != k)

    def _add_order(self) -> None:
        """Add S, p, o, f and b: ranks go from hand to hand, and whoever takes one starts after whoever gave it."""
        program = self.program
        for j in self._numbers():
            self.start[j], self.seconds[j] = program.add_variable(0.0, 1.0), program.add_variable(0.0, 1.0 + _SLACK)
            program.add_row({self.makespan: 1.0, self.start[j]: -1.0, self.seconds[j]: -1.0}, at_least=0.0)
        source = {j: program.add_variable() for j in self._numbers()}
        taken = {j: {source[j]: 1.0} for j in self._numbers()}
        given = {j: {program.add_variable(): 1.0} for j in self._numbers()}
        for j, k in self._pairs():
            before, handed = program.add_choice(), program.add_variable()
            given[j][handed] = taken[k][handed] = 1.0
            program.add_row({handed: 1.0, before: -float(self.ranks)}, at_most=0.0)
            after = {self.start[k]: 1.0, self.start[j]: -1.0, self.seconds[j]: -1.0, before: -1.0 - _SLACK}
            program.add_row(after, at_least=-1.0 - _SLACK)
            if self.launch > 0 and 1 in self.degrees[k] and self.degrees[j][-1] > 1:
                self._add_beside(k, j, handed)
        for j in self._numbers():
            ranks = {self.members[j, d][j]: -float(d) for d in self.degrees[j]}
            program.add_row({**taken[j], **ranks}, at_least=0.0, at_most=0.0)
            program.add_row({**given[j], **ranks}, at_least=0.0, at_most=0.0)
        program.add_row(dict.fromkeys(source.values(), 1.0), at_most=self.ranks)
        for k in self._numbers():
            joined = {beside: 1.0 for (pack, _), beside in self.beside.items() if pack == k}
            if joined:
                program.add_row({**joined, self.members[k, 1][k]: -1.0}, at_most=0.0)

    def _add_beside(self, pack: int, ring: int, handed: int) -> None:
        program = self.program
        beside = self.beside[pack, ring] = program.add_choice()
        program.add_row({handed: 1.0, beside: -1.0}, at_least=0.0)
        program.add_row({**self._exists(ring, least=2), beside: -1.0}, at_least=0.0)
        held = {variable: float(self.lengths[i]) for i, variable in self.members[pack, 1].items()}
        for d in self.degrees[ring]:
            shares = {v: float(self.held[i, d].max() - 1) for i, v in self.members[ring, d].items()} if d > 1 else {}
            held.update({v: held.get(v, 0.0) + share for v, share in shares.items()})
        program.add_row({**held, beside: float(self.capacity)}, at_most=2.0 * self.capacity)

    def _add_work(self) -> None:
        """Say how long each microbatch takes, and that all of them together fit under the makespan."""
        total: dict[int, float] = defaultdict(float, {self.makespan: float(self.ranks)})
        for j in self._numbers():
            row: dict[int, float] = defaultdict(float, {self.seconds[j]: 1.0})
            for d in self.degrees[j]:
                terms = {variable: -float(self.compute[i]) for i, variable in self.members[j, d].items()}
                terms[self.members[j, d][j]] -= d * self._overhead(d)
                if d > 1:
                    terms[self.exposed[j, d]] = -1.0
                for variable, seconds in terms.items():
                    total[variable] += seconds
                    row[variable] += seconds / d
            for (pack, _), beside in self.beside.items():
                if pack == j:
                    row[beside] = total[beside] = self.launch
            self.program.add_row(row, at_least=0.0)
        self.program.add_row(total, at_least=0.0)

    def read(self, values: NDArray[np.float64]) -> Plan:
        """Write the solution as a plan: in order of starts, each piece on the ranks that are free earliest."""
        led = {
            j: (d, [i for i, variable in members.items() if values[variable] > _CHOSEN])
            for (j, d), members in self.members.items()
            if values[members[j]] > _CHOSEN
        }
        joined = {pack: ring for (pack, ring), variable in self.beside.items() if values[variable] > _CHOSEN}
        free = np.zeros(self.ranks)
        microbatches: list[Microbatch] = []
        for j in sorted(led.keys() - joined.keys(), key=lambda j: (values[self.start[j]], j)):
            degree, sequences = led[j]
            where = np.sort(np.argsort(free, kind="stable")[:degree])
            free[where] = free[where].max() + values[self.seconds[j]]
            pieces = [self._piece(where.tolist(), sequences)]
            packs = [pack for pack, ring in joined.items() if ring == j]
            for rank, pack in zip(where.tolist(), packs, strict=False):
                free[rank] += values[self.seconds[pack]]
                pieces.append(self._piece([rank], led[pack][1]))
            microbatches.append(Microbatch(pieces=tuple(pieces)))
        given = self.incumbent
        return Plan(
            ranks=given.ranks, layers=given.layers, capacity=given.capacity, tokens=given.tokens,
            microbatches=tuple(microbatches), notes={"planner": "oracle"},
        )  # fmt: skip

    def _piece(self, ranks: Sequence[int], sequences: Sequence[int]) -> Piece:
        return Piece(ranks=tuple(ranks), sequences=tuple(self.sequences[i] for i in sequences))
