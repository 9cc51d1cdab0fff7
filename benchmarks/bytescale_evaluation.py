"""ByteScale's evaluation, twice: every planner at its best on H100s, and the published setting as a surface.

    python benchmarks/bytescale_evaluation.py [--models llama-7b,...] [--contexts 2M,...] [--planners ...] [--rows FILE]
        [--parts best,published,surface] [--batches 2] [--published-batches 4] [--out PAGE]

Nothing here is measured: all is simulated. Steps of 32M tokens, cut from one draw of all batches: a 2M sequence is in
one batch of github of some, not in all, so that one batch alone says little.

    best       1,024 H100s; each planner on the best mesh that `lengthwise.simulator.best_meshes` finds, alike for all
    published  `bytescale-gpu` and the GPUs of arXiv 2502.21231; one mesh for all, plain rings. Not published, so ours:
               tensor-parallel devices of a rank, tokens that a rank holds, links between nodes
    surface    those three varied for 7B: `static` over `bytescale`

--rows keeps what is done, a line for each planner, so that a run can be taken up again; tables are made of all lines
there are, and with --tables-only nothing is simulated. A line of `best` takes 20 to 90 s of one core, others 2 to 10 s.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path

import numpy as np

from bytescale_report import PublishedRow, Rows, report
from lengthwise.core.shape import Cluster
from lengthwise.core.sizes import parse_tokens
from lengthwise.cost import all_terms_cost, named_hardware, named_shape
from lengthwise.data.recipes import draw_lengths
from lengthwise.planner import PLANNERS, PlanOptions, plan_step
from lengthwise.simulator import simulate_plan
from mesh_rows import MeshRow, add_line, mesh_question, read_lines, search
from pages import Findings, add_out

MODELS = ("llama-7b", "llama-70b", "mixtral-8x7b", "llama-13b", "llama-30b", "mixtral-8x22b")
DEVICES = 1024  # of `best`
PUBLISHED_MESHES = {  # GPUs as published, then tensor-parallel devices and pipeline stages of a rank: ours
    "llama-7b": (1024, 1, 1),
    "llama-13b": (2048, 2, 1),
    "llama-30b": (4096, 4, 1),
    "llama-70b": (8192, 8, 1),
    "mixtral-8x7b": (8192, 8, 1),
    "mixtral-8x22b": (12288, 8, 2),
}
CAPACITY, LINK = "8K", 50e9  # tokens of a rank and bytes/s between nodes, of `published`
SURFACE_TENSORS, SURFACE_CAPACITIES, SURFACE_LINKS = (1, 2, 4, 8), ("16K", "8K"), (12.5e9, 50e9, 200e9)
SURFACE_PLANNERS = ("static", "bytescale")
BATCH_TOKENS = 32 * 2**20
LONGEST = 2**21  # tokens, of `published` and `surface`


def main() -> None:
    """Simulate all rows that are asked for, print the tables and write them to --out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default="best,published,surface")
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--recipes", default="github,byted")
    parser.add_argument("--contexts", default="2M", help="of `best`")
    parser.add_argument("--planners", default=",".join(PLANNERS), help="of `best` and `published`")
    parser.add_argument("--batches", type=int, default=2, help="of `best`")
    parser.add_argument("--published-batches", type=int, default=4, help="of `published` and `surface`")
    parser.add_argument("--rows", type=Path, default=Path("runs/bytescale_evaluation.jsonl"))
    parser.add_argument("--tables-only", action="store_true", help="of the rows that there are")
    add_out(parser, "bytescale_evaluation")
    arguments = parser.parse_args()
    parts = [] if arguments.tables_only else arguments.parts.split(",")
    published_file = arguments.rows.with_suffix(".published.jsonl")
    rows = Rows(
        best=[MeshRow.from_json(line) for line in read_lines(arguments.rows)],
        published=[PublishedRow(**line) for line in read_lines(published_file)],
        default=(CAPACITY, LINK),
        tensors={model: tensor for model, (_, tensor, _) in PUBLISHED_MESHES.items()},
    )
    if "published" in parts:
        _add_published(rows, published_keys(arguments), arguments.published_batches, published_file)
    if "surface" in parts:
        _add_published(rows, surface_keys(arguments.recipes.split(",")), arguments.published_batches, published_file)
    if "best" in parts:
        _add_best(rows, arguments)
    findings = Findings("bytescale_evaluation")
    findings.add(report(rows))
    findings.sign("Simulated", f"tables of all rows that this and earlier runs left in {arguments.rows}")
    findings.write(arguments.out)


def _add_best(rows: Rows, arguments: argparse.Namespace) -> None:
    known = {(row.place, row.planner) for row in rows.best}
    asked = (arguments.contexts, arguments.models, arguments.recipes, arguments.planners)
    for context, model, recipe, planner in product(*(each.split(",") for each in asked)):
        place = (model, recipe, context)
        if (place, planner) in known:
            continue
        longest = parse_tokens(context, "--contexts")
        batches = cut_batches(recipe, arguments.batches, longest)
        question = mesh_question(model, "h100", devices=DEVICES, longest_tokens=longest)
        row = search(place, planner, batches, question)
        rows.best.append(row)
        add_line(arguments.rows, row)
        print(*place, planner, row.best and f"{row.best.mean_seconds:.3f} s", flush=True)


def _add_published(rows: Rows, keys: Iterator[PublishedRow], batches: int, file: Path) -> None:
    known = {row.key for row in rows.published}
    for key in keys:
        if key.key in known:
            continue
        row = simulate_published(key, batches)
        known.add(row.key)
        rows.published.append(row)
        add_line(file, row)
        print(*row.key, f"{row.mean_seconds:.3f} s", flush=True)


def published_keys(arguments: argparse.Namespace) -> Iterator[PublishedRow]:
    """List the rows of the published table, without their seconds: at 2M, one mesh a model."""
    asked = (arguments.models, arguments.recipes, arguments.planners)
    for model, recipe, planner in product(*(each.split(",") for each in asked)):
        if planner == "packed-dp":  # 2M tokens fit on no rank
            continue
        _, tensor, _ = PUBLISHED_MESHES[model]
        yield PublishedRow(model=model, recipe=recipe, planner=planner, tensor=tensor, capacity=CAPACITY, link=LINK)


def surface_keys(recipes: Sequence[str]) -> Iterator[PublishedRow]:
    """List the rows of the surface, without their seconds: 7B on 1,024 GPUs at 2M, where all ranks hold a sequence."""
    devices = PUBLISHED_MESHES["llama-7b"][0]
    settings = product(SURFACE_CAPACITIES, recipes, SURFACE_TENSORS, SURFACE_LINKS, SURFACE_PLANNERS)
    for capacity, recipe, tensor, link, planner in settings:
        if devices // tensor * parse_tokens(capacity, "capacity") < LONGEST:
            continue
        yield PublishedRow(
            model="llama-7b", recipe=recipe, planner=planner, tensor=tensor, capacity=capacity, link=link
        )


def simulate_published(key: PublishedRow, batches: int) -> PublishedRow:
    """Plan and simulate all batches with one planner, plain rings; return the row with its seconds."""
    devices, _, stages = PUBLISHED_MESHES[key.model]
    shape, hardware = named_shape(key.model), named_hardware("bytescale-gpu")
    uplink = key.link * hardware.ranks_per_node
    hardware = replace(hardware, link_bytes_per_second=key.link, node_uplink_bytes_per_second=uplink)
    cost = all_terms_cost(shape, hardware, tensor=key.tensor, stages=stages)
    cluster = Cluster(ranks=devices // key.tensor // stages, capacity_tokens=parse_tokens(key.capacity, "capacity"))
    seconds, ideal = [], []
    for tokens in cut_batches(key.recipe, batches, LONGEST):
        context = LONGEST if key.planner == "static" else None
        options = PlanOptions(planner=key.planner, layers=shape.layers, context_tokens=context)
        plan = plan_step(tokens, cluster, cost, options)
        seconds.append(simulate_plan(plan, cost).step_seconds)
        lengths = np.array(tokens, dtype=np.float64)
        work = cost.quadratic_seconds * float(lengths @ lengths) + cost.linear_seconds * float(lengths.sum())
        ideal.append(work / cluster.ranks)
    return replace(key, seconds=seconds, ideal_seconds=ideal)


@cache
def cut_batches(recipe: str, batches: int, longest_tokens: int) -> list[list[int]]:
    """Draw the lengths of all batches together and deal them out in order, so that rare lengths are in some only."""
    lengths = np.array(draw_lengths(recipe, batches * BATCH_TOKENS, 0, longest_tokens=longest_tokens))
    numbers = np.minimum((np.cumsum(lengths) - 1) // BATCH_TOKENS, batches - 1)
    return [part.tolist() for part in np.split(lengths, np.flatnonzero(np.diff(numbers)) + 1)]


if __name__ == "__main__":
    main()
