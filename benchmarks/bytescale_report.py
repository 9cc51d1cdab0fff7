"""Rows of `bytescale_evaluation.py` as tables: every planner at its best first, then published beside simulated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from best_tables import Aim, best_tables, table
from lengthwise.report.simulation import OURS
from mesh_rows import MeshRow, whole_places

RIVALS = {"static", "single-degree", "power-of-two", "bytescale", OURS}
RECIPES: tuple[str, ...] = ("github", "byted")
LEAST_GAINS = {"github": 1.10, "byted": 1.05}  # over the best other plan at 2M, mean of the models
PUBLISHED_GITHUB_2M = {
    "llama-7b": (7.89, 7.89),
    "llama-13b": (6.88, 6.88),
    "llama-30b": (6.21, 6.21),
    "llama-70b": (4.28, 4.28),
    "mixtral-8x22b": (3.4, 4.1),
}
PUBLISHED_BYTED_MOST = 4.26
CASE_STUDY = {
    "static": ("8 min 40 s", 520.0),
    "bytescale-naive": ("4 min 32 s", 272.0),
    "bytescale": ("2 min 37 s", 157.0),
}
ABLATION = {"static": 1.0, "bytescale-naive": 1.59, "bytescale": 3.69}  # of the same; the last with offload


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedRow:
    """One planner with plain rings on one mesh for all, at 2M; entry i of the lists is of batch i.

    tensor: devices of a rank. capacity: tokens of a rank. link: bytes/s between nodes. ideal_seconds: of the batch if
    all ranks shared its arithmetic evenly, at full speed.
    """

    model: str
    recipe: str
    planner: str
    tensor: int
    capacity: str
    link: float
    seconds: list[float] = field(default_factory=list)
    ideal_seconds: list[float] = field(default_factory=list)

    @property
    def key(self) -> tuple[str, str, str, int, str, float]:
        """What tells it from other rows."""
        return (self.model, self.recipe, self.planner, self.tensor, self.capacity, self.link)

    @property
    def mean_seconds(self) -> float:
        """Of a step."""
        return float(np.mean(self.seconds))


Found = Mapping[tuple[str, str, str, int, str, float], PublishedRow]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """What was simulated so far; `default`: capacity and link of the published table, `tensors` of each model."""

    best: list[MeshRow]
    published: list[PublishedRow]
    default: tuple[str, float]
    tensors: Mapping[str, int]


def report(rows: Rows) -> list[str]:
    """Write the tables as lines of Markdown; what was not simulated is left out, or stands as `-`."""
    found = {row.key: row for row in rows.published}
    return [
        "## Every planner at its best: 1,024 H100s",
        "",
        *best_tables(_in_order(rows), ("model", "set", "longest"), _aims(rows)),
        *_not_simulated(rows),
        "## The published comparison, simulated",
        "",
        *_published_table(rows, found),
        *_case_table(rows, found),
        *_surface_tables(rows, found),
    ]


def _in_order(rows: Rows) -> list[MeshRow]:
    """Return the rows of whole places, set by set, models in order."""
    models, recipes = list(rows.tensors), list(RECIPES)
    whole = whole_places(rows.best, RIVALS)
    return sorted(whole, key=lambda row: (row.place[2], recipes.index(row.place[1]), models.index(row.place[0])))


def _not_simulated(rows: Rows) -> list[str]:
    there = {row.place for row in whole_places(rows.best, RIVALS)}
    missing = [
        f"{model} on {recipe}" for recipe in RECIPES for model in rows.tensors if (model, recipe, "2M") not in there
    ]
    return [f"Not simulated with all planners at 2M: {', '.join(missing)}.", ""] if missing else []


def _aims(rows: Rows) -> list[Aim]:
    return [
        Aim(name=f"{recipe} at 2M", places=[(model, recipe, "2M") for model in rows.tensors], least_gain=gain)
        for recipe, gain in LEAST_GAINS.items()
    ]


def _published(rows: Rows, found: Found, model: str, recipe: str, planner: str) -> PublishedRow | None:
    return found.get((model, recipe, planner, rows.tensors[model], *rows.default))


def _published_table(rows: Rows, found: Found) -> list[str]:
    lines = []
    for recipe in RECIPES:
        for model in rows.tensors:
            of = {name: _published(rows, found, model, recipe, name) for name in PUBLISHED_PLANNERS}
            static = of["static"]
            if static is None:
                continue
            low, high = PUBLISHED_GITHUB_2M.get(model, (0.0, 0.0)) if recipe == "github" else (0.0, 0.0)
            published = "-" if not low else f"{low:.2f}x" if low == high else f"{low:.1f}x to {high:.1f}x"
            ratios = [f"{static.mean_seconds / row.mean_seconds:.2f}x" if row else "-" for row in of.values()]
            lines.append([model, recipe, f"TP {static.tensor}", f"{static.mean_seconds:.2f}", published, *ratios[1:]])
    heads = ["model", "set", "mesh of all", "static, s", "published, bytescale", *PUBLISHED_PLANNERS[1:]]
    capacity, link = rows.default
    title = (
        f"static over each planner at 2M, plain rings, {capacity} tokens a rank, {link / 1e9:g} GB/s, `bytescale-gpu`"
    )
    return table(title, heads, lines)


PUBLISHED_PLANNERS = ("static", "single-degree", "power-of-two", "bytescale-naive", "bytescale", OURS)


def _case_table(rows: Rows, found: Found) -> list[str]:
    lines = []
    for planner, (text, seconds) in CASE_STUDY.items():
        row = _published(rows, found, "llama-7b", "byted", planner)
        if row is None:
            continue
        static = _published(rows, found, "llama-7b", "byted", "static") or row
        gains = (CASE_STUDY["static"][1] / seconds, ABLATION[planner], static.mean_seconds / row.mean_seconds)
        ratios = [f"{seconds / row.mean_seconds:.1f}", *(f"{gain:.2f}x" for gain in gains)]
        lines.append([planner, text, f"{row.mean_seconds:.1f} s", *ratios])
    heads = ["planner", "published step", "simulated step", "published over simulated"]
    heads += ["published gain, case study", "published gain, ablation", "simulated gain"]
    return table("Absolute times: the published case study beside 7B, byted, 2M, 1,024 GPUs", heads, lines)


def _surface_tables(rows: Rows, found: Found) -> list[str]:
    surface = [row for row in rows.published if row.model == "llama-7b"]
    lines = []
    for recipe in RECIPES:
        links = sorted({row.link for row in surface if row.recipe == recipe})
        capacities = sorted({row.capacity for row in surface}, key=lambda text: int(text.removesuffix("K")))
        for tensor in sorted({row.tensor for row in surface}):
            for capacity in capacities:
                cells = [_surface_cell(found, recipe, tensor, capacity, link) for link in links]
                if any(cell != "-" for cell in cells):
                    lines.append([recipe, f"TP {tensor}", capacity, *cells])
    heads = [
        "set",
        "mesh of both",
        "tokens of a rank",
        *(f"{link / 1e9:g} GB/s" for link in sorted({row.link for row in surface})),
    ]
    return table("static over bytescale: 7B at 2M on 1,024 GPUs, by what was not published", heads, lines)


def _surface_cell(found: Found, recipe: str, tensor: int, capacity: str, link: float) -> str:
    pair = [found.get(("llama-7b", recipe, name, tensor, capacity, link)) for name in ("static", "bytescale")]
    if pair[0] is None or pair[1] is None:
        return "-"
    return f"{pair[0].mean_seconds / pair[1].mean_seconds:.2f}"
