"""What data is, as one HTML file (`html`): figures, the histogram of lengths, the longest rows, one row."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

import numpy as np

from lengthwise.report.html import html_page, html_table, length_chart


def data_page(
    heading: str,
    lines: Sequence[str],
    lengths: Sequence[int] | np.ndarray,
    longest: Sequence[Sequence[str]],
    sample: Sequence[str],
) -> str:
    """Write the page; all that comes from outside is escaped. `longest`: a table, headings first."""
    said = "".join(f"<p>{escape(each)}</p>" for each in lines)
    row = "".join(f"<p class=key>{escape(each)}</p>" for each in sample)
    return html_page(
        "Lengthwise: data",
        f"<h1>What this data is</h1><p>{escape(heading)}</p>{said}<h2>Lengths</h2>{length_chart(lengths)}"
        f"<h2>Longest rows</h2>{html_table(longest)}<h2>One row, and what of it has a loss</h2>{row}",
    )
