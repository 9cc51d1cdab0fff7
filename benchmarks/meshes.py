"""Every planner with the best mesh that a competent user could find for it: all is simulated, nothing measured.

    python benchmarks/meshes.py [--settings 64:256K:4M,...] [--recipes github,prolong] [--planners static,...]
        [--batches 4] [--rows FILE] [--out PAGE]

A setting is GPUs : longest sequence : tokens of a step, of a 7B Llama on H100s; lengths are as of GitHub files and of
ProLong's mix for fine-tuning. `lengthwise.simulator.best_meshes` searches for all planners alike: tensor-parallel
devices and pipeline stages of a rank, recomputation, heads, offload, and how much of what memory leaves a rank may
hold. The first table has the meshes that the engine runs (asked of `lengthwise.program`), the second all. --rows keeps
what is done, a line for each planner, so that a run can be taken up again; --tables-only simulates nothing. A setting
takes two to five minutes of one core.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from itertools import product
from pathlib import Path

from best_tables import Aim, best_tables
from lengthwise.core.sizes import parse_tokens
from lengthwise.data.recipes import draw_lengths
from lengthwise.report.simulation import OURS
from mesh_rows import MeshRow, add_line, mesh_question, read_lines, search, whole_places
from pages import Findings, add_out

MODEL, HARDWARE = "llama-7b", "h100"
SETTINGS = "8:64K:1M,16:64K:2M,32:128K:2M,64:256K:4M,128:512K:4M,256:1M:8M"
RIVALS = ("packed-dp", "static", "single-degree", "power-of-two", "bytescale", OURS)
OTHERS = ("packed-dp", "static")  # that the aim is over
HEADS = ("set", "GPUs", "longest", "step")


def main() -> None:
    """Search what is asked for, print the tables, and write them into a page if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--settings", default=SETTINGS)
    parser.add_argument("--recipes", default="github,prolong")
    parser.add_argument("--planners", default=",".join(RIVALS))
    parser.add_argument("--batches", type=int, default=4)
    parser.add_argument("--rows", type=Path, default=Path("runs/meshes.jsonl"))
    parser.add_argument("--tables-only", action="store_true", help="of the rows that there are")
    add_out(parser, "meshes")
    arguments, findings = parser.parse_args(), Findings("meshes")
    rows = [MeshRow.from_json(line) for line in read_lines(arguments.rows)]
    known = {(row.place, row.planner) for row in rows}
    asked = (arguments.settings, arguments.recipes, arguments.planners)
    for setting, recipe, planner in product(*(each.split(",") for each in asked)):
        place = (recipe, *setting.split(":"))
        if arguments.tables_only or (place, planner) in known:
            continue
        rows.append(_search(place, planner, arguments.batches))
        add_line(arguments.rows, rows[-1])
        print(*place, planner, rows[-1].best and f"{rows[-1].best.mean_seconds:.3f} s", flush=True)
    places = [
        (recipe, *setting.split(":"))
        for recipe, setting in product(arguments.recipes.split(","), arguments.settings.split(","))
    ]
    whole = whole_places(rows, RIVALS)
    shown = [row for place in places for row in whole if row.place == place]
    findings.add(best_tables(shown, HEADS, _aims(places)))
    batches = " or ".join(map(str, sorted({len(row.best.seconds) for row in shown if row.best})))
    findings.sign("Simulated", f"means of {batches} batches; tables of all rows in {arguments.rows}")
    findings.write(arguments.out)


def _aims(places: Sequence[tuple[str, ...]]) -> list[Aim]:
    recipes = dict.fromkeys(place[0] for place in places)
    few = {recipe: [place for place in places if place[0] == recipe and int(place[1]) <= 64] for recipe in recipes}
    return [
        Aim(name=f"{recipe}, 8 to 64 GPUs, over packed-dp and static", places=each, least_gain=1.2, others=OTHERS)
        for recipe, each in few.items()
    ]


def _search(place: Sequence[str], planner: str, batches: int) -> MeshRow:
    recipe, gpus, context, step = place
    longest = parse_tokens(context, "--settings")
    question = mesh_question(MODEL, HARDWARE, devices=int(gpus), longest_tokens=longest)
    tokens = parse_tokens(step, "--settings")
    drawn = [draw_lengths(recipe, tokens, seed, longest_tokens=longest) for seed in range(batches)]
    return search(tuple(place), planner, drawn, question)


if __name__ == "__main__":
    main()
