"""Passes of the planner `lengthwise`, each of which can be left out, and the 500 steps on which that is judged.

Steps are drawn from the published length sets: 4 to 1,024 ranks, contexts up to 2M tokens, all kinds of costs and
choices, pipelines, lock-step, unequal ranks, steps of a few sequences, and the cases of
docs/decisions/placement-levels.md. Large steps are few, so that one pass over all takes some minutes.
"""

from __future__ import annotations

import math
import random
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any
from unittest.mock import patch

from batches import clip_tokens, tiny_batch
from lengthwise.core.shape import Cluster
from lengthwise.cost import Cost, all_terms_cost, named_hardware, named_shape, plain_cost
from lengthwise.data.recipes import RECIPES, draw_lengths
from lengthwise.planner import PlanOptions, plan_step
from lengthwise.planner.problem.topology import Topology
from pages import markdown

COMPUTE = Cost(quadratic_seconds=1.0, linear_seconds=32768.0, version="compute only")
TERMS = plain_cost(
    quadratic_seconds=1.0, linear_seconds=32768.0, fixed_seconds=2e7, ring_seconds=4e3, version="four terms"
)
FULL_HEADS = replace(named_shape("llama-7b"), kv_heads=named_shape("llama-7b").heads, name="7B, full heads,")
MODELS = (named_shape("llama-3-8b"), named_shape("llama-30b"), FULL_HEADS)
COUNTS = {"tiny": 100, "free": 191, "chosen": 70, "stages": 60, "waves": 40, "unequal": 10, "wide": 20}
P = "lengthwise.planner."
EVERY, PIPELINES = ("free", "waves", "pipeline"), ("pipeline",)


@dataclass(frozen=True, slots=True)
class Pass:
    """A pass: what takes the place of which names where it is left out, and the modes that have it."""

    without: Mapping[str, Any]
    modes: Sequence[str] = EVERY


def _without_border(self: Topology, degree: int, _penalty: float, some: slice, added: Any = Topology._added_by_border):
    return added(self, degree, 0.0, some)


PASSES = {
    "longest": Pass({P + "search.WAYS": ("widest", "skyline")}),
    "backfilling": Pass({P + "placement.line.RankLine.backfill": lambda *_: False}),
    "others": Pass({P + "portfolio.is_worth_others": lambda *_: False}),
    "shelves": Pass({P + "schedules.pipeline.plan_shelves": lambda *_: []}, PIPELINES),
    "waves": Pass({P + "schedules.waves._ways": lambda _builder: [(0.01, None)]}, ("waves",)),
    "fractions": Pass({P + "search.FRACTIONS": ()}),
    "borders": Pass({P + "problem.topology.Topology._added_by_border": _without_border}),
    "slots": Pass({P + "portfolio.plan_pipeline": lambda *_: []}, PIPELINES),
    "annealing": Pass({P + "portfolio.MOST_WORK": -1}),
    "swaps": Pass({P + "placement.level_ends.level_by_swaps": lambda loads, *_, **__: max(loads)}),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One step to plan, and what it is called."""

    kind: str
    tokens: Sequence[int]
    cluster: Cluster
    cost: Cost
    options: PlanOptions = field(default_factory=PlanOptions)

    @property
    def name(self) -> str:
        """The kind, and the size."""
        return f"{self.kind}: {len(self.tokens):,} sequences, {self.cluster.ranks:,} ranks, {self.cost.version}"


def steps() -> Iterator[Step]:
    """Yield the 500 steps."""
    yield from placement_cases()
    for kind, count in COUNTS.items():
        yield from (_drawn(kind, number, random.Random(f"{kind} {number}")) for number in range(count))


def _drawn(kind: str, number: int, choose: random.Random) -> Step:
    if kind == "tiny":
        tokens, cluster = tiny_batch(number)
        return Step(kind=kind, tokens=tokens, cluster=cluster, cost=choose.choice((TERMS, _full(choose))))
    ranks = choose.choice((128, 256, 256, 512, 1024) if kind == "wide" else (4, 6, 8, 12, 16, 20, 22, 24, 32, 48, 64))
    cluster = Cluster(ranks=ranks, capacity_tokens=choose.choice((4096, 8192, 16384)))
    context = min(clip_tokens(cluster), choose.choice((32, 128, 256, 512, 1024, 2048)) * 1024)
    tokens = draw_lengths(choose.choice(RECIPES), ranks * choose.choice((8, 16, 32)) * 1024, number, context)
    stages = choose.choice((2, 2, 4, 8)) if kind == "stages" else 1
    cost = choose.choice((COMPUTE, TERMS, _full(choose, stages), _full(choose, stages)))
    options: dict[str, Any] = {}
    if kind == "chosen":
        cost = _full(choose)
        options = choose.choice(({"heads": "auto"}, {"heads": "auto", "offload": "auto"}, {"offload": "auto"}))
    elif kind == "stages":
        options = {"mode": "pipeline", "stages": stages, "virtual": choose.choice((1, 1, 2))}
    elif kind == "waves":
        options = {"mode": "waves"}
    elif kind == "unequal":
        options = {"speeds": [choose.choice((0.7, 1.0, 1.0, 1.0)) for _ in range(ranks)]}
    return Step(kind=kind, tokens=tokens, cluster=cluster, cost=cost, options=PlanOptions(layers=64, **options))


def _full(choose: random.Random, stages: int = 1) -> Cost:
    return all_terms_cost(choose.choice(MODELS), named_hardware("h100"), stages=stages)


def placement_cases() -> Iterator[Step]:
    """Yield the steps on which docs/decisions/placement-levels.md rests."""
    full, wide = all_terms_cost(FULL_HEADS, named_hardware("h100")), Cluster(ranks=1024, capacity_tokens=16384)
    yield Step(kind="placement", tokens=_batch("byted", wide, 2**25), cluster=wide, cost=full)
    cluster = Cluster(ranks=64, capacity_tokens=16384)
    for seed in (0, 1):
        yield Step(kind="placement", tokens=_batch("github", cluster, 2**23, seed), cluster=cluster, cost=full)
    gpu, many = named_hardware("bytescale-gpu"), Cluster(ranks=1024, capacity_tokens=8192)
    chosen = {"heads": "auto", "offload": "auto"}
    chosen_by_model: list[tuple[str, int, dict[str, Any]]] = [
        ("llama-30b", 2**20, {}),
        ("llama-7b", 2**19, chosen),
        ("llama-7b", 2**21, {"heads": "auto"}),
    ]
    for model, context, options in chosen_by_model:
        tokens, cost = draw_lengths("byted", 2**25, 0, context), all_terms_cost(named_shape(model), gpu)
        yield Step(kind="placement", tokens=tokens, cluster=many, cost=cost, options=PlanOptions(layers=64, **options))
    staged, of_192 = PlanOptions(mode="pipeline", stages=2), Cluster(ranks=192, capacity_tokens=8192)
    for recipe, context in (("github", 262_144), ("byted", 524_288), ("byted", 262_144)):
        cost = all_terms_cost(named_shape("mixtral-8x22b"), gpu, stages=2)
        tokens = draw_lengths(recipe, 192 * 43_690, 0, context)
        yield Step(kind="placement", tokens=tokens, cluster=of_192, cost=cost, options=staged)


def _batch(source: str, cluster: Cluster, tokens: int, seed: int = 0) -> list[int]:
    return draw_lengths(source, tokens, seed, clip_tokens(cluster))


def planned(step: Step, without: Sequence[str] = ()) -> tuple[float, float]:
    """Plan a step without some passes; return the predicted seconds, and those of one core that planning took."""
    with ExitStack() as stack:
        for name in without:
            for target, other in PASSES[name].without.items():
                stack.enter_context(patch(target, other))
        start = time.process_time()
        plan = plan_step(step.tokens, step.cluster, step.cost, step.options)
        return float(plan.notes["predicted_seconds"]), time.process_time() - start


def passes_table(asked: str, most_steps: int) -> Iterator[str]:
    """Yield the table of losses on all steps, or on `most_steps` evenly spaced ones.

    asked: comma-separated, with + between passes that are left out together.
    """
    ablations = [each.split("+") for each in asked.split(",")]
    if unknown := {name for each in ablations for name in each} - set(PASSES):
        raise SystemExit(f"no passes {', '.join(sorted(unknown))}; there are {', '.join(PASSES)}")
    losses: list[dict[str, float]] = [{} for _ in ablations]  # percent, of the steps that change
    spent, count, began = [0.0] * len(ablations), 0, 0.0
    drawn = list(steps())
    for count, step in enumerate(drawn[:: max(1, len(drawn) // most_steps)], 1):
        seconds, took = planned(step)
        began += took
        for number, names in enumerate(ablations):
            if not any(step.options.mode in PASSES[name].modes for name in names):
                spent[number] += took
                continue
            later, took_without = planned(step, names)
            spent[number] += took_without
            if later != seconds:
                losses[number][f"{step.name} ({count})"] = 100 * (later / seconds - 1)
        if count % 20 == 0:
            print(count, step.kind, f"{began:.0f} s", [f"{sum(each.values()) / count:.3f}" for each in losses],
                  [f"{max(each.values(), default=0):.2f}" for each in losses], file=sys.stderr, flush=True)  # fmt: skip
    yield f"{count} steps, planned in {began:.0f} s with all passes."
    yield ""

    def rows() -> Iterator[list[str]]:
        for names, lost, took in zip(ablations, losses, spent, strict=True):
            worst = max(lost, key=lambda name: lost[name], default="none")
            mean = math.fsum(lost.values()) / count
            yield [" + ".join(names), str(len(lost)), f"{mean:.3f}", f"{max(lost.values(), default=0):.2f}", worst,
                   f"{took:.0f}"]  # fmt: skip

    yield from markdown("without | steps that change | mean loss % | worst % | worst step | planning s", rows())
