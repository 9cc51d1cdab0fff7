"""ByteScale's published evaluation beside the same rows simulated: nothing here is measured.

    python benchmarks/bytescale_evaluation.py [--models llama-7b,...] [--contexts 256K,...] [--rows FILE] [--out FILE]

Published (arXiv 2502.21231): speed-ups of ByteScale over a static mesh at 2M tokens on GitHub lengths, "up to 4.26x" on
Byted, and an ablation of 7B on Byted at 2M on 1,024 GPUs. Simulated: `bytescale` over `static` here, step times summed
over batches of 32M tokens that are cut from one draw of all of them: a 2M sequence is in one batch of some, not in all.
Hardware `bytescale-gpu`. Not published with them, so ours: the mesh (1,024 ranks of 1 to 8 tensor-parallel devices, for
8x22B 768 of 8 x 2 stages), the 8,192 tokens that a rank holds, and the network, which is that of h100 nodes. Two
exchanges, each the same for all planners: `ring`, and `split`, where every ring splits heads if that is quicker
(`planner.split_heads`). No planner here offloads. --rows keeps finished rows, so that a run can be taken up again.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path

import numpy as np

from lengthwise.cli.machine import machine_lines
from lengthwise.core.shape import Cluster
from lengthwise.core.sizes import parse_tokens
from lengthwise.cost import all_terms_cost, named_hardware, named_shape
from lengthwise.planner import RECIPES, draw_lengths, plan_step, split_heads
from lengthwise.simulator import simulate_plan

PLANNERS = ("static", "single-degree", "bytescale-naive", "bytescale", "lengthwise")
MESHES = {  # model: ranks, tensor parallel devices, pipeline stages; GPUs as published, the split of them ours
    "llama-7b": (1024, 1, 1),
    "llama-13b": (1024, 2, 1),
    "llama-30b": (1024, 4, 1),
    "llama-70b": (1024, 8, 1),
    "mixtral-8x7b": (1024, 8, 1),
    "mixtral-8x22b": (768, 8, 2),
}
PUBLISHED_GITHUB_2M = {
    "llama-7b": (7.89, 7.89),
    "llama-13b": (6.88, 6.88),
    "llama-30b": (6.21, 6.21),
    "llama-70b": (4.28, 4.28),
    "mixtral-8x22b": (3.4, 4.1),
}
PUBLISHED_ABLATION = (("static", 1.0), ("bytescale-naive", 1.59), ("+ offload", 2.01), ("bytescale", 3.69))
BATCH_TOKENS, CAPACITY, WITHIN = 32 * 2**20, 8192, 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Mean step seconds of every planner for one model, data set and context; `ring` and `split` exchanges."""

    model: str
    recipe: str
    context: str
    batches: int
    ring: dict[str, float]
    split: dict[str, float]

    def speedup(self, over: str, planner: str, *, split: bool) -> float:
        """How many times faster `planner` is than `over`."""
        seconds = self.split if split else self.ring
        return seconds[over] / seconds[planner]


def main() -> None:
    """Simulate all rows, print the tables and write them to --out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MESHES))
    parser.add_argument("--recipes", default="github,byted")
    parser.add_argument("--contexts", default="256K,512K,1M,2M")
    parser.add_argument("--hardware", default="bytescale-gpu")
    parser.add_argument("--batches", type=int, default=4)
    parser.add_argument("--planners", default=",".join(PLANNERS))
    parser.add_argument("--rows", type=Path, default=Path("runs/bytescale_evaluation.jsonl"))
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    arguments.rows.parent.mkdir(parents=True, exist_ok=True)
    known = (
        [Row(**json.loads(line)) for line in arguments.rows.read_text().splitlines()] if arguments.rows.exists() else []
    )
    done = {(row.model, row.recipe, row.context) for row in known}
    for model, recipe, context in product(
        *(each.split(",") for each in (arguments.models, arguments.recipes, arguments.contexts))
    ):
        if (model, recipe, context) in done:
            continue
        row = simulate_row(model, recipe, context, arguments.hardware, arguments.planners.split(","), arguments.batches)
        known.append(row)
        with arguments.rows.open("a") as file:
            file.write(json.dumps(asdict(row)) + "\n")
    order = {key: place for place, key in enumerate(product(MESHES, RECIPES, ("256K", "512K", "1M", "2M")))}
    text = report(sorted(known, key=lambda row: order[row.model, row.recipe, row.context]), arguments.hardware)
    print(text)
    if arguments.out:
        arguments.out.write_text(text, encoding="utf-8")


def cut_batches(recipe: str, batches: int, longest_tokens: int) -> list[list[int]]:
    """Draw the lengths of all batches together and deal them out in order, so that rare lengths are in some only."""
    lengths = np.array(draw_lengths(recipe, batches * BATCH_TOKENS, 0, longest_tokens=longest_tokens))
    numbers = np.minimum((np.cumsum(lengths) - 1) // BATCH_TOKENS, batches - 1)
    return [part.tolist() for part in np.split(lengths, np.flatnonzero(np.diff(numbers)) + 1)]


def simulate_row(model: str, recipe: str, context: str, hardware: str, planners: Sequence[str], batches: int) -> Row:
    """Plan and simulate all batches with every planner."""
    ranks, tensor, stages = MESHES[model]
    shape, longest = named_shape(model), parse_tokens(context, "--contexts")
    cost = all_terms_cost(shape, named_hardware(hardware), tensor=tensor, stages=stages)
    cluster = Cluster(ranks=ranks, capacity_tokens=CAPACITY)
    dealt = cut_batches(recipe, batches, longest)
    ring, split = dict.fromkeys(planners, 0.0), dict.fromkeys(planners, 0.0)
    for planner, tokens in product(planners, dealt):
        fixed = longest if planner == "static" else None
        plan = plan_step(tokens, cluster, cost, planner=planner, layers=shape.layers, context_tokens=fixed)
        ring[planner] += simulate_plan(plan, cost).step_seconds / batches
        split[planner] += simulate_plan(split_heads(plan, cost), cost).step_seconds / batches
    return Row(model=model, recipe=recipe, context=context, batches=batches, ring=ring, split=split)


def report(rows: Sequence[Row], hardware: str) -> str:
    """Write the tables as Markdown."""
    about = (__doc__ or "").split("\n\n", 2)[2].strip()
    return "\n".join(
        [
            "# ByteScale's evaluation, simulated",
            "",
            f"Made by `python benchmarks/bytescale_evaluation.py`, hardware `{hardware}`, on:",
            "",
            *(f"- {line}" for line in machine_lines()[1:]),
            "",
            about,
            "",
            *_published_table(rows),
            *_ablation_table(rows),
            *_context_table(rows),
            *_full_table(rows),
            "",
        ]
    )


def _published_table(rows: Sequence[Row]) -> list[str]:
    lines = [
        "## bytescale over static, GitHub at 2M, beside the published speed-ups", "",
        "| model | published | ring | within 20 % | split heads | within 20 % |", "|---|---|---|---|---|---|",
    ]  # fmt: skip
    for row in rows:
        if row.context != "2M" or row.recipe != "github" or row.model not in PUBLISHED_GITHUB_2M:
            continue
        low, high = PUBLISHED_GITHUB_2M[row.model]
        told = f"{low:.2f}x" if low == high else f"{low:.1f}x to {high:.1f}x"
        cells = []
        for split in (False, True):
            ratio = row.speedup("static", "bytescale", split=split)
            hit = low * (1 - WITHIN) <= ratio <= high * (1 + WITHIN)
            cells += [f"{ratio:.2f}x", "yes" if hit else "no"]
        lines.append(f"| {row.model} | {told} | {' | '.join(cells)} |")
    best = [row.speedup("static", "bytescale", split=False) for row in rows if row.recipe == "byted"]
    if best:
        lines += ["", f"Byted: published up to 4.26x; the most here, ring: {max(best):.2f}x."]
    return [*lines, ""]


def _ablation_table(rows: Sequence[Row]) -> list[str]:
    chosen = [row for row in rows if (row.model, row.recipe, row.context) == ("llama-7b", "byted", "2M")]
    if not chosen:
        return []
    lines = [
        "## Ablation: 7B, Byted, 2M, 1,024 GPUs",
        "",
        "| step | published | ring | split heads |",
        "|---|---|---|---|",
    ]
    for name, published in PUBLISHED_ABLATION:
        ratios = [
            f"{chosen[0].speedup('static', name, split=split):.2f}x" if name in chosen[0].ring else "not simulated"
            for split in (False, True)
        ]
        lines.append(f"| {name} | {published:.2f}x | {' | '.join(ratios)} |")
    ours = [f"{chosen[0].speedup('static', 'lengthwise', split=split):.2f}x" for split in (False, True)]
    return [
        *lines,
        "| + remote loader | 3.89x | not simulated | not simulated |",
        f"| lengthwise | - | {' | '.join(ours)} |",
        "",
    ]


def _context_table(rows: Sequence[Row]) -> list[str]:
    """How much longer a step takes from each context to its double: published 2x for static, 1.08x for ByteScale."""
    lines = [
        "## Step time when the context doubles (published: static 2x, ByteScale 1.08x)", "",
        "| model | set | contexts | static | bytescale | lengthwise |", "|---|---|---|---|---|---|",
    ]  # fmt: skip
    by_key = {(row.model, row.recipe, row.context): row for row in rows}
    for (model, recipe, context), row in by_key.items():
        doubled = by_key.get((model, recipe, {"256K": "512K", "512K": "1M", "1M": "2M"}.get(context, "")))
        if doubled is None:
            continue
        ratios = " | ".join(
            f"{doubled.ring[name] / row.ring[name]:.2f}x" for name in ("static", "bytescale", "lengthwise")
        )
        lines.append(f"| {model} | {recipe} | {context} to {doubled.context} | {ratios} |")
    return [*lines, ""] if len(lines) > 4 else []


def _full_table(rows: Sequence[Row]) -> list[str]:
    lines = [
        "## Every row: seconds of a step, ring / split heads, and what lengthwise gains", "",
        f"| model | set | context | batches | {' | '.join(PLANNERS)} | over bytescale | over single-degree |",
        f"|{'---|' * (6 + len(PLANNERS))}",
    ]  # fmt: skip
    for row in rows:
        cells = [f"{row.ring[name]:.2f} / {row.split[name]:.2f}" if name in row.ring else "-" for name in PLANNERS]
        for over in ("bytescale", "single-degree"):
            both = [row.speedup(over, "lengthwise", split=split) for split in (False, True) if over in row.ring]
            cells.append(" / ".join(f"{ratio:.2f}x" for ratio in both) or "-")
        lines.append(f"| {row.model} | {row.recipe} | {row.context} | {row.batches} | {' | '.join(cells)} |")
    for recipe in dict.fromkeys(row.recipe for row in rows):
        at_2m = [row for row in rows if row.context == "2M" and row.recipe == recipe]
        for over in ("bytescale", "single-degree"):
            both = [
                sum(row.speedup(over, "lengthwise", split=split) for row in at_2m) / len(at_2m)
                for split in (False, True)
                if at_2m and all(over in row.ring for row in at_2m)
            ]
            if both:
                told = " / ".join(f"{ratio:.3f}x" for ratio in both)
                lines += [
                    "",
                    f"{recipe} at 2M, mean of models, lengthwise over {over}: {told} (aim over bytescale: 1.15x).",
                ]
    return lines


if __name__ == "__main__":
    main()
