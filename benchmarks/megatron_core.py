"""The real planner of Megatron-Core beside its rule as written here: `pip install --no-deps megatron-core==0.16.1`.

    python benchmarks/megatron_core.py [--ranks 8,64,256] [--seeds 4] [--recipes github,byted]

What `BalancedCPScheduler` returns, for every sub-batch the samples of each rank, is written as a plan twice: as it runs
them in 0.16 (`as run`: every sample its own launch, a barrier between sub-batches) and packed as the planner
`power-of-two` packs (`packed`), which is the planner `megatron-core`. Makespans are over the bound of the plan's own
kind, and in the last columns over those of `lengthwise`, "equal" where the model cannot tell them apart. Costs are
those of `planners.py` with all four terms of the cost file; plan times are process seconds of one core, for the
scheduler alone and for whole plans of ours.
"""

from __future__ import annotations

import argparse
import statistics
import time

from lengthwise.core.plan import Microbatch, Plan
from lengthwise.core.shape import Cluster
from lengthwise.cost import Cost
from lengthwise.data.recipes import draw_lengths
from lengthwise.planner import PlanOptions, plan_step, score
from lengthwise.planner.baselines.megatron_core import load_scheduler, megatron_sub_batches
from lengthwise.planner.baselines.power_of_two import pack_gangs, write_sub_batch
from lengthwise.planner.problem.request import PlanRequest
from lengthwise.program import check_plan
from own_bound import own_bound_seconds
from pages import Findings, add_out, modelled_gain

COST = Cost(quadratic_seconds=1.0, linear_seconds=32768.0, fixed_seconds=2e7, ring_seconds=4e3)
CAPACITY = 16_384
TOKENS_A_RANK = 125_000
ROWS = ("megatron as run", "megatron packed", "power-of-two", "lengthwise")


def main() -> None:
    """Print the table, and write it into a page if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="8,64,256")
    parser.add_argument("--recipes", default="github,byted,prolong,wikipedia")
    parser.add_argument("--seeds", type=int, default=4)
    add_out(parser, "megatron_core")
    arguments = parser.parse_args()
    findings = Findings("megatron_core")
    load_scheduler()  # takes seconds, which are not those of planning
    titles = " | ".join(f"{row} (ms)" for row in ROWS)
    over = " | ".join(f"{row} / lengthwise" for row in ROWS[:-1])
    findings.add([f"| recipe | ranks | {titles} | {over} |", "|---" * (1 + 2 * len(ROWS)) + "|"])
    for recipe in arguments.recipes.split(","):
        for ranks in map(int, arguments.ranks.split(",")):
            entries = measure(recipe, Cluster(ranks=ranks, capacity_tokens=CAPACITY), arguments.seeds)
            findings.add([f"| {recipe} | {ranks} | {' | '.join(entries)} |"])
    findings.sign("Modelled", f"one core, seeds 0 to {arguments.seeds - 1}")
    findings.write(arguments.out)


def measure(recipe: str, cluster: Cluster, seeds: int) -> list[str]:
    """Plan the same batches four times; return mean makespan / bound and median plan time of each, then / ours."""
    seconds: dict[str, list[float]] = {row: [] for row in ROWS}
    ratios: dict[str, list[float]] = {row: [] for row in ROWS}
    took: dict[str, list[float]] = {row: [] for row in ROWS}
    for seed in range(seeds):
        tokens = draw_lengths(recipe, TOKENS_A_RANK * cluster.ranks, seed, int(0.98 * cluster.longest_tokens))
        request = PlanRequest(tokens=tuple(tokens), cluster=cluster, cost=COST)
        start = time.process_time()
        sub_batches = megatron_sub_batches(request.lengths, cluster.ranks, cluster.capacity_tokens)
        took[ROWS[0]].append(time.process_time() - start)
        took[ROWS[1]].append(took[ROWS[0]][-1])
        as_run, packed = list[Microbatch](), list[Microbatch]()
        for i, gangs in enumerate(sub_batches):
            alone = [[[sequence] for sequence in gang.sequences] for gang in gangs]
            as_run += write_sub_batch(gangs, alone, is_first=i == 0)
            packed += write_sub_batch(gangs, pack_gangs(request, gangs), is_first=i == 0)
        plans = {ROWS[0]: _plan(request, as_run), ROWS[1]: _plan(request, packed)}
        for name in ROWS[2:]:
            start = time.process_time()
            plans[name] = plan_step(tokens, cluster, COST, PlanOptions(planner=name))
            took[name].append(time.process_time() - start)
        for name, plan in plans.items():
            check_plan(plan)
            seconds[name].append(score(plan, COST).makespan_seconds)
            ratios[name].append(seconds[name][-1] / own_bound_seconds(plan, COST))
    return [
        *(f"{statistics.mean(ratios[row]):.3f} ({1e3 * statistics.median(took[row]):.0f})" for row in ROWS),
        *(modelled_gain(seconds[row], seconds[ROWS[-1]]) for row in ROWS[:-1]),
    ]


def _plan(request: PlanRequest, microbatches: list[Microbatch]) -> Plan:
    cluster = request.cluster
    return Plan(
        ranks=cluster.ranks,
        layers=1,
        capacity=cluster.capacity_tokens,
        tokens=request.tokens,
        microbatches=tuple(microbatches),
    )


if __name__ == "__main__":
    main()
