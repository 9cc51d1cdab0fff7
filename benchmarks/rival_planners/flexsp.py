"""A planner of small steps: FlexSP's integer program (arXiv 2412.01523), solved by HiGHS (`milp`).

Sequences by length are cut into M micro-batches of about equal tokens, the best of three M. Of each, m[p] says whether
group p of d[p] ranks (powers of two, or all) is used and a[k,p] how many sequences of length k it gets: minimize T with
sum of d[p] m[p] <= N, tokens of a group <= d[p] x C, T >= seconds of each group.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from exact.milp import Program
from lengthwise.core.errors import PlanError
from lengthwise.core.names import counted
from lengthwise.core.plan import Microbatch, Piece
from lengthwise.planner.baselines.single_degree import room_tokens
from lengthwise.planner.problem.request import PlanRequest
from lengthwise.program.ring_order import ring_order

_MOST_CELLS = 96  # ranks x sequences of a step: what is solved in seconds of one core
COUNTS_TRIED = 3  # numbers of micro-batches, from the least that memory allows
_RELATIVE_GAP, _MOST_NODES = 1e-3, 2000  # from the proven bound, and of branch and bound: where a program ends

Group = tuple[int, list[int]]  # degree, sequences


def plan_flexsp(request: PlanRequest) -> list[Microbatch]:
    """Plan one small step; ConfigError: highspy is not installed; PlanError: too many ranks or sequences."""
    cluster, lengths = request.cluster, request.lengths
    _refuse_large(cluster.ranks, len(lengths))
    order = np.lexsort((np.arange(len(lengths)), -lengths))
    tried: list[tuple[float, list[Microbatch]]] = []
    least = -(-int(lengths.sum()) // (cluster.ranks * request.most_held_tokens))
    for count in range(least, len(lengths) + 1):
        solved = [_solve(request, run) for run in equal_runs(order, lengths, count)]
        groups = [one for one in solved if one is not None]
        if len(groups) == count:
            microbatches = [write_groups(one) for _, one in groups]
            tried.append((sum(seconds for seconds, _ in groups), microbatches))
        if tried and count >= least + COUNTS_TRIED - 1:
            break
    return min(tried, key=lambda plan: plan[0])[1]  # one sequence a micro-batch is always solved


def _refuse_large(ranks: int, sequences: int) -> None:
    if ranks * sequences > _MOST_CELLS:
        raise PlanError(
            "flexsp",
            expected=f"a step whose program is solved in seconds: at most {_MOST_CELLS} ranks x sequences",
            got=f"{counted(ranks, 'rank')} x {counted(sequences, 'sequence')}",
            remedy="Give it smaller steps, or compare these with the other planners.",
        )


def equal_runs(order: NDArray[np.int64], lengths: NDArray[np.int64], count: int) -> list[list[int]]:
    """Cut sequences, in this order, into `count` runs whose largest sum of tokens is least."""
    sums = np.concatenate(([0], np.cumsum(lengths[order])))
    number = len(order)
    least = [float("inf")] * number + [0.0]  # of the sequences from i on, cut into the runs so far
    ends: list[list[int]] = []
    for runs in range(1, count + 1):
        before, least, end = least, [float("inf")] * (number + 1), [number] * (number + 1)
        for i in range(number):
            for j in range(i + 1, number + 1):
                largest = max(float(sums[j] - sums[i]), before[j])
                if (runs > 1 or j == number) and largest < least[i]:
                    least[i], end[i] = largest, j
        ends.append(end)
    runs_found, start = list[list[int]](), 0
    for end in reversed(ends):
        runs_found.append(order[start : end[start]].tolist())
        start = end[start]
    return runs_found


def _solve(request: PlanRequest, sequences: Sequence[int]) -> tuple[float, list[Group]] | None:
    """Choose groups for one micro-batch and what each gets; None if no groups hold it."""
    ranks, capacity, cost = request.cluster.ranks, request.most_held_tokens, request.cost
    lengths, counts = np.unique(request.lengths[sequences], return_counts=True)
    unit = float(cost.compute_seconds(lengths) @ counts) + cost.fixed_seconds or 1.0
    program = Program()
    slowest = program.add_variable(cost=1.0)
    degrees = [degree for degree in _degrees(ranks) for _ in range(ranks // degree)]
    used = [program.add_choice() for _ in degrees]
    given = [[program.add_variable(0.0, float(n), whole=True) for n in counts.tolist()] for _ in degrees]
    program.add_row({used[p]: float(d) for p, d in enumerate(degrees)}, at_most=ranks)
    for p, d in enumerate(degrees):
        room = dict(zip(given[p], room_tokens(lengths, d).astype(float).tolist(), strict=True))
        program.add_row({**room, used[p]: -float(d * capacity)}, at_most=0.0)
        seconds = {used[p]: -(cost.fixed_seconds + cost.hops_seconds(d)) / unit}
        alone = cost.ring_piece_seconds(lengths, np.full(len(lengths), d)) - cost.hops_seconds(d)
        seconds |= dict(zip(given[p], (-alone / unit).tolist(), strict=True))
        program.add_row({slowest: 1.0, **seconds}, at_least=0.0)
        if p and degrees[p - 1] == d:  # alike groups are used in order
            program.add_row({used[p - 1]: 1.0, used[p]: -1.0}, at_least=0.0)
    for k, n in enumerate(counts.tolist()):
        program.add_row({of_group[k]: 1.0 for of_group in given}, at_least=n, at_most=n)
    values = program.solve(relative_gap=_RELATIVE_GAP, most_nodes=_MOST_NODES).values
    if values is None:
        return None
    by_length = {length: [i for i in sequences if request.tokens[i] == length] for length in lengths.tolist()}
    groups: list[Group] = []
    for p, d in enumerate(degrees):
        taken = [
            by_length[int(lengths[k])].pop(0) for k in range(len(lengths)) for _ in range(round(values[given[p][k]]))
        ]
        if taken:
            groups.append((d, taken))
    return max(_group_seconds(request, group) for group in groups), groups


def _degrees(ranks: int) -> list[int]:
    return sorted({ranks, *(1 << power for power in range(ranks.bit_length()) if 1 << power <= ranks)}, reverse=True)


def _group_seconds(request: PlanRequest, group: Group) -> float:
    cost, (degree, sequences) = request.cost, group
    return cost.fixed_seconds + cost.piece_seconds([request.tokens[i] for i in sequences], degree)


def write_groups(groups: Sequence[Group]) -> Microbatch:
    """Write groups, widest first, as the pieces of one microbatch on neighbouring ranks from rank 0 on."""
    pieces: list[Piece] = []
    first = 0
    for degree, sequences in groups:
        pieces.append(Piece(ranks=ring_order(first, degree), sequences=tuple(sequences)))
        first += degree
    return Microbatch(pieces=tuple(pieces))
