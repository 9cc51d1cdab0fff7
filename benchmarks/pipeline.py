"""Plans for pipelines on the same batches: one command, one table; nothing here is run, all is modelled.

    python benchmarks/pipeline.py [--ranks 8,64,256] [--seeds 1] [--out PAGE]

Each rank is a pipeline of p stages with v virtual ones; 256K tokens a rank and step, capacity 8K (32 full packs), the
four terms of `planners.py` for one stage. Makespans come from `score`, which runs every stage of every rank on a clock
(`program.stage_clocks`), over the bound of the plan, mean over seeds: of mode `pipeline`, of a plan of mode
`free` and of ByteScale's PP-Balance run through the same stages.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

from batches import tokens_batch
from lengthwise.core.shape import Cluster
from lengthwise.planner import PlanOptions, plan_step, score
from lengthwise.program import check_plan
from pages import Findings, add_out
from planners import TERMS

SOURCES = ("github", "prolong", "wikipedia")
TOKENS = 262_144  # a rank and step
SHAPES = tuple((stages, virtual) for stages in (2, 4, 8) for virtual in (1, 2))
TARGET = 1.05


def table(ranks: Sequence[int], seeds: int) -> Iterator[str]:
    """Yield the lines of the table as they are found."""
    yield "| ranks | lengths | p, v | pipeline | free | bytescale | plan ms |"
    yield "|---|---|---|---|---|---|---|"
    ratios: list[float] = []
    for number in ranks:
        cluster = Cluster(ranks=number, capacity_tokens=8192)
        for source in SOURCES:
            batches = [tokens_batch(source, TOKENS * number, seed, cluster) for seed in range(seeds)]
            free = [plan_step(batch, cluster, TERMS) for batch in batches]
            for stages, virtual in SHAPES:
                found: dict[str, list[float]] = {"pipeline": [], "free": [], "bytescale": [], "ms": []}
                for batch, plain in zip(batches, free, strict=True):
                    start = time.process_time()
                    plan = plan_step(
                        batch, cluster, TERMS, PlanOptions(mode="pipeline", stages=stages, virtual=virtual)
                    )
                    found["ms"].append(1e3 * (time.process_time() - start))
                    check_plan(plan)
                    bound = float(plan.notes["bound_seconds"])
                    found["pipeline"].append(float(plan.notes["predicted_seconds"]) / bound)
                    unplanned = replace(plan, microbatches=plain.microbatches)
                    found["free"].append(score(unplanned, TERMS).makespan_seconds / bound)
                    rival = plan_step(
                        batch,
                        cluster,
                        TERMS,
                        PlanOptions(planner="bytescale", mode="pipeline", stages=stages, virtual=virtual),
                    )
                    found["bytescale"].append(float(rival.notes["predicted_seconds"]) / bound)
                ratios += found["pipeline"]
                means = " | ".join(f"{statistics.mean(found[name]):.3f}" for name in ("pipeline", "free", "bytescale"))
                yield f"| {number} | {source} | {stages}, {virtual} | {means} | {statistics.median(found['ms']):.0f} |"
    met = sum(ratio <= TARGET for ratio in ratios)
    mean = statistics.mean(ratios)
    yield ""
    yield f"Mean {mean:.3f} (target {TARGET}), {met} of {len(ratios)} within it."


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
