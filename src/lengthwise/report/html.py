"""What our HTML pages share: one file that opens anywhere, with no script and, by its policy, nothing remote."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from html import escape

import numpy as np

from lengthwise.core.names import counted
from lengthwise.report.drawing import bar_chart
from lengthwise.report.figures import count
from lengthwise.report.lengths import sum_by_power, written_edges

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
    """Return a whole page; `title` is escaped here."""
    digest = base64.b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()
    return (
        "<!doctype html>\n<html lang=en><head><meta charset=utf-8>"
        f"<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'sha256-{digest}'\">"
        '<meta name=viewport content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head><body>{body}</body></html>\n"
    )


def html_table(rows: Sequence[Sequence[str]], *, wraps: bool = False) -> str:
    """Return a table, headings first, escaped; a short row's last cell spans; `wraps`: cells may break lines."""
    head = "".join(f"<th>{escape(column)}</th>" for column in rows[0])
    body = []
    for row in rows[1:]:
        left = len(rows[0]) - len(row) + 1
        last = f"<td{f' colspan={left}' * (left > 1)}>{escape(row[-1])}</td>"
        body.append(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row[:-1])}{last}</tr>")
    return scrolling(f"<table{' class=wrap' * wraps}><tr>{head}</tr>{''.join(body)}</table>")


def bar_line(share: float, kind: str) -> str:
    """Draw one bar over a share of its cell, 0 to 1; `kind` is its class in the style sheet."""
    bar = f'<rect class="{kind}" width="{100 * share:.1f}" height="10"/>'
    return f'<svg viewBox="0 0 100 10" preserveAspectRatio="none" aria-hidden="true">{bar}</svg>'


def scrolling(wide: str) -> str:
    """Let what is wider than a phone scroll by itself, so that its text stays large enough to read."""
    return f"<div class=scroll>{wide}</div>"


def length_chart(lengths: Sequence[int] | np.ndarray) -> str:
    """Draw the shares of all tokens, and of attention work, that sequences of each power of two hold."""
    first, sequences, tokens = sum_by_power(lengths)
    values = np.asarray(lengths, dtype=np.float64)
    squares = np.bincount(np.frexp(values)[1] - 1 - first, weights=values**2)
    labels, spans = written_edges(first, len(tokens), int(np.max(lengths)))
    works = [written_work(*each) for each in zip(sequences, tokens, strict=True)]
    tips = [f"{span}: {work}" for span, work in zip(spans, works, strict=True)]
    shares = [each / sum(tokens) for each in tokens]
    chart = bar_chart(
        labels,
        shares,
        title="tokens and attention work by length",
        x_title="tokens of a sequence",
        y_title="share",
        tips=tips,
        marks=(squares / squares.sum()).tolist(),
    )
    key = "Bars: share of all tokens. Lines: share of the attention work, which grows with the square of the length."
    return f"{scrolling(chart)}<p class=key>{key}</p>"


def written_work(sequences: int, tokens: int) -> str:
    """Write how many sequences of how many tokens."""
    return f"{counted(sequences, 'sequence')}, {count(tokens)} token{'s' * (tokens != 1)}"
