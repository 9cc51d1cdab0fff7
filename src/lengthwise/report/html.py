"""HTML pages and their charts as SVG: one file that opens anywhere, without scripts and, by its policy, nothing remote.

No element has a style attribute, and all text is escaped.
"""

from __future__ import annotations

import base64
import hashlib
import math
from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING

import numpy as np

from lengthwise.core.names import counted
from lengthwise.core.sizes import written_tokens
from lengthwise.report.figures import count, seconds
from lengthwise.report.histogram import sum_by_power, written_edges

if TYPE_CHECKING:
    from lengthwise.simulator import Stretch

WIDTH, HEIGHT = 720, 240
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 26, 28, 40
_PLOT_WIDTH, _PLOT_HEIGHT = WIDTH - _LEFT - _RIGHT, HEIGHT - _TOP - _BOTTOM
_NARROW_ROWS = 8  # rows of GPUs whose labels all fit on a narrow page
STYLE = """
:root{color-scheme:light dark}
body{font:16px/1.5 system-ui,sans-serif;max-width:72rem;margin:2rem auto;padding:0 1rem}
h1{font-size:1.5rem}h2{font-size:1.15rem;margin-top:2rem}h3{font-size:1rem}
table{border-collapse:collapse;font-variant-numeric:tabular-nums}
th,td{white-space:nowrap;padding:.25rem .5rem;text-align:right;border-bottom:1px solid #8884}
th:first-child,td:first-child{text-align:left}
.wrap th,.wrap td{white-space:normal;vertical-align:top}.wrap td[colspan]{text-align:left}
.steps{width:100%}.steps td{border:0}.steps .line{width:65%}
svg{width:100%;min-width:36rem;height:auto}.small{font-size:10px;fill:currentColor}.grid{stroke:#8883}
.steps svg{min-width:0;height:1.1rem;display:block}
.mark{stroke:#d9822b;stroke-width:2}.bar,.dot,.local{fill:#3b76c4}.ours,.ring{fill:#d9822b}.end{fill:#888}
.scroll{overflow-x:auto}.key{font-size:.85rem}
@media(max-width:40rem){svg{min-width:0}.small{font-size:18px}.odd{display:none}
th,td{padding:.2rem .25rem}.wrap,.steps{font-size:.8rem}.steps td:first-child{white-space:normal}
.steps .line{width:45%}}
"""


def html_page(title: str, body: str) -> str:
    """Return a whole page; `title` is escaped here, `body` by the caller."""
    digest = base64.b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()
    return (
        "<!doctype html>\n<html lang=en><head><meta charset=utf-8>"
        f"<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'sha256-{digest}'\">"
        '<meta name=viewport content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head><body>{body}</body></html>\n"
    )


def html_table(rows: Sequence[Sequence[str]], *, wraps: bool = False) -> str:
    """Return a table, headings first, escaped; the last cell of a short row spans the remaining columns.

    wraps: True lets cells break lines.
    """
    head = "".join(f"<th>{escape(column)}</th>" for column in rows[0])
    body = []
    for row in rows[1:]:
        left = len(rows[0]) - len(row) + 1
        last = f"<td{f' colspan={left}' * (left > 1)}>{escape(row[-1])}</td>"
        body.append(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row[:-1])}{last}</tr>")
    return scrolling(f"<table{' class=wrap' * wraps}><tr>{head}</tr>{''.join(body)}</table>")


def bar_line(share: float, kind: str) -> str:
    """Return one bar over a share of its cell, 0 to 1. kind: its class in the style sheet."""
    bar = f'<rect class="{kind}" width="{100 * share:.1f}" height="10"/>'
    return f'<svg viewBox="0 0 100 10" preserveAspectRatio="none" aria-hidden="true">{bar}</svg>'


def scrolling(wide: str) -> str:
    """Return a wide element that scrolls by itself on a phone, so that its text stays large enough to read."""
    return f"<div class=scroll>{wide}</div>"


def length_chart(lengths: Sequence[int] | np.ndarray) -> str:
    """Return a chart of the shares of all tokens, and of attention work, in sequences of each power of two."""
    first, sequences, tokens = sum_by_power(lengths)
    values = np.asarray(lengths, dtype=np.float64)
    squares = np.bincount(np.frexp(values)[1] - 1 - first, weights=values**2)
    labels, spans = written_edges(first, len(tokens), int(np.max(lengths)))
    tips = [
        f"{span}: {counted(number, 'sequence')}, {count(held)} token{'s' * (held != 1)}"
        for span, number, held in zip(spans, sequences, tokens, strict=True)
    ]
    shares, marks = [each / sum(tokens) for each in tokens], (squares / squares.sum()).tolist()
    chart = _bar_chart(labels, shares, tips, marks)
    key = "Bars: share of all tokens. Lines: share of the attention work, which grows with the square of the length."
    return f"{scrolling(chart)}<p class=key>{key}</p>"


def _bar_chart(labels: Sequence[str], values: Sequence[float], tips: Sequence[str], marks: Sequence[float]) -> str:
    """Return a chart of one bar per value over an axis in percent; values are shares from 0 to 1.

    labels: labels of the bars' borders, one more than bars. tips: texts shown on hovering. marks: further shares, drawn
    as a line over each bar.
    """
    tallest = max((*values, *marks), default=0.0) or 1.0
    tick = next((each for each in (0.01, 0.05, 0.1) if tallest <= 5 * each), 0.2)
    most = tick * math.ceil(tallest / tick - 1e-9)
    width = _PLOT_WIDTH / max(1, len(values))
    parts = []
    for number in range(round(most / tick) + 1):
        y = _TOP + _PLOT_HEIGHT * (1 - number * tick / most)
        parts += _y_tick(y, f"{100 * number * tick:.0f} %")
    for number, (value, tip) in enumerate(zip(values, tips, strict=True)):
        x, height = _LEFT + number * width, _PLOT_HEIGHT * value / most
        parts.append(
            f'<rect class="bar" x="{x + 1:.1f}" y="{_TOP + _PLOT_HEIGHT - height:.1f}" '
            f'width="{max(1.0, width - 2):.1f}" height="{height:.1f}"><title>{escape(tip)}</title></rect>'
        )
    for number, label in enumerate(labels):
        kind = "odd " * ((len(labels) - 1 - number) % 2)  # the last label always stays
        parts.append(_text(f"{_LEFT + number * width:.1f}", HEIGHT - _BOTTOM + 14, label, kind=kind))
    for number, mark in enumerate(marks):
        x, y = _LEFT + number * width, _TOP + _PLOT_HEIGHT * (1 - mark / most)
        parts.append(f'<line class="mark" x1="{x + 1:.1f}" x2="{x + width - 1:.1f}" y1="{y:.1f}" y2="{y:.1f}"/>')
    return _svg([*parts, *_titles("tokens of a sequence", "share")], "tokens and attention work by length")


def degree_chart(points: Sequence[tuple[int, int, str]]) -> str:
    """Return a chart of (tokens of a sequence, GPUs that share it, tip) on two logarithmic axes."""
    x_low, x_high = _powers([x for x, _, _ in points])
    y_low, y_high = _powers([y for _, y, _ in points])
    parts = []
    for place, power in enumerate(range(x_low, x_high + 1, max(1, (x_high - x_low) // 10))):
        x = _LEFT + _PLOT_WIDTH * (power - x_low) / (x_high - x_low)
        label = written_tokens(2**power)
        parts.append(_text(f"{x:.1f}", HEIGHT - _BOTTOM + 14, label, kind="odd " * (place % 2)))
    for power in range(y_low, y_high + 1):
        y = _TOP + _PLOT_HEIGHT * (1 - (power - y_low) / (y_high - y_low))
        parts += _y_tick(y, written_tokens(2**power))
    for x_value, y_value, tip in points:
        x = _LEFT + _PLOT_WIDTH * (math.log2(x_value) - x_low) / (x_high - x_low)
        y = _TOP + _PLOT_HEIGHT * (1 - (math.log2(y_value) - y_low) / (y_high - y_low))
        parts.append(f'<circle class="dot" cx="{x:.1f}" cy="{y:.1f}" r="2.5"><title>{escape(tip)}</title></circle>')
    return _svg([*parts, *_titles("tokens of the sequence", "GPUs")], "GPUs that share a sequence")


def stretch_chart(rows: Sequence[tuple[str, Sequence[Stretch]]], *, title: str, most: float) -> str:
    """Return a chart of one line per row, its label and its stretches, over seconds from 0 to `most`."""
    step = _PLOT_HEIGHT / max(1, len(rows))
    parts = []
    for number, (label, drawn) in enumerate(rows):
        y = _TOP + number * step
        kind = "odd " * (number % 2 and len(rows) > _NARROW_ROWS)
        parts.append(_text(_LEFT - 6, f"{y + step / 2 + 3:.1f}", label, anchor="end", kind=kind))
        for start, end, kind in drawn:
            x, width = _LEFT + _PLOT_WIDTH * start / most, _PLOT_WIDTH * (end - start) / most
            parts.append(
                f'<rect class="{escape(kind)}" x="{x:.2f}" y="{y + 1:.1f}" width="{max(0.3, width):.2f}" '
                f'height="{max(1.0, step - 2):.1f}"><title>{seconds(start)} to {seconds(end)}</title></rect>'
            )
    for part in range(5):
        x, tick = f"{_LEFT + _PLOT_WIDTH * part / 4:.1f}", f"{most * part / 4:.3g} s"
        parts.append(_text(x, HEIGHT - _BOTTOM + 14, tick, anchor="end" if part == 4 else "middle"))
    return _svg([*parts, *_titles("time since the step began", "")], title)


def _titles(x_title: str, y_title: str) -> list[str]:
    above = f'<text class="small" x="4" y="{_TOP - 14}">{escape(y_title)}</text>'
    return [_text(WIDTH / 2, HEIGHT - 4, x_title), above]


def _y_tick(y: float, label: str) -> list[str]:
    return [
        _text(_LEFT - 6, f"{y + 3:.1f}", label, anchor="end"),
        f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>',
    ]


def _text(x: object, y: object, text: str, *, anchor: str = "middle", kind: str = "") -> str:
    """Return a text element; narrow pages leave out those of kind `odd `."""
    return f'<text class="{kind}small" x="{x}" y="{y}" text-anchor="{anchor}">{escape(text)}</text>'


def _svg(parts: Sequence[str], title: str) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">{"".join(parts)}</svg>'


def _powers(values: Sequence[float]) -> tuple[int, int]:
    low, high = math.floor(math.log2(min(values))), math.ceil(math.log2(max(values)))
    return low, max(high, low + 1)
