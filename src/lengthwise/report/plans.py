"""Plans side by side: their steps by the cost model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping

from lengthwise.core.plan import Plan
from lengthwise.cost import Cost
from lengthwise.planner import score
from lengthwise.report.figures import count, percent
from lengthwise.report.tables import ColumnTable


def plan_table(
    plans: Mapping[str, Plan],
    cost: Cost,
    *,
    title: str,
    duration: Callable[[float], str],
    chosen: Collection[str],
) -> ColumnTable:
    """Compare plans of a step, a column per planner. chosen: which of recompute, offload and heads planners chose."""
    scores = {name: score(plan, cost) for name, plan in plans.items()}
    bounds = {name: float(plan.notes["bound_seconds"]) for name, plan in plans.items()}
    rows = (
        ("planner", *plans),
        ("step time", *(duration(each.makespan_seconds) for each in scores.values())),
        ("idle", *(percent(each.idle_ratio) for each in scores.values())),
        ("tokens in rings", *(percent(each.ring_token_ratio) for each in scores.values())),
        ("above the bound", *(_above(each.makespan_seconds, bounds[name]) for name, each in scores.items())),
        ("microbatches", *(str(len(plan.microbatches)) for plan in plans.values())),
        *((label, *map(describe, plans.values())) for name, (label, describe) in _CHOICES.items() if name in chosen),
    )
    return ColumnTable(rows=rows, title=title)


def _offloaded(plan: Plan) -> str:
    tokens = sum(plan.tokens[i] for m in plan.microbatches if m.offload for p in m.pieces for i in p.sequences)
    return percent(tokens / sum(plan.tokens))


def _split(plan: Plan) -> str:
    pieces = (piece for microbatch in plan.microbatches for piece in microbatch.pieces if piece.heads > 1)
    return percent(sum(plan.tokens[i] for piece in pieces for i in piece.sequences) / sum(plan.tokens))


_CHOICES: Mapping[str, tuple[str, Callable[[Plan], str]]] = {
    "recompute": ("recompute", lambda plan: plan.microbatches[0].recompute),  # equal in all of a plan from here
    "offload": ("tokens offloaded", _offloaded),
    "heads": ("tokens in split heads", _split),
}


def _above(makespan_seconds: float, bound_seconds: float) -> str:
    if bound_seconds == 0:  # costs that price nothing in these lengths
        return percent(0.0) if makespan_seconds == 0 else "bound is 0"
    return percent(makespan_seconds / bound_seconds - 1)


def degree_table(plan: Plan) -> ColumnTable:
    """Return sequences and tokens by the number of ranks that share them; above 8 ranks by powers of two."""
    sequences, tokens = Counter[str](), Counter[str]()
    order: dict[str, int] = {}
    for microbatch in plan.microbatches:
        for piece in microbatch.pieces:
            label = _degree_label(piece.degree)
            order.setdefault(label, piece.degree)
            sequences[label] += len(piece.sequences)
            tokens[label] += sum(plan.tokens[i] for i in piece.sequences)
    rows = [("ranks a sequence", "sequences", "tokens", "share of tokens")]
    for label in sorted(order, key=lambda label: order[label]):
        share = percent(tokens[label] / sum(plan.tokens))
        rows.append((label, str(sequences[label]), count(tokens[label]), share))
    return ColumnTable(rows=rows)


def degrees(plan: Plan) -> tuple[int, ...]:
    """Return the degrees that occur in a plan, ascending."""
    return tuple(sorted({piece.degree for microbatch in plan.microbatches for piece in microbatch.pieces}))


def _degree_label(degree: int) -> str:
    if degree <= 8:
        return str(degree)
    low = 1 << (degree - 1).bit_length() - 1
    return f"{low + 1}-{2 * low}"
