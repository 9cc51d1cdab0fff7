"""Plans for pipelines on the same batches: one command, one table; nothing here is run, all is modelled.

    python benchmarks/pipeline.py [--ranks 8,64,256] [--seeds 1] [--out PAGE]

Each rank is a pipeline of p stages with v virtual ones; 256K tokens a rank and step, capacity 8K (32 full packs), the
four terms of `planners.py` for one stage. Makespans come from `score`, which runs every stage of every rank on a clock
(`program.stage_clocks`), over the bound of the plan's own kind, mean over seeds: of mode `pipeline`, of a plan of mode
`free` and of ByteScale's PP-Balance run through the same stages. The last two are then over the first, "equal" where
the model cannot tell them apart.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from batches import tokens_batch
from lengthwise.core.plan import Plan
from lengthwise.core.shape import Cluster
from lengthwise.planner import PlanOptions, plan_step, score
from lengthwise.program import check_plan
from own_bound import own_bound_seconds
from pages import Findings, add_out, modelled_gain
from planners import TERMS

SOURCES = ("github", "prolong", "wikipedia")
TOKENS = 262_144  # a rank and step
SHAPES = tuple((stages, virtual) for stages in (2, 4, 8) for virtual in (1, 2))
TARGET = 1.05
PLANS = ("pipeline", "free", "bytescale")


def table(ranks: Sequence[int], seeds: int) -> Iterator[str]:
    """Yield the lines of the table as they are found."""
    yield "| ranks | lengths | p, v | pipeline | free | bytescale | free / pipeline | bytescale / pipeline | plan ms |"
    yield "|---" * 9 + "|"
    ratios: list[float] = []
    for number in ranks:
        cluster = Cluster(ranks=number, capacity_tokens=8192)
        for source in SOURCES:
            batches = [tokens_batch(source, TOKENS * number, seed, cluster) for seed in range(seeds)]
            free = [plan_step(batch, cluster, TERMS) for batch in batches]
            for stages, virtual in SHAPES:
                found = [
                    planned(batch, cluster, stages, virtual, plain) for batch, plain in zip(batches, free, strict=True)
                ]
                ratios += [each.over_bound["pipeline"] for each in found]
                cells = [f"{statistics.mean(each.over_bound[name] for each in found):.3f}" for name in PLANS]
                seconds = {name: [each.seconds[name] for each in found] for name in PLANS}
                cells += [modelled_gain(seconds[name], seconds["pipeline"]) for name in PLANS[1:]]
                ms = statistics.median(each.took_ms for each in found)
                yield f"| {number} | {source} | {stages}, {virtual} | {' | '.join(cells)} | {ms:.0f} |"
    met = sum(ratio <= TARGET for ratio in ratios)
    mean = statistics.mean(ratios)
    yield ""
    yield f"Mean {mean:.3f} (target {TARGET}), {met} of {len(ratios)} within it."


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """One batch in one pipeline: makespans by plan, in seconds and over the bound of each plan's own kind."""

    seconds: dict[str, float]
    over_bound: dict[str, float]
    took_ms: float


def planned(batch: Sequence[int], cluster: Cluster, stages: int, virtual: int, plain: Plan) -> Found:
    """Plan one batch; `plain` is its plan of mode `free`."""
    options = PlanOptions(mode="pipeline", stages=stages, virtual=virtual)
    start = time.process_time()
    plan = plan_step(batch, cluster, TERMS, options)
    took_ms = 1e3 * (time.process_time() - start)
    check_plan(plan)
    unplanned = replace(plan, microbatches=plain.microbatches)
    rival = plan_step(batch, cluster, TERMS, replace(options, planner="bytescale"))
    plans = dict(zip(PLANS, (plan, unplanned, rival), strict=True))
    seconds = {name: score(each, TERMS).makespan_seconds for name, each in plans.items()}
    over_bound = {name: seconds[name] / own_bound_seconds(each, TERMS) for name, each in plans.items()}
    return Found(seconds=seconds, over_bound=over_bound, took_ms=took_ms)


def main() -> None:
    """Print the table, and write it into a page if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="8,64,256")
    parser.add_argument("--seeds", type=int, default=1)
    add_out(parser, "pipeline")
    arguments = parser.parse_args()
    findings = Findings("pipeline")
    findings.add(table([int(ranks) for ranks in arguments.ranks.split(",")], arguments.seeds))
    findings.sign("Modelled", f"seeds 0 to {arguments.seeds - 1}")
    findings.write(arguments.out)


if __name__ == "__main__":
    main()
