"""The pictures of the documentation, as SVG: drawn from the tables of its pages, so that no figure is written twice.

    python benchmarks/plots.py [--folder docs/pictures]

    step      32 ranks over one step: docs/pictures/step.json, which commit cc71423 makes from traces of `simulate`
    tail      what share of sequences, tokens and attention is in sequences of each length; drawn from `github`

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
from pages import FOLDER

PICTURES = FOLDER.parent / "pictures"
DARK, MIDDLE, LIGHT, INK = "#1f3b57", "#5f8fb8", "#b9d3e8", "#24292f"
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

    def line(self, x: float, y: float, to_x: float, to_y: float, *, ink: str = "#c4cad0") -> None:
        self.parts.append(f'<line x1="{x:.1f}" y1="{y:.1f}" x2="{to_x:.1f}" y2="{to_y:.1f}" stroke="{ink}"/>')

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


CHARTS: dict[str, Callable[[], str]] = {"step": step, "tail": tail}


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
