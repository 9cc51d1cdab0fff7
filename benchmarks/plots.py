"""The pictures of the documentation, as SVG: drawn from the tables of its pages, so that no figure is written twice.

    python benchmarks/plots.py [--folder docs/pictures]

    step      32 ranks over one step: docs/pictures/step.json, which commit cc71423 makes from traces of `simulate`
    tail      what share of sequences, tokens and attention is in sequences of each length; drawn from `github`
    meshes    planners, each with its best mesh  (docs/benchmarks/meshes.md)

Grey levels carry the meaning, so that prints and readers without colour lose nothing; the paper is white in
light and dark themes alike. A test draws them again and compares.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

import numpy as np

from lengthwise.data.recipes import draw_lengths
from lengthwise.planner import PLANNERS
from pages import FOLDER, table_rows

PICTURES = FOLDER.parent / "pictures"
DARK, MIDDLE, LIGHT, FAINT, INK = "#1f3b57", "#5f8fb8", "#b9d3e8", "#e9eef2", "#24292f"
FONT = "font-family:Helvetica,Arial,'DejaVu Sans',sans-serif"
SHOWN_RANKS = 32


@dataclass(slots=True)
class Sheet:
    """An SVG under construction: a white sheet of `width` x `height` and what is drawn on it, in pixels."""

    width: float
    height: float
    title: str
    parts: list[str] = field(default_factory=list)

    def text(
        self, x: float, y: float, words: str, *, size: float = 12, anchor: str = "start", bold: bool = False
    ) -> None:
        weight = ' font-weight="bold"' if bold else ""
        self.parts.append(
            f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size:g}" text-anchor="{anchor}"{weight}>{escape(words)}</text>'
        )

    def box(self, x: float, y: float, width: float, height: float, fill: str, *, line: str = "none") -> None:
        self.parts.append(
            f'<rect x="{x:.2f}" y="{y:.2f}" width="{width:.2f}" height="{height:.2f}" fill="{fill}" stroke="{line}"/>'
        )

    def line(self, x: float, y: float, to_x: float, to_y: float, *, ink: str = "#c4cad0", dashed: bool = False) -> None:
        dash = ' stroke-dasharray="4 3"' if dashed else ""
        self.parts.append(f'<line x1="{x:.1f}" y1="{y:.1f}" x2="{to_x:.1f}" y2="{to_y:.1f}" stroke="{ink}"{dash}/>')

    def cut(self, x: float, top: float, height: float) -> None:
        """Draw the mark of a bar that is longer than it is drawn: a slanted gap in it at `x`."""
        below = top + height
        corners = [(x + 3, top - 1), (x + 8, top - 1), (x + 1, below + 1), (x - 4, below + 1)]
        points = " ".join(f"{at:.1f},{y:.1f}" for at, y in corners)
        self.parts.append(f'<polygon points="{points}" fill="white"/>')
        for start, end in ((corners[0], corners[3]), (corners[1], corners[2])):
            self.line(*start, *end, ink="#5c656d")

    def svg(self) -> str:
        """Return the file."""
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width:g} {self.height:g}" role="img" '
            f'aria-label="{escape(self.title)}" style="{FONT}" fill="{INK}">\n<title>{escape(self.title)}</title>\n'
            f'<rect width="{self.width:g}" height="{self.height:g}" rx="6" fill="white"/>\n'
            + "\n".join(self.parts)
            + "\n</svg>\n"
        )


def legend(sheet: Sheet, x: float, y: float, names: Sequence[tuple[str, str]]) -> None:
    """Draw a row of filled boxes and their names."""
    for fill, name in names:
        sheet.box(x, y - 9, 12, 10, fill, line="#8a939b")
        sheet.text(x + 17, y, name, size=11)
        x += 30 + 6.2 * len(name)


def step() -> str:
    """Draw ranks over time for two planners, one above the other on one time axis."""
    drawn = json.loads((PICTURES / "step.json").read_text(encoding="utf-8"))
    most = max(each["seconds"] for each in drawn["planners"])
    left, width, row, gap = 92, 680, 4.6, 50
    panel = row * SHOWN_RANKS
    sheet = Sheet(800, 56 + len(drawn["planners"]) * (panel + gap), drawn["title"])
    sheet.text(16, 24, drawn["title"], size=14, bold=True)
    kinds = ("sequences over many GPUs", "short sequences on one GPU", "waiting for transfers or other GPUs")
    legend(sheet, 16, 46, list(zip((DARK, LIGHT, "white"), kinds, strict=True)))
    for number, each in enumerate(drawn["planners"]):
        top = 82 + number * (panel + gap)
        sheet.text(left, top - 7, each["name"], size=12, bold=True)
        sheet.text(left - 8, top + 12, f"{SHOWN_RANKS} of the", size=11, anchor="end")
        sheet.text(left - 8, top + 26, "128 GPUs", size=11, anchor="end")
        sheet.box(left, top, width * each["seconds"] / most, panel, "white", line="#8a939b")
        for rank, spans in enumerate(each["ranks"]):
            for start, compute, degree in spans:
                fill = DARK if degree > 1 else LIGHT
                sheet.box(left + width * start / most, top + rank * row, width * compute / most, row - 0.6, fill)
        end = left + width * each["seconds"] / most
        sheet.line(end, top - 4, end, top + panel + 4, ink=INK)
        sheet.text(end, top + panel + 18, f"{each['seconds']:.1f} s", size=12, anchor="end", bold=True)
    return sheet.svg()


def tail() -> str:
    """Draw shares of sequences, tokens and attention's work by length, for lengths of GitHub files."""
    lengths = np.array(draw_lengths("github", 2**26, 0, longest_tokens=2**21), dtype=float)
    borders = [0, 2**10, 2**12, 2**14, 2**16, 2**18, 2**21]
    names = ["< 1K", "1K - 4K", "4K - 16K", "16K - 64K", "64K - 256K", "256K - 2M"]
    weights = {"sequences": lengths**0, "tokens": lengths, "attention": lengths**2}
    shares = {name: np.histogram(lengths, borders, weights=each)[0] / each.sum() for name, each in weights.items()}
    sheet = Sheet(760, 270, "Share of sequences, tokens and attention work by length of a sequence")
    sheet.text(16, 24, "Few sequences hold most of the work: lengths of GitHub files, in tokens", size=14, bold=True)
    legend(sheet, 16, 46, [(LIGHT, "of all sequences"), (MIDDLE, "of all tokens"), (DARK, "of all attention work")])
    for number, name in enumerate(names):
        x = 40 + number * 118
        for place, (fill, values) in enumerate(zip((LIGHT, MIDDLE, DARK), shares.values(), strict=True)):
            height = 150 * float(values[number])
            sheet.box(x + place * 30, 226 - height, 27, height, fill, line="#8a939b")
            percent = f"{100 * values[number]:.0f} %" if values[number] >= 0.005 else "< 1 %"
            sheet.text(x + place * 30 + 13, 221 - height, percent, size=9.5, anchor="middle")
        sheet.text(x + 44, 246, name, size=12, anchor="middle")
    sheet.line(30, 226, 740, 226, ink=INK)
    return sheet.svg()


def meshes() -> str:
    """Draw, for each setting, the best mesh of every planner over what `lengthwise` ends at today."""
    page, words = FOLDER / "meshes.md", ("set", "GPUs", "longest", "step")
    today = table_rows(page, heading="What the engine runs today")
    best = table_rows(page, heading="Best of all meshes")
    shown = [
        (row, float(ours["lengthwise"])) for row, ours in zip(best, today, strict=True) if ours["lengthwise"] != "-"
    ]
    names = [name for name in best[0] if name not in words and name in PLANNERS]
    fills = dict(zip(names, ("white", FAINT, "#d0dae2", LIGHT, MIDDLE, DARK), strict=True))
    per_column = -(-len(shown) // 2)
    sheet = Sheet(760, 90 + (18 * len(names) + 4) * per_column, "Step seconds of each planner with its best mesh")
    sheet.text(16, 24, "Step time of each planner with its best of all meshes (simulated);", size=14, bold=True)
    sheet.text(16, 42, "1: what Lengthwise trains today, without tensor parallelism or pipelines", size=14, bold=True)
    legend(sheet, 16, 64, [(fills[name], name) for name in names])
    most = 2.0  # a bar that would be longer is cut there, with a mark; its figure says how long
    sheet.cut(590, 55, 10)
    sheet.text(604, 64, "cut: longer than drawn", size=11)
    for number, (row, ours) in enumerate(shown):
        x, y = 130 + 370 * (number // per_column), 84 + (18 * len(names) + 4) * (number % per_column)
        sheet.text(x - 8, y + 22, f"{row['set']}", size=11, anchor="end", bold=True)
        sheet.text(x - 8, y + 38, f"{row['GPUs']} GPUs, {row['longest']}", size=11, anchor="end")
        for place, name in enumerate(names):
            top, ratio = y + 16 * place, float(row[name]) / ours if row[name] != "-" else 0.0
            width = 190 * min(ratio, most) / most
            sheet.box(x, top, width, 14, fills[name], line="#5c656d")
            if ratio > most:
                sheet.cut(x + width - 14, top, 14)
            sheet.text(x + width + 5, top + 11, f"{ratio:.2f}" if ratio else "does not fit", size=9.5)
        sheet.line(x + 190 / most, y - 3, x + 190 / most, y + 16 * len(names) + 2, ink=INK, dashed=True)
    return sheet.svg()


CHARTS: dict[str, Callable[[], str]] = {"step": step, "tail": tail, "meshes": meshes}


def main() -> None:
    """Draw all pictures into a folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=PICTURES)
    arguments = parser.parse_args()
    for name, draw in CHARTS.items():
        (arguments.folder / f"{name}.svg").write_text(draw(), encoding="utf-8")
        print(arguments.folder / f"{name}.svg")


if __name__ == "__main__":
    main()
