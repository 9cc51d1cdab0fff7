"""What offload, split heads and recomputation gain each planner: makespans with and without; nothing is measured.

    python benchmarks/joint.py [--ranks 256,1024] [--capacities 8K,16K] [--lengths github,byted] [--full-heads]

A step of 32M tokens, llama-7b on h100, all terms of the costs; lengths clipped to 0.98 of what all ranks hold.
Makespans in seconds by `score`, mean over the seeds; `offload`, `heads` and `both` beside `off`, which is without; then
the share of tokens in offloaded microbatches, and plan times in seconds of one core. The second table is of the kinds
of recomputation, each with the capacity that memory leaves it, all other choices off.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from batches import tokens_batch
from lengthwise.core.plan import RECOMPUTE_KINDS, Plan
from lengthwise.core.shape import Cluster, ModelShape
from lengthwise.core.sizes import parse_tokens
from lengthwise.cost import Cost, all_terms_cost, named_hardware, named_shape, recompute_capacities, step_memory
from lengthwise.planner import CUTTING_PLANNERS, PlanOptions, plan_recomputed, plan_step
from lengthwise.program import check_plan
from pages import Findings, add_out

BATCH_TOKENS = 32 * 2**20
CHOICES = {
    "off": {},
    "offload": {"offload": "auto"},
    "heads": {"heads": "auto"},
    "both": {"offload": "auto", "heads": "auto"},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Batches of one recipe on one cluster."""

    recipe: str
    cluster: Cluster
    seeds: int

    @property
    def title(self) -> str:
        return f"{self.recipe}, {self.cluster.ranks:,} ranks of {self.cluster.capacity_tokens // 1024}K"


def plans_of(case: Case, cost: Cost, planner: str, choice: str) -> tuple[list[Plan], float]:
    """Plan every batch; return the plans and the seconds that one takes."""
    plans, start = [], time.process_time()
    for seed in range(case.seeds):
        tokens = tokens_batch(case.recipe, BATCH_TOKENS, seed, case.cluster)
        plans.append(plan_step(tokens, case.cluster, cost, PlanOptions(planner=planner, layers=32, **CHOICES[choice])))
    took = (time.process_time() - start) / case.seeds
    for plan in plans:
        check_plan(plan)
    return plans, took


def case_lines(case: Case, cost: Cost, planners: Sequence[str]) -> Iterator[str]:
    """Yield the lines of one case."""
    for planner in planners:
        found = {choice: plans_of(case, cost, planner, choice) for choice in CHOICES}
        seconds = {choice: np.mean([_seconds(plan) for plan in plans]) for choice, (plans, _) in found.items()}
        gains = [f"{seconds[choice]:.3f} ({seconds['off'] / seconds[choice]:.3f}x)" for choice in CHOICES]
        offloaded = np.mean([_offloaded_share(plan) for plan in found["offload"][0]])
        times = ", ".join(f"{took:.2f}" for _, took in found.values())
        yield f"| {case.title} | {planner} | {' | '.join(gains)} | {100 * offloaded:.0f} % | {times} |"


def recompute_lines(recipe: str, ranks: int, shape: ModelShape, planners: Sequence[str]) -> Iterator[str]:
    """Yield the lines of one step under each kind of recomputation that has room."""
    hardware = named_hardware("h100")
    cost = all_terms_cost(shape, hardware)
    capacities = recompute_capacities(step_memory(shape, hardware, ranks), hardware)
    smallest = Cluster(ranks=ranks, capacity_tokens=min(capacities.values()))
    tokens = tokens_batch(recipe, BATCH_TOKENS, 0, smallest)
    for planner in planners:
        plans = {
            kind: plan_recomputed(
                tokens, ranks, cost, {kind: capacity}, PlanOptions(planner=planner, layers=shape.layers)
            )
            for kind, capacity in capacities.items()
        }
        told = [f"{_seconds(plans[kind]):.3f} ({capacities[kind]:,})" for kind in capacities]
        best = min(plans, key=lambda kind: _seconds(plans[kind]))
        yield f"| {recipe}, {ranks:,} ranks | {planner} | {' | '.join(told)} | {best} |"


def _seconds(plan: Plan) -> float:
    return float(plan.notes["predicted_seconds"])


def _offloaded_share(plan: Plan) -> float:
    inside = sum(plan.tokens[i] for m in plan.microbatches if m.offload for p in m.pieces for i in p.sequences)
    return inside / sum(plan.tokens)


def main() -> None:
    """Print the tables, and write them into a page if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="256,1024")
    parser.add_argument("--capacities", default="8K,16K")
    parser.add_argument("--lengths", default="github,byted")
    parser.add_argument("--planners", default=",".join(CUTTING_PLANNERS))
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--full-heads", action="store_true", help="32 KV heads in place of 8")
    add_out(parser, "joint")
    arguments = parser.parse_args()
    findings = Findings("joint")
    shape = named_shape("llama-7b")
    if arguments.full_heads:
        shape = replace(shape, kv_heads=shape.heads)
    cost = all_terms_cost(shape, named_hardware("h100"))
    heads = f"| {shape.kv_heads} KV heads | planner | {' | '.join(CHOICES)} | offloaded tokens | plan seconds, each |"
    findings.add([heads, "|---|---|---|---|---|---|---|---|"])
    for recipe in arguments.lengths.split(","):
        for ranks in map(int, arguments.ranks.split(",")):
            for capacity in arguments.capacities.split(","):
                cluster = Cluster(ranks=ranks, capacity_tokens=parse_tokens(capacity, "--capacities"))
                case = Case(recipe=recipe, cluster=cluster, seeds=arguments.seeds)
                findings.add(case_lines(case, cost, arguments.planners.split(",")))
    kinds = " | ".join(RECOMPUTE_KINDS)
    findings.add(["", f"| {shape.kv_heads} KV heads | planner | {kinds} | `auto` takes |", "|---|---|---|---|---|---|"])
    for recipe in arguments.lengths.split(","):
        for ranks in map(int, arguments.ranks.split(",")):
            findings.add(recompute_lines(recipe, ranks, shape, arguments.planners.split(",")))
    findings.sign("Modelled", f"one core, seeds 0 to {arguments.seeds - 1}")
    findings.write(arguments.out)


if __name__ == "__main__":
    main()
