"""ByteScale's published evaluation beside the same rows simulated: nothing here is measured.

    python benchmarks/bytescale_evaluation.py [--models llama-7b,...] [--contexts 256K,...] [--rows FILE] [--out PAGE]

Published (arXiv 2502.21231): speed-ups of ByteScale over a static mesh at 2M tokens on GitHub lengths, "up to 4.26x" on
Byted, and an ablation of 7B on Byted at 2M on 1,024 GPUs. Simulated: `bytescale` over `static` here, step times summed
over batches of 32M tokens that are cut from one draw of all of them: a 2M sequence is in one batch of some, not in all.
Hardware `bytescale-gpu`. Not published with them, so ours: the mesh (1,024 ranks of 1 to 8 tensor-parallel devices, for
8x22B 768 of 8 x 2 stages), the 8,192 tokens that a rank holds, and the network, which is that of h100 nodes. Other
assumptions: --capacity, --tensor (devices of a rank, for all models) and --link (bytes/s), with a --rows file of their
own.

What planners may choose: `ring` (plain rings, no offload), `heads` (every ring splits heads if that is quicker),
`auto` (that, and offload where a rank holds more than its capacity). `offload` (without heads) is there for the
ablation. --rows keeps what is done, a line for each planner, so that a run can be taken up again; lines hold the
seconds of every batch, tables are made from them. --out writes them between the marks of a page.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import cache
from itertools import product
from pathlib import Path

import numpy as np

from bytescale_report import PLANNERS, Key, Row, report
from lengthwise.core.shape import Cluster, ModelShape
from lengthwise.core.sizes import parse_tokens
from lengthwise.cost import Cost, Hardware, all_terms_cost, named_hardware, named_shape
from lengthwise.data.recipes import draw_lengths
from lengthwise.planner import PlanOptions, plan_step
from lengthwise.simulator import loading_seconds, simulate_plan
from pages import Findings, add_out

MESHES = {  # model: ranks, tensor parallel devices, pipeline stages; GPUs as published, the split of them ours
    "llama-7b": (1024, 1, 1),
    "llama-13b": (1024, 2, 1),
    "llama-30b": (1024, 4, 1),
    "llama-70b": (1024, 8, 1),
    "mixtral-8x7b": (1024, 8, 1),
    "mixtral-8x22b": (768, 8, 2),
}
CHOICES = {
    "ring": {},
    "heads": {"heads": "auto"},
    "auto": {"offload": "auto", "heads": "auto"},
    "offload": {"offload": "auto"},
}
ABLATION = ("llama-7b", "byted", "2M")
BATCH_TOKENS = 32 * 2**20
BATCHES = {"2M": 4}  # of other contexts: 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Assumed:
    """What was not published; `tensor` and `link_bytes_per_second` take the place of those of mesh and hardware."""

    hardware: str
    capacity: int
    tensor: int | None
    link_bytes_per_second: float | None


def main() -> None:
    """Simulate all rows, print the tables and write them to --out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MESHES))
    parser.add_argument("--recipes", default="github,byted")
    parser.add_argument("--contexts", default="256K,512K,1M,2M")
    parser.add_argument("--choices", default="ring,heads,auto,offload")
    parser.add_argument("--planners", default=",".join(PLANNERS))
    parser.add_argument("--hardware", default="bytescale-gpu")
    parser.add_argument("--rows", type=Path, default=Path("runs/bytescale_evaluation.jsonl"))
    parser.add_argument("--capacity", default="8K", help="tokens that a rank holds")
    parser.add_argument("--tensor", type=int, help="tensor-parallel devices of a rank, of as many GPUs in all")
    parser.add_argument("--link", type=float, help="bytes a second of a link between nodes")
    add_out(parser, "bytescale_evaluation")
    arguments = parser.parse_args()
    assumed = Assumed(
        hardware=arguments.hardware,
        capacity=parse_tokens(arguments.capacity, "--capacity"),
        tensor=arguments.tensor,
        link_bytes_per_second=arguments.link,
    )
    arguments.rows.parent.mkdir(parents=True, exist_ok=True)
    lines = arguments.rows.read_text().splitlines() if arguments.rows.exists() else []
    known = {row.key: row for row in (Row.from_json(json.loads(line)) for line in lines)}
    for key in asked_rows(arguments):
        if key in known:
            continue
        known[key] = simulate_row(key, assumed)
        with arguments.rows.open("a") as file:
            file.write(json.dumps(asdict(known[key])) + "\n")
        print(*key, f"{np.mean(known[key].seconds):.3f} s", flush=True)
    places = {name: place for place, name in enumerate((*MESHES, "github", "byted", "256K", "512K", "1M", "2M"))}
    ordered = sorted(known.values(), key=lambda row: [places[name] for name in row.key[:3]])
    settings = dict.fromkeys(row.key[:3] for row in ordered)
    findings = Findings("bytescale_evaluation")
    findings.add(report(ordered, {place: ideal_seconds(*place, assumed) for place in settings}))
    findings.sign("Simulated", f"hardware {assumed.hardware}, rows {arguments.rows}")
    findings.write(arguments.out)


def asked_rows(arguments: argparse.Namespace) -> Iterator[Key]:
    """List what is to be simulated: at contexts below 2M without planners and choices that no table asks for."""
    models, recipes, contexts, choices, planners = (
        getattr(arguments, name).split(",") for name in ("models", "recipes", "contexts", "choices", "planners")
    )
    for model, recipe, context, choice, planner in product(models, recipes, contexts, choices, planners):
        if choice == "offload" and (model, recipe, context) != ABLATION:
            continue
        if context != "2M" and (choice == "heads" or planner in ("single-degree", "bytescale-naive")):
            continue
        yield Key(model, recipe, context, choice, planner)


def cut_batches(recipe: str, batches: int, longest_tokens: int) -> list[list[int]]:
    """Draw the lengths of all batches together and deal them out in order, so that rare lengths are in some only."""
    lengths = np.array(draw_lengths(recipe, batches * BATCH_TOKENS, 0, longest_tokens=longest_tokens))
    numbers = np.minimum((np.cumsum(lengths) - 1) // BATCH_TOKENS, batches - 1)
    return [part.tolist() for part in np.split(lengths, np.flatnonzero(np.diff(numbers)) + 1)]


def simulate_row(key: Key, assumed: Assumed) -> Row:
    """Plan and simulate all batches with one planner."""
    shape, hardware, cost = _described(key.model, assumed)
    ranks, tensor, stages = _mesh(key.model, assumed)
    cluster, longest = Cluster(ranks=ranks, capacity_tokens=assumed.capacity), parse_tokens(key.context, "--contexts")
    seconds, loads, bounds = [], [], []
    for tokens in cut_batches(key.recipe, BATCHES.get(key.context, 2), longest):
        plan = plan_step(
            tokens,
            cluster,
            cost,
            PlanOptions(
                planner=key.planner,
                layers=shape.layers,
                context_tokens=longest if key.planner == "static" else None,
                **CHOICES[key.choice],
            ),
        )
        seconds.append(simulate_plan(plan, cost).step_seconds)
        bounds.append(float(plan.notes["bound_seconds"]) + cost.step_end_seconds(ranks))
        read = {
            loader: loading_seconds(
                plan,
                loader,
                tokens_per_second=hardware.loader_tokens_per_second,
                ranks_per_node=cost.ranks_per_node,
                devices=tensor * stages,
                stages=stages,
                fixed_mesh=key.planner == "static",
            )
            for loader in ("local", "remote")
        }
        loads.append(read)
    return Row(*key, seconds=seconds, bound_seconds=bounds, loads_seconds=loads)


def ideal_seconds(model: str, recipe: str, context: str, assumed: Assumed) -> float:
    """Return the mean seconds of a step if all ranks shared its work evenly, at full speed, with nothing exposed."""
    _, _, cost = _described(model, assumed)
    seconds = [
        cost.quadratic_seconds * float((lengths**2).sum()) + cost.linear_seconds * float(lengths.sum())
        for lengths in map(np.array, cut_batches(recipe, BATCHES.get(context, 2), parse_tokens(context, "--contexts")))
    ]
    return float(np.mean(seconds)) / _mesh(model, assumed)[0]


def _mesh(model: str, assumed: Assumed) -> tuple[int, int, int]:
    """Return ranks, tensor-parallel devices and pipeline stages; other devices a rank leave as many GPUs in all."""
    ranks, tensor, stages = MESHES[model]
    return (ranks * tensor // assumed.tensor, assumed.tensor, stages) if assumed.tensor else (ranks, tensor, stages)


@cache
def _described(model: str, assumed: Assumed) -> tuple[ModelShape, Hardware, Cost]:
    shape, hardware, (_, tensor, stages) = named_shape(model), named_hardware(assumed.hardware), _mesh(model, assumed)
    if link := assumed.link_bytes_per_second:
        uplink = link * hardware.ranks_per_node
        hardware = replace(hardware, link_bytes_per_second=link, node_uplink_bytes_per_second=uplink)
    return shape, hardware, all_terms_cost(shape, hardware, tensor=tensor, stages=stages)


if __name__ == "__main__":
    main()
