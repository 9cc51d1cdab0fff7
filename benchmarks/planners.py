"""Every planner on the same batches: one command, one table; nothing here is run, all is modelled.

    python benchmarks/planners.py [--rows long-256,tiny] [--seeds 8] [--planners lengthwise,static]
    python benchmarks/planners.py --without annealing,slots+swaps

Makespans are over the bound of the plan's own kind, which its notes hold (mean over seeds, worst in brackets), and come
from `judge.py`, which shares no code with the package; `ring-bound-1024` has costs that it does not know and is scored
by `score`. Bounds of two kinds differ, so the second table holds makespans over those of `lengthwise`, "equal" where
the model cannot tell them apart. Plan times are process seconds of one core for a whole `plan_step`, bound and score
included (median over seeds); a planner that refuses a batch of a row has - there.
`--without` plans 500 steps with and without passes of `lengthwise` (`planner_passes.py`), some minutes per pass.
`--seeds 1 --rows short-64,launch-32` takes half a minute; everything about half an hour of one core, most of it the
200 programs of `tiny`. Planners may also be those of `rival_planners`.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from batches import STDLIB, sequences_batch, tiny_batch, tokens_batch
from judge import Coefficients, judge
from lengthwise.core.errors import PlanError
from lengthwise.core.plan import Plan
from lengthwise.core.shape import Cluster
from lengthwise.cost import Cost, all_terms_cost, named_hardware, named_shape
from lengthwise.planner import CUTTING_PLANNERS, PLANNERS, PlanOptions, plan_step, score
from lengthwise.program import check_plan
from pages import Findings, markdown, modelled_gain, parse_options, verdict
from planner_passes import COMPUTE, PASSES, TERMS, passes_table
from rival_planners import register_rivals

OURS = "lengthwise"
FAST = (OURS, "bytescale-naive", "power-of-two")  # others take minutes on 12,288 ranks
WAVE_TOKENS = 131_072  # a rank and step


@dataclass(frozen=True, slots=True)
class Row:
    """Batches of one source on one cluster, and what `lengthwise` must show on them."""

    name: str
    source: str
    cluster: Cluster
    cost: Cost
    most_ratio: float
    most_ms: float
    sequences: int = 0  # or tokens
    tokens: int = 0
    only: tuple[str, ...] = ()  # planners that are quick enough; none: all

    def batch(self, seed: int) -> list[int]:
        if self.sequences:
            return sequences_batch(self.source, self.sequences, seed, self.cluster)
        return tokens_batch(self.source, self.tokens, seed, self.cluster)

    @property
    def title(self) -> str:
        size = f"{self.sequences:,} sequences" if self.sequences else f"{self.tokens // 2**20}M tokens"
        cluster = f"{self.cluster.ranks:,} ranks of {self.cluster.capacity_tokens // 1024}K"
        return f"`{self.name}` {self.source}: {size}, {cluster}, {self.cost.version}"


def rows() -> Iterator[Row]:
    """List the rows of the table."""
    for cost, kind, slower, ratio_terms in ((COMPUTE, "", 1, None), (TERMS, "-terms", 3, 1.01)):
        short = Cluster(ranks=64, capacity_tokens=8192)
        for source in ("prolong", "wikipedia", "github", STDLIB):
            yield Row(f"short-64{kind}", source, short, cost, ratio_terms or 1.001, 30 * slower, sequences=4096)
        for ranks, ratio, ms in ((256, 1.001, 60), (1024, 1.002, 120)):
            for source in ("byted", "github"):
                aim = (1.015 if (ranks, source) == (1024, "github") else ratio_terms) if ratio_terms else ratio
                cluster = Cluster(ranks=ranks, capacity_tokens=16384)
                yield Row(f"long-{ranks}{kind}", source, cluster, cost, aim, ms * slower, tokens=2**25)
    huge = Cluster(ranks=12288, capacity_tokens=16384)
    yield Row("huge-12288", "byted", huge, COMPUTE, 1.002, 1000, tokens=384 * 2**20, only=FAST)
    few = Cluster(ranks=32, capacity_tokens=8192)
    yield Row("launch-32", "wikipedia", few, TERMS, 1.02, 30, sequences=512)
    heads = named_shape("llama-7b")
    full = all_terms_cost(replace(heads, kv_heads=heads.heads, name="7B, full heads,"), named_hardware("h100"))
    for source in ("byted", "github"):
        cluster = Cluster(ranks=1024, capacity_tokens=16384)
        yield Row("ring-bound-1024", source, cluster, full, 1.05, 1000, tokens=2**25)


def makespan(plan: Plan, cost: Cost) -> float:
    """Judge a plan; costs that the judge does not know are left to `score`."""
    if cost.copy_bytes or cost.far.hop_seconds or cost.windows:
        check_plan(plan)
        return score(plan, cost).makespan_seconds
    coefficients = Coefficients(
        quadratic=cost.quadratic_seconds,
        linear=cost.linear_seconds,
        fixed=cost.fixed_seconds,
        ring=cost.ring_bytes / cost.far.bytes_per_second,
    )
    return judge(json.loads(plan.to_json()), coefficients)


def plan_if_held(tokens: Sequence[int], cluster: Cluster, cost: Cost, planner: str) -> Plan | None:
    """Plan a step; None where a planner other than ours refuses sequences that it cannot place."""
    try:
        return plan_step(tokens, cluster, cost, PlanOptions(planner=planner))
    except PlanError:
        if planner == OURS:
            raise
        return None


@dataclass(slots=True)
class Found:
    """What one planner did on the batches of a row: makespan over bound, makespan, and plan time of each seed."""

    ratios: list[float]
    seconds: list[float]
    took_ms: list[float]


def run_row(row: Row, planners: Sequence[str], seeds: int) -> dict[str, Found]:
    """Plan every batch of a row with every planner; those that refuse one of them are left out."""
    found = {name: Found([], [], []) for name in planners if name in (row.only or planners)}
    for seed in range(seeds):
        tokens = row.batch(seed)
        for name, of_planner in list(found.items()):
            start = time.process_time()
            plan = plan_if_held(tokens, row.cluster, row.cost, name)
            if plan is None:
                del found[name]
                continue
            of_planner.took_ms.append(1e3 * (time.process_time() - start))
            of_planner.seconds.append(makespan(plan, row.cost))
            of_planner.ratios.append(of_planner.seconds[-1] / float(plan.notes["bound_seconds"]))
    return found


def cells_of(row: Row, found: dict[str, Found], others: Sequence[str]) -> list[str]:
    """Make one row of the table: ours with targets and verdicts, then the others."""
    cells = [row.title, *["-"] * 4]
    if OURS in found:
        ratio, ms = statistics.mean(found[OURS].ratios), statistics.median(found[OURS].took_ms)
        cells[1:] = [
            f"{ratio:.4f} ({max(found[OURS].ratios):.4f})",
            f"{row.most_ratio:g} {verdict(ratio <= row.most_ratio)}",
            f"{ms:.0f}",
            f"{row.most_ms:g} {verdict(ms <= row.most_ms)}",
        ]
    for each in map(found.get, others):
        cells.append(f"{statistics.mean(each.ratios):.3f} ({statistics.median(each.took_ms):.0f})" if each else "-")
    return cells


def main_tables(names: Sequence[str], planners: Sequence[str], seeds: int) -> Iterator[str]:
    """Yield the lines of both main tables: the first as they are found, over bounds; the second over `lengthwise`."""
    others = [name for name in planners if name != OURS]
    compared: list[list[str]] = []

    def found_rows() -> Iterator[list[str]]:
        for row in rows():
            if row.name in names:
                found = run_row(row, planners, seeds)
                ours = found[OURS].seconds if OURS in found else []
                gains = [modelled_gain(found[name].seconds, ours) if name in found and ours else "-" for name in others]
                compared.append([row.title, *gains])
                yield cells_of(row, found, others)

    heads = ["case | lengthwise: mean (worst) | target | plan ms | target", *(f"{name} (ms)" for name in others)]
    yield from markdown(" | ".join(heads), found_rows())
    if OURS in planners and others:
        yield from ("", f"Makespans over those of `{OURS}`:", "", *markdown(" | ".join(["case", *others]), compared))


def waves_table(seeds: int) -> Iterator[str]:
    """Yield the table of mode `waves`: all ranks in lock-step, as sharded parameters ask for."""
    heads = "ranks | tokens a rank | lengths | costs | waves / bound: mean (worst) | target | plan ms"
    return markdown(heads, _waves_rows(seeds))


def _waves_rows(seeds: int) -> Iterator[list[str]]:
    for ranks, tokens_a_rank in ((8, WAVE_TOKENS), (64, WAVE_TOKENS), (1024, WAVE_TOKENS), (1024, WAVE_TOKENS // 4)):
        cluster = Cluster(ranks=ranks, capacity_tokens=16384)
        for source, cost in ((source, cost) for source in ("github", "prolong") for cost in (COMPUTE, TERMS)):
            ratios, took_ms = list[float](), list[float]()
            for seed in range(seeds):
                tokens = tokens_batch(source, tokens_a_rank * ranks, seed, cluster)
                start = time.process_time()
                plan = plan_step(tokens, cluster, cost, PlanOptions(mode="waves"))
                took_ms.append(1e3 * (time.process_time() - start))
                ratios.append(makespan(plan, cost) / float(plan.notes["bound_seconds"]))
            mean, worst, ms = statistics.mean(ratios), max(ratios), statistics.median(took_ms)
            cells = [f"{ranks:,}", f"{tokens_a_rank // 1024}K", source, cost.version, f"{mean:.4f} ({worst:.4f})"]
            yield [*cells, f"1.03 {verdict(mean <= 1.03)}", f"{ms:.0f}"]


def tiny_table(cases: int) -> Iterator[str]:
    """Yield gaps to the oracle, of every planner and of FlexSP, over tiny steps with all four terms."""
    from exact.oracle import plan_oracle

    register_rivals(["flexsp"])
    gaps: dict[str, list[float]] = {name: [] for name in (*PLANNERS, "flexsp")}
    proven = 0
    for seed in range(cases):
        tokens, cluster = tiny_batch(seed)
        best = plan_oracle(tokens, cluster, TERMS)
        proven += best.bound_seconds >= best.makespan_seconds * (1 - 2e-3)
        for name, of_planner in gaps.items():
            plan = plan_if_held(tokens, cluster, TERMS, name)
            if plan is not None:
                of_planner.append(100 * (makespan(plan, TERMS) / best.makespan_seconds - 1))
    yield f"{cases} steps; the oracle's plan is proven to be within 0.2 % of the best in {proven} of them."
    yield ""
    values = {name: of_planner for name, of_planner in gaps.items() if of_planner}
    aims = {OURS: f"1 {verdict(statistics.mean(values[OURS]) <= 1)}, 5 {verdict(max(values[OURS]) <= 5)}"}

    def row(name: str, of: Sequence[float]) -> list[object]:
        figures = (f"{each:.2f}" for each in (statistics.mean(of), statistics.median(of), max(of)))
        return [name, len(of), *figures, aims.get(name, "")]

    told = (row(*each) for each in values.items())
    yield from markdown("planner | steps | mean gap % | median | worst % | target: mean, worst", told)


def main() -> None:
    """Print the tables, and write them into a page if asked."""
    names = [*dict.fromkeys(row.name for row in rows()), "waves", "tiny"]
    arguments = parse_options(
        __doc__, rows=("", f"of {', '.join(names)} (default: all)"), seeds=8, tiny_cases=200,
        planners=",".join(CUTTING_PLANNERS),
        without=("", f"of {', '.join(PASSES)}: what each buys; + joins those that are left out together"),
        steps=(500, "of those that passes are judged on, evenly spaced"),
    )  # fmt: skip
    asked = arguments.rows.split(",") if arguments.rows else names
    if unknown := set(asked) - set(names):
        raise SystemExit(f"no rows {', '.join(sorted(unknown))}; there are {', '.join(names)}")
    planners, start = arguments.planners.split(","), time.process_time()
    register_rivals(planners)
    findings = Findings("passes" if arguments.without else "planners")
    if arguments.without:
        findings.add(passes_table(arguments.without, arguments.steps))
        findings.sign("Modelled", "one of two shared cores", arguments.out)
        return
    parts = {"waves": waves_table(arguments.seeds), "tiny": tiny_table(arguments.tiny_cases)}
    if set(asked) - set(parts):
        findings.add(main_tables(asked, planners, arguments.seeds))
    for name, lines in parts.items():
        if name in asked:
            findings.add(["", f"### `{name}`", ""])
            findings.add(lines)
    seconds = time.process_time() - start
    about = f"{seconds / 60:.0f} minutes of one core, seeds 0 to {arguments.seeds - 1}"
    findings.sign("Modelled", about, arguments.out)


if __name__ == "__main__":
    main()
