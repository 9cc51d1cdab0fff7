"""Every planner on the same batches: makespan over the bound, scored by `score`; nothing here is run, all is modelled.

    python benchmarks/planners.py [--ranks 8,24,64,97,256] [--seeds 2] [--recipes prolong,byted] [--planners ...]

A batch holds 250,000 tokens a rank, lengths clipped to 0.98 of what all ranks hold, or to the limit of its row, which
gives many equal longest sequences. Costs are those of llama-7b on h100, capacity 16,384 tokens. The bound is the one
for plans in which every ring holds one sequence; plans that cut whole packs may be below it. Each entry is the mean
over seeds; `worst` is the most by which another planner beats `lengthwise` on one batch, in percent (0: none). Plan
times are medians on this machine, one process, bound and score included.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence

from lengthwise.cli.machine import machine_lines
from lengthwise.core.shape import Cluster
from lengthwise.cost import analytic_cost, named_hardware, named_shape
from lengthwise.planner import PLANNERS, RECIPES, bound_seconds, check_plan, draw_lengths, plan_step, score

CAPACITY = 16_384
TOKENS_A_RANK = 250_000
LIMITS = (None, 400_000, 100_000)
OURS = "lengthwise"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="8,24,64,97,256")
    parser.add_argument("--recipes", default=",".join(RECIPES))
    parser.add_argument("--planners", default=",".join(PLANNERS))
    parser.add_argument("--seeds", type=int, default=2)
    arguments = parser.parse_args()
    planners = arguments.planners.split(",")
    cost = analytic_cost(named_shape("llama-7b"), named_hardware("h100"))
    print(*machine_lines()[1:], sep="\n")
    print(f"model: {cost.version}, capacity {CAPACITY:,}, {TOKENS_A_RANK:,} tokens a rank, {arguments.seeds} seeds")
    print("each: makespan / bound (median plan time)")
    print("recipe", "ranks", "limit", *planners, "worst %", sep=" | ")
    for recipe in arguments.recipes.split(","):
        for ranks in map(int, arguments.ranks.split(",")):
            for limit in LIMITS:
                print_row(recipe, Cluster(ranks=ranks, capacity_tokens=CAPACITY), limit, planners, arguments.seeds)


def print_row(recipe: str, cluster: Cluster, limit: int | None, planners: Sequence[str], seeds: int) -> None:
    """Plan the batches of one row with every planner."""
    cost = analytic_cost(named_shape("llama-7b"), named_hardware("h100"))
    clip = int(0.98 * cluster.longest_tokens)
    if limit is not None and limit >= clip:
        return  # the same batches as without a limit
    ratios: dict[str, list[float]] = {name: [] for name in planners}
    took: dict[str, list[float]] = {name: [] for name in planners}
    for seed in range(seeds):
        tokens = draw_lengths(recipe, TOKENS_A_RANK * cluster.ranks, seed, longest_tokens=limit or clip)
        bound = bound_seconds(tokens, cluster, cost)
        for name in planners:
            start = time.perf_counter()
            plan = plan_step(tokens, cluster, cost, planner=name)
            took[name].append(time.perf_counter() - start)
            check_plan(plan)
            ratios[name].append(score(plan, cost).makespan_seconds / bound)
    entries = [f"{statistics.mean(ratios[n]):.4f} ({1e3 * statistics.median(took[n]):.0f} ms)" for n in planners]
    print(recipe, cluster.ranks, limit or "-", *entries, f"{_worst_percent(ratios):.2f}", sep=" | ", flush=True)


def _worst_percent(ratios: dict[str, list[float]]) -> float:
    """Tell by how much, at most, the best other planner ends before ours."""
    others = [values for name, values in ratios.items() if name != OURS]
    if OURS not in ratios or not others:
        return 0.0
    return 100 * max(0.0, *(ours / min(rest) - 1 for ours, *rest in zip(ratios[OURS], *others, strict=True)))


if __name__ == "__main__":
    main()
