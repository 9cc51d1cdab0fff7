"""Tables for terminals of any width: columns that do not fit beside the others are printed below; none is cut."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

_GAP = 2  # columns of characters between two of the table


def wrapped(text: str, width: int | None, indent: str = "") -> str:
    """Break lines longer than `width` at words, and indent the rest; width None, as for a file, keeps them whole."""
    if width is None:
        return text
    return "\n".join(
        textwrap.fill(line, max(width, 40), subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
        for line in text.split("\n")
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnTable:
    """Rows of text, headings first; the first column is aligned left and repeated beside every group of columns."""

    rows: Sequence[Sequence[str]]
    title: str | None = None

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if self.title is not None:
            yield Text(self.title)
        for number, group in enumerate(column_groups(self.rows, options.max_width)):
            if number:
                yield Text("")
            yield _table([[row[column] for column in (0, *group)] for row in self.rows])


def column_groups(rows: Sequence[Sequence[str]], width: int) -> Iterator[range]:
    """Group the columns after the first so that each group fits `width` characters beside it, one at least."""
    widths = _widths(rows)
    first, room = 1, width - widths[0]
    for column in range(1, len(widths)):
        room -= _GAP + widths[column]
        if room < 0 and column > first:
            yield range(first, column)
            first, room = column, width - widths[0] - _GAP - widths[column]
    yield range(first, len(widths))


def _widths(rows: Sequence[Sequence[str]]) -> list[int]:
    return [max(map(cell_len, column)) for column in zip(*rows, strict=True)]


def _table(rows: Sequence[Sequence[str]]) -> Table:
    widths = _widths(rows)
    natural = sum(widths) + _GAP * (len(widths) - 1)
    table = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0), width=natural)
    for number, heading in enumerate(rows[0]):
        table.add_column(Text(heading), justify="right" if number else "left", no_wrap=True)
    for row in rows[1:]:
        table.add_row(*map(Text, row))
    return table
