"""Rows of `bytescale_evaluation.py` as tables: published beside simulated, and what each planner leaves."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import numpy as np

from lengthwise.simulator import waits_seconds

PLANNERS = ("static", "single-degree", "power-of-two", "bytescale-naive", "bytescale", "lengthwise")
SHOWN = ("ring", "heads", "auto")
PUBLISHED_GITHUB_2M = {
    "llama-7b": (7.89, 7.89),
    "llama-13b": (6.88, 6.88),
    "llama-30b": (6.21, 6.21),
    "llama-70b": (4.28, 4.28),
    "mixtral-8x22b": (3.4, 4.1),
}
PUBLISHED_BYTED_MOST, WITHIN = 4.26, 0.2
ABLATION = (  # name, published, choice, planner, loader of the row; static has the local loader too
    ("static", 1.0, "ring", "static", "local"),
    ("+ dynamic communication (bytescale-naive)", 1.59, "ring", "bytescale-naive", "local"),
    ("+ offload", 2.01, "offload", "bytescale-naive", "local"),
    ("+ balance (bytescale)", 3.69, "offload", "bytescale", "local"),
    ("+ remote loader", 3.89, "offload", "bytescale", "remote"),
    ("lengthwise in its place, with offload", None, "offload", "lengthwise", "remote"),
)


class Key(NamedTuple):
    """What a row is of."""

    model: str
    recipe: str
    context: str
    choice: str
    planner: str


@dataclass(frozen=True, slots=True)
class Row:
    """One planner on all batches of a model, data set and context; entry i of the lists is of batch i.

    seconds: of the step, data being there. bound_seconds: what no plan can be faster than, the step's end included.
    loads_seconds: of the busiest node, for each loader.
    """

    model: str
    recipe: str
    context: str
    choice: str
    planner: str
    seconds: list[float]
    bound_seconds: list[float]
    loads_seconds: list[dict[str, float]]

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> Row:
        """Read a line of the file of rows; keys of older versions are left out."""
        return cls(**{field.name: raw[field.name] for field in fields(cls)})

    @property
    def key(self) -> Key:
        """What tells it from other rows."""
        return Key(self.model, self.recipe, self.context, self.choice, self.planner)

    @property
    def mean_seconds(self) -> float:
        """Of a step."""
        return float(np.mean(self.seconds))

    def loaded_seconds(self, loader: str) -> float:
        """Mean step with a loader that reads one step ahead."""
        waits = waits_seconds([each[loader] for each in self.loads_seconds], self.seconds)
        return self.mean_seconds + float(np.mean(waits))


Rows = dict[Key, Row]


Place = tuple[str, str, str]  # model, data set, context


def report(rows: Sequence[Row], ideal_seconds: Mapping[Place, float]) -> list[str]:
    """Write the tables as lines of Markdown; `ideal_seconds` of each model, data set and context."""
    by_key = {row.key: row for row in rows}
    places = list(dict.fromkeys(row.key[:3] for row in rows))
    return [
        *_published_table(by_key),
        *_ablation_table(by_key),
        *_gain_table(by_key),
        *_ideal_table(by_key, ideal_seconds),
        *_context_table(by_key, places),
        *_full_table(by_key, places),
    ]


def _table(title: str, heads: Sequence[str], lines: Iterable[Sequence[str]]) -> list[str]:
    body = [f"| {' | '.join(cells)} |" for cells in lines]
    if not body:
        return []
    return [f"## {title}", "", f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}", *body, ""]


def _ratio(rows: Rows, place: Sequence[str], choice: str, over: str, planner: str) -> float:
    """How many times faster `planner` is than `over`; NaN where one of the two was not simulated."""
    slow, fast = (rows.get(Key(*place, choice, name)) for name in (over, planner))  # type: ignore[call-arg]
    return slow.mean_seconds / fast.mean_seconds if slow and fast else float("nan")


def _shown(value: float, form: str = "{:.2f}x") -> str:
    return "-" if np.isnan(value) else form.format(value)


def _published_table(rows: Rows) -> list[str]:
    lines = []
    for model, (low, high) in PUBLISHED_GITHUB_2M.items():
        cells = [model, f"{low:.2f}x" if low == high else f"{low:.1f}x to {high:.1f}x"]
        for choice in SHOWN:
            ratio = _ratio(rows, (model, "github", "2M"), choice, "static", "bytescale")
            hit = low * (1 - WITHIN) <= ratio <= high * (1 + WITHIN)
            cells += [_shown(ratio), "-" if np.isnan(ratio) else "yes" if hit else "**no**"]
        lines.append(cells)
    heads = ["model", "published", *(cell for choice in SHOWN for cell in (choice, "within 20 %"))]
    table = _table("bytescale over static, GitHub at 2M, beside the published speed-ups", heads, lines)
    most = {
        choice: np.nanmax([_ratio(rows, key[:3], choice, "static", "bytescale") for key in keys])
        for choice in SHOWN
        if (keys := [key for key in rows if (key.recipe, key.choice) == ("byted", choice)])
    }
    best = ", ".join(f"{choice} {ratio:.2f}x" for choice, ratio in most.items())
    return [*table, f"Byted: published up to {PUBLISHED_BYTED_MOST}x; the most here: {best}.", ""] if best else table


def _ablation_table(rows: Rows) -> list[str]:
    place, lines = ("llama-7b", "byted", "2M"), []
    base = rows.get(Key(*place, "ring", "static"))
    for name, published, choice, planner, loader in ABLATION:
        row = rows.get(Key(*place, choice, planner))
        if base is None or row is None:
            continue
        there = base.mean_seconds / row.mean_seconds
        loaded = base.loaded_seconds("local") / row.loaded_seconds(loader)
        steps = f"{row.mean_seconds:.2f} s"
        lines.append(
            [name, "-" if published is None else f"{published:.2f}x", steps, f"{there:.2f}x", f"{loaded:.2f}x"]
        )
    heads = ["step", "published", "step time", "data is there", "with loaders: local, remote in the last two"]
    return _table("Ablation: 7B, Byted, 2M, 1,024 GPUs, plain rings", heads, lines)


def _gain_table(rows: Rows) -> list[str]:
    """What lengthwise gains at 2M, and the mean of the models."""
    lines: list[list[str]] = []
    for recipe in ("github", "byted"):
        models = dict.fromkeys(key.model for key in rows if (key.recipe, key.context) == (recipe, "2M"))
        ratios = [
            [_ratio(rows, (model, recipe, "2M"), choice, over, "lengthwise") for over, choice in _OVERS]
            for model in models
        ]
        lines += [[recipe, model, *map(_shown, row)] for model, row in zip(models, ratios, strict=True)]
        if ratios:
            lines.append([recipe, "**mean**", *(f"**{_shown(value)}**" for value in np.mean(ratios, axis=0))])
    heads = ["set", "model", *(f"over {over}, {choice}" for over, choice in _OVERS)]
    return _table("lengthwise over bytescale (aim: 1.15x, more on Byted) and over single-degree, at 2M", heads, lines)


_OVERS = [(over, choice) for over in ("bytescale", "single-degree") for choice in SHOWN]


def _ideal_table(rows: Rows, ideal_seconds: Mapping[Place, float]) -> list[str]:
    lines = []
    for place, ideal in ideal_seconds.items():
        shares = [
            ideal / row.mean_seconds if row else float("nan") for row in (rows.get(Key(*place, *of)) for of in _IDEALS)
        ]
        lines.append([*place, *(_shown(share, "{:.3f}") for share in shares)])
    heads = ["model", "set", "context", *(f"{planner}, {choice}" for choice, planner in _IDEALS)]
    title = "Ideal seconds of the same lengths (all work at full speed, evenly, nothing exposed) over step seconds"
    return _table(title, heads, lines)


_IDEALS = (("ring", "static"), ("ring", "bytescale"), ("ring", "lengthwise"), ("auto", "lengthwise"))


def _context_table(rows: Rows, places: Sequence[Sequence[str]]) -> list[str]:
    """How much longer a step takes from each context to its double."""
    lines = []
    for model, recipe, context in places:
        doubled = {"256K": "512K", "512K": "1M", "1M": "2M"}.get(context)
        pairs = [
            (rows.get(Key(model, recipe, context, choice, name)), rows.get(Key(model, recipe, doubled, choice, name)))
            for choice, name in _DOUBLED
            if doubled
        ]
        ratios = [long.mean_seconds / short.mean_seconds if short and long else float("nan") for short, long in pairs]
        if ratios:
            lines.append([model, recipe, f"{context} to {doubled}", *map(_shown, ratios)])
    heads = ["model", "set", "contexts", *(f"{name}, {choice}" for choice, name in _DOUBLED)]
    return _table("Step time when the context doubles (published: static 2x, ByteScale 1.08x)", heads, lines)


_DOUBLED = [(choice, name) for choice in ("ring", "auto") for name in ("static", "bytescale", "lengthwise")]


def _full_table(rows: Rows, places: Sequence[Sequence[str]]) -> list[str]:
    lines = []
    for place in places:
        cells = []
        for name in PLANNERS:
            found = [rows.get(Key(*place, choice, name)) for choice in SHOWN]  # type: ignore[call-arg]
            cells.append(" / ".join("-" if row is None else f"{row.mean_seconds:.2f}" for row in found))
        some = next(row for key, row in rows.items() if key[:3] == place)
        lines.append([*place, str(len(some.seconds)), *cells])
    heads = ["model", "set", "context", "batches", *PLANNERS]
    return _table(f"Every row: seconds of a step, {' / '.join(SHOWN)}", heads, lines)
