"""Charts as SVG text: bars, points and spans. No script, no style attribute, nothing remote; all text is escaped."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from lengthwise.core.sizes import written_tokens

WIDTH, HEIGHT = 720, 240
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 26, 28, 40
_PLOT_WIDTH, _PLOT_HEIGHT = WIDTH - _LEFT - _RIGHT, HEIGHT - _TOP - _BOTTOM


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A stretch of a row, in seconds; `kind` is its class in the style sheet, `tip` is shown on hovering."""

    start: float
    end: float
    kind: str
    tip: str


def bar_chart(
    labels: Sequence[str],
    values: Sequence[float],
    *,
    title: str,
    x_title: str,
    y_title: str,
    tips: Sequence[str],
    marks: Sequence[float] = (),
) -> str:
    """Draw one bar a value over an axis in percent; values are shares, 0 to 1, `tips` are shown on hovering.

    labels: of the borders of the bars, one more than these. marks: further shares, a line over each bar.
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
        parts.append(_text(f"{_LEFT + number * width:.1f}", HEIGHT - _BOTTOM + 14, label, kind="odd " * (number % 2)))
    for number, mark in enumerate(marks):
        x, y = _LEFT + number * width, _TOP + _PLOT_HEIGHT * (1 - mark / most)
        parts.append(f'<line class="mark" x1="{x + 1:.1f}" x2="{x + width - 1:.1f}" y1="{y:.1f}" y2="{y:.1f}"/>')
    return _svg([*parts, *_titles(x_title, y_title)], title)


def scatter_chart(points: Sequence[tuple[float, float, str]], *, title: str, x_title: str, y_title: str) -> str:
    """Draw (x, y, tip) on two logarithmic axes; values must be above 0."""
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
    return _svg([*parts, *_titles(x_title, y_title)], title)


def span_chart(rows: Sequence[tuple[str, Sequence[Span]]], *, title: str, most: float) -> str:
    """Draw one line a row, its label and its spans, over seconds from 0 to `most`."""
    step = _PLOT_HEIGHT / max(1, len(rows))
    parts = []
    for number, (label, spans) in enumerate(rows):
        y = _TOP + number * step
        parts.append(_text(_LEFT - 6, f"{y + step / 2 + 3:.1f}", label, anchor="end"))
        for span in spans:
            x, width = _LEFT + _PLOT_WIDTH * span.start / most, _PLOT_WIDTH * (span.end - span.start) / most
            parts.append(
                f'<rect class="{escape(span.kind)}" x="{x:.2f}" y="{y + 1:.1f}" width="{max(0.3, width):.2f}" '
                f'height="{max(1.0, step - 2):.1f}"><title>{escape(span.tip)}</title></rect>'
            )
    for part in range(5):
        x, seconds = f"{_LEFT + _PLOT_WIDTH * part / 4:.1f}", f"{most * part / 4:.3g} s"
        parts.append(_text(x, HEIGHT - _BOTTOM + 14, seconds, anchor="end" if part == 4 else "middle"))
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
    """Write text; of kind `odd ` it is left out on narrow pages."""
    return f'<text class="{kind}small" x="{x}" y="{y}" text-anchor="{anchor}">{escape(text)}</text>'


def _svg(parts: Sequence[str], title: str) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">{"".join(parts)}</svg>'


def _powers(values: Sequence[float]) -> tuple[int, int]:
    low, high = math.floor(math.log2(min(values))), math.ceil(math.log2(max(values)))
    return low, max(high, low + 1)
