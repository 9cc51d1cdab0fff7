"""Ranks of unequal speed: how far above their bound plans end, for each way in which speeds differ.

    python benchmarks/speeds.py [--ranks 8,16,32,64] [--seeds 2] [--out PAGE]

`halves`: each rank at random half as fast as another; `uniform`: anything from half as fast; `nodes`: nodes of 8 at
random 0.6 times as fast; `one`: a single rank of 0.7. 128K tokens a rank, capacity 8K, lengths clipped as in
`planners.py`. *four terms* are the costs of `planners.py`, which know no shares: a ring is as slow as its slowest rank.
*all terms* (7B on h100) price shares. Makespans are over the bound of the plan's own kind, which knows the speeds.
*blind*: the plan for equal ranks, scored with the speeds, over that makespan; "equal" where the model cannot tell them
apart. Plan times are process seconds.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass

from batches import tokens_batch
from lengthwise.core.shape import Cluster
from lengthwise.cost import Cost, all_terms_cost, named_hardware, named_shape
from lengthwise.planner import PlanOptions, plan_step, score
from lengthwise.program import check_plan
from pages import Findings, add_out, modelled_gain
from planners import TERMS

TOKENS_A_RANK, CAPACITY_TOKENS, RANKS_A_NODE = 131_072, 8192, 8
SOURCES = ("github", "prolong", "wikipedia")
AIM = 1.02


def draw_speeds(kind: str, ranks: int, seed: int) -> list[float]:
    """Draw a speed for each rank."""
    choose = random.Random(seed)
    if kind == "halves":
        return [choose.choice((1.0, 0.5)) for _ in range(ranks)]
    if kind == "uniform":
        return [choose.uniform(0.5, 1) for _ in range(ranks)]
    if kind == "nodes":
        of_nodes = [choose.choice((1.0, 0.6)) for _ in range(-(-ranks // RANKS_A_NODE))]
        return [of_nodes[rank // RANKS_A_NODE] for rank in range(ranks)]
    speeds = [1.0] * ranks
    speeds[choose.randrange(ranks)] = 0.7
    return speeds


def table(ranks: list[int], seeds: int) -> Iterator[str]:
    """Yield the lines of the table as they are found."""
    costs = {"four terms": TERMS, "all terms": all_terms_cost(named_shape("llama-7b"), named_hardware("h100"))}
    yield (
        "| costs | speeds | lengths | "
        + " | ".join(f"{count} ranks" for count in ranks)
        + " | blind / ours | worst ms |"
    )
    yield "|---" * (len(ranks) + 5) + "|"
    for name, cost in costs.items():
        of_kind: list[float] = []
        for kind in ("halves", "uniform", "nodes", "one"):
            for source in SOURCES:
                cells, ratios, took_ms = [name, kind, source], list[float](), list[float]()
                ours, blind = list[float](), list[float]()
                for count in ranks:
                    found = [planned(source, kind, count, seed, cost) for seed in range(seeds)]
                    cells.append(f"{statistics.mean(each.over_bound for each in found):.4f}")
                    ratios += [each.over_bound for each in found]
                    ours += [each.seconds for each in found]
                    blind += [each.blind_seconds for each in found]
                    took_ms += [each.took_ms for each in found]
                of_kind += ratios
                yield ("| " + " | ".join([*cells, modelled_gain(blind, ours), f"{max(took_ms):.0f}"]) + " |")
        mean = statistics.mean(of_kind)
        verdict = "met" if mean <= AIM else "**missed**"
        yield f"| {name} | all | mean {mean:.4f}, worst {max(of_kind):.4f}; aim {AIM} {verdict} |" + " |" * (
            len(ranks) + 2
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """One batch: the makespan of its plan, over the bound of its kind too, and that of the plan for equal ranks."""

    seconds: float
    over_bound: float
    blind_seconds: float
    took_ms: float


def planned(source: str, kind: str, ranks: int, seed: int, cost: Cost) -> Found:
    """Plan one batch with the speeds and without."""
    cluster, speeds = Cluster(ranks=ranks, capacity_tokens=CAPACITY_TOKENS), draw_speeds(kind, ranks, seed)
    tokens = tokens_batch(source, ranks * TOKENS_A_RANK, seed, cluster)
    start = time.process_time()
    plan = plan_step(tokens, cluster, cost, PlanOptions(speeds=speeds))
    took_ms = 1e3 * (time.process_time() - start)
    check_plan(plan)
    ours = score(plan, cost).makespan_seconds
    blind = score(plan_step(tokens, cluster, cost), cost, speeds=speeds).makespan_seconds
    return Found(seconds=ours, over_bound=ours / plan.notes["bound_seconds"], blind_seconds=blind, took_ms=took_ms)


def main() -> None:
    """Print the table, and write it into a page if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="8,16,32,64")
    parser.add_argument("--seeds", type=int, default=2)
    add_out(parser, "speeds")
    arguments = parser.parse_args()
    findings = Findings("speeds")
    findings.add(table([int(count) for count in arguments.ranks.split(",")], arguments.seeds))
    findings.sign("Modelled", f"seeds 0 to {arguments.seeds - 1}")
    findings.write(arguments.out)


if __name__ == "__main__":
    main()
