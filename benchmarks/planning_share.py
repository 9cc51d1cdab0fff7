"""Short steps planned with a share of their time: how much sooner a plan is made, and how much later its step ends.

    python benchmarks/planning_share.py [--seeds 4]

Steps of a small model on few ranks of `cpu`, whose plans may split heads, are planned with all tries and with those
that cost a tenth of the least that the step can take, as training does (`PlanOptions.planning_share`). Plan seconds are
process seconds of one core; how much later a step ends is modelled.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import replace
from itertools import product

from batches import STDLIB, sequences_batch
from lengthwise.core.shape import Cluster
from lengthwise.cost import all_terms_cost, named_hardware, named_shape
from lengthwise.planner import PLANNING_SHARE, PlanOptions, plan_step
from pages import Findings, add_out

LIMITS = (0.1, 1.0, 10.0, float("inf"))  # seconds of a step, by which the table groups them
Found = tuple[float, float, float, float]  # seconds: all tries take, its step; a share of them takes, its step


def find(seed: int, ranks: int, capacity_tokens: int, count: int) -> Found:
    """Plan one step in both ways."""
    cost, cluster = (
        all_terms_cost(named_shape("tiny"), named_hardware("cpu")),
        Cluster(ranks=ranks, capacity_tokens=capacity_tokens),
    )
    tokens = sequences_batch(STDLIB, count, seed, cluster)
    whole = PlanOptions(heads="auto", layers=named_shape("tiny").layers)
    found: list[float] = []
    for options in (whole, replace(whole, planning_share=PLANNING_SHARE)):
        start = time.process_time()
        plan = plan_step(tokens, cluster, cost, options)
        found += [time.process_time() - start, float(plan.notes["predicted_seconds"])]
    return found[0], found[1], found[2], found[3]


def main() -> None:
    """Print the table, and write it into a page if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=4)
    add_out(parser, "planning_share")
    arguments = parser.parse_args()
    find(0, 2, 256, 4)  # imports and caches
    steps = list(product(range(arguments.seeds), (2, 3, 4, 8), (256, 1024, 4096), (4, 12, 32)))
    rows = [find(*step) for step in steps]
    findings = Findings("planning_share")
    findings.add(
        [
            "| step of | steps | planned in, all tries | planned in, a share | ends later, mean | worst |",
            "|---|---|---|---|---|---|",
        ]
    )
    least = 0.0
    for limit in LIMITS:
        some = [row for row in rows if least <= row[1] < limit]
        least, above = limit, least
        if not some:
            continue
        later = [100 * (row[3] / row[1] - 1) for row in some]
        both = [f"{statistics.median(row[column] for row in some):.3f} s" for column in (0, 2)]
        size = f"{above:g} to {limit:g} s" if limit < LIMITS[-1] else f"more than {above:g} s"
        shown = f"{statistics.mean(later):+.2f} % | {max(later):+.1f} %"
        findings.add([f"| {size} | {len(some)} | {' | '.join(both)} | {shown} |"])
    findings.sign("Modelled, plan times measured", f"{len(rows)} steps, medians of plan times")
    findings.write(arguments.out)


if __name__ == "__main__":
    main()
