"""What each tuned constant of the planner is worth: makespans and plan time with half of it and with twice as much.

    python benchmarks/constants.py [NAME ...] [--seeds 1] [--out PAGE]

A constant is a number, or a tuple of numbers, that a module of `lengthwise.planner` gives a name in capitals. One at a
time is changed, and a sample is planned again: few and many sequences, `waves`, pipelines, all choices, ranks of
unequal speed, and the other planners. Of a number near 1 its distance from 1 is halved and doubled; of a tuple every
second entry is taken. Differences are in percent of the makespan as it is: *mean* and *worst* over the sample's batches
(above 0 is worse), and plan time (process seconds) over that as it is, which is noise within some percent. All is
modelled. One constant takes a minute, all half an hour.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import lengthwise.planner
from batches import sequences_batch, tiny_batch, tokens_batch, ugly_batch
from lengthwise.core.shape import Cluster
from lengthwise.cost import Cost, all_terms_cost, named_hardware, named_shape
from lengthwise.planner import CUTTING_PLANNERS, PlanOptions, plan_step, score
from pages import Findings, add_out
from planners import COMPUTE, TERMS
from speeds import draw_speeds

ROOT = Path(lengthwise.planner.__file__).parent
SOLVED_CELLS = 48  # ranks x sequences: half of what `flexsp` takes
NEAR_ONE = 0.1  # numbers so near to 1 are changed by their distance from it

PLAIN = PlanOptions()

Value = int | float | tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Constant:
    """A named number of a module of the planner, and what its comment says of it ("" if nothing)."""

    module: str
    name: str
    reason: str

    @property
    def title(self) -> str:
        """The module below `lengthwise.planner`, and the name."""
        return f"{self.module.removeprefix('lengthwise.planner.')}.{self.name}"


def constants() -> list[Constant]:
    """List the constants of the planner, module by module."""
    return [found for path in sorted(ROOT.rglob("*.py")) for found in _of_module(path)]


def _of_module(path: Path) -> Iterator[Constant]:
    text = path.read_text(encoding="utf-8")
    lines = text.splitlines()
    module = ".".join(("lengthwise.planner", *path.relative_to(ROOT).with_suffix("").parts))
    for node in ast.parse(text).body:
        if not isinstance(node, ast.Assign):
            continue
        target = node.targets[0]
        pairs = [(target, node.value)]
        if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
            pairs = list(zip(target.elts, node.value.elts, strict=True))
        reason = lines[(node.end_lineno or node.lineno) - 1].partition("#")[2].strip()
        for name, value in pairs:
            if isinstance(name, ast.Name) and name.id.strip("_").isupper() and _is_numeric(value):
                yield Constant(module=module, name=name.id, reason=reason)


def _is_numeric(value: ast.expr) -> bool:
    """Return whether an expression is made of nothing but numbers."""
    numbers = (ast.Constant, ast.Tuple, ast.BinOp, ast.UnaryOp, ast.operator, ast.unaryop, ast.expr_context)
    return all(
        isinstance(node, numbers)
        and (not isinstance(node, ast.Constant) or (isinstance(node.value, int | float) and node.value is not True))
        for node in ast.walk(value)
    )


def changed(value: Value) -> Iterator[tuple[str, Value]]:
    """Yield (what was done, the value) of what a constant is tried with."""
    if isinstance(value, tuple):
        yield "every second", value[::2] if len(value) > 1 else value
        return
    for name, factor in (("half", 0.5), ("twice", 2.0)):
        if isinstance(value, int):
            yield name, max(1, round(value * factor))
        elif abs(value - 1) < NEAR_ONE:
            yield name, 1 + (value - 1) * factor
        else:
            yield name, value * factor


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """One call of `plan_step`."""

    tokens: list[int]
    cluster: Cluster
    cost: Cost
    options: PlanOptions = PLAIN

    def plan(self) -> tuple[float, float]:
        """Plan it; return its makespan and the process seconds that planning took."""
        start = time.process_time()
        plan = plan_step(self.tokens, self.cluster, self.cost, self.options)
        took = time.process_time() - start
        return score(plan, self.cost, speeds=self.options.speeds).makespan_seconds, took


def sample(seeds: int) -> list[Batch]:
    """Draw the batches that all constants are tried on."""
    return [batch for seed in range(seeds) for batch in _of_seed(seed)]


def _of_seed(seed: int) -> Iterator[Batch]:
    full = all_terms_cost(named_shape("llama-7b"), named_hardware("h100"))
    chosen = PlanOptions(offload="auto", heads="auto", layers=32)
    for number in range(12):
        tokens, cluster = tiny_batch(100 * seed + number)
        yield Batch(tokens=tokens, cluster=cluster, cost=TERMS)
        if cluster.ranks * len(tokens) <= SOLVED_CELLS:
            yield Batch(tokens=tokens, cluster=cluster, cost=TERMS, options=PlanOptions(planner="flexsp"))
    beside = all_terms_cost(named_shape("tiny"), named_hardware("cpu"))  # planned beside ranks that take as long
    hurried = PlanOptions(heads="auto", layers=4, planning_share=0.1)
    for ranks, capacity, count in ((2, 1024, 12), (3, 4096, 24), (4, 16384, 48)):
        cluster = Cluster(ranks=ranks, capacity_tokens=capacity)
        yield Batch(
            tokens=sequences_batch("github", count, seed, cluster), cluster=cluster, cost=beside, options=hurried
        )
    for ranks in (6, 24, 97):
        tokens, cluster = ugly_batch(ranks, seed)
        yield Batch(tokens=tokens, cluster=cluster, cost=TERMS)
    short, long = Cluster(ranks=32, capacity_tokens=8192), Cluster(ranks=128, capacity_tokens=16384)
    for source in ("prolong", "github", "wikipedia"):
        tokens = sequences_batch(source, 1024, seed, short)
        for options in (PLAIN, PlanOptions(mode="waves")):
            yield Batch(tokens=tokens, cluster=short, cost=TERMS, options=options)
    for source, cost in (("byted", COMPUTE), ("github", TERMS)):
        tokens = tokens_batch(source, 2**24, seed, long)
        yield Batch(tokens=tokens, cluster=long, cost=cost)
        yield Batch(tokens=tokens, cluster=long, cost=cost, options=PlanOptions(mode="waves"))
    for ranks, source in ((4, "wikipedia"), (16, "github")):
        cluster = Cluster(ranks=ranks, capacity_tokens=8192)
        tokens = tokens_batch(source, 131_072 * ranks, seed, cluster)
        piped = PlanOptions(mode="pipeline", stages=4, virtual=2)
        yield Batch(tokens=tokens, cluster=cluster, cost=TERMS, options=piped)
        for kind in ("halves", "uniform"):
            unequal = PlanOptions(speeds=tuple(draw_speeds(kind, ranks, seed)))
            for cost in (TERMS, full):
                yield Batch(tokens=tokens, cluster=cluster, cost=cost, options=unequal)
        yield Batch(tokens=tokens, cluster=cluster, cost=full, options=chosen)
        for planner in CUTTING_PLANNERS:
            if planner != "lengthwise":
                yield Batch(tokens=tokens, cluster=cluster, cost=TERMS, options=PlanOptions(planner=planner))


def with_value(constant: Constant, value: Value, batches: Sequence[Batch]) -> list[tuple[float, float]]:
    """Plan all batches while a constant has another value, wherever it is imported."""
    own = vars(importlib.import_module(constant.module))[constant.name]
    holders = [each for each in _modules() if vars(each).get(constant.name) is own]
    try:
        for module in holders:
            setattr(module, constant.name, value)
        return [batch.plan() for batch in batches]
    finally:
        for module in holders:
            setattr(module, constant.name, own)


def _modules() -> list[ModuleType]:
    return [module for name, module in sys.modules.items() if name.startswith("lengthwise.planner")]


def table(chosen: Sequence[Constant], batches: Sequence[Batch]) -> Iterator[str]:
    """Yield the lines of the table as they are found."""
    [batch.plan() for batch in batches]  # imports and caches
    as_is = [batch.plan() for batch in batches]
    yield "| constant | why it is there | value | tried | mean % | worst % | plan time |"
    yield "|---|---|---|---|---|---|---|"
    for constant in chosen:
        value: Value = vars(importlib.import_module(constant.module))[constant.name]
        for what, tried in changed(value):
            found = with_value(constant, tried, batches)
            later = [100 * (new[0] / old[0] - 1) for new, old in zip(found, as_is, strict=True)]
            took = sum(seconds for _, seconds in found) / sum(seconds for _, seconds in as_is)
            shown = f"{statistics.mean(later):+.3f} | {max(later):+.2f} | {took:.2f}"
            yield f"| `{constant.title}` | {constant.reason} | {_written(value)} | {what} | {shown} |"


def _written(value: Value) -> str:
    return ", ".join(f"{each:g}" for each in value) if isinstance(value, tuple) else f"{value:.10g}"


def main() -> None:
    """Print the table, and write it into a page if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="as placement.line._HOLES (default: all)")
    parser.add_argument("--seeds", type=int, default=1)
    add_out(parser, "constants")
    arguments = parser.parse_args()
    known = {constant.title: constant for constant in constants()}
    if unknown := [name for name in arguments.names if name not in known]:
        parser.error(f"no constants {', '.join(unknown)}; there are {', '.join(known)}")
    findings = Findings("constants")
    batches = sample(arguments.seeds)
    findings.add(table([known[name] for name in arguments.names or known], batches))
    findings.sign("Modelled", f"seeds 0 to {arguments.seeds - 1}, {len(batches)} batches")
    findings.write(arguments.out)


if __name__ == "__main__":
    main()
