"""Tables that fit: every cell is printed whole, whatever the width."""

from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from lengthwise.report.tables import ColumnTable, column_groups

ROWS = [("planner", "static", "single-degree", "lengthwise"), ("step time", "3.19 s", "2.90 s", "2.90 s")]


def lines(table: ColumnTable, width: int) -> list[str]:
    console = Console(width=width, color_system=None, soft_wrap=True)
    with console.capture() as captured:
        console.print(table)
    return [line.rstrip() for line in captured.get().splitlines()]


def test_table_that_fits_stands_in_one_piece() -> None:
    assert lines(ColumnTable(rows=ROWS, title="a title [b]"), 80) == [
        "a title [b]",
        "planner    static  single-degree  lengthwise",
        "step time  3.19 s         2.90 s      2.90 s",
    ]


def test_table_that_does_not_repeats_its_first_column() -> None:
    assert lines(ColumnTable(rows=ROWS), 40) == [
        "planner    static  single-degree",
        "step time  3.19 s         2.90 s",
        "",
        "planner    lengthwise",
        "step time      2.90 s",
    ]


CELLS = st.text(alphabet="abc 長[]", min_size=1, max_size=12).map(str.strip).filter(bool)


@given(st.data(), st.integers(2, 6), st.integers(1, 60))
def test_groups_take_every_column_once_and_fit_where_one_does(data: st.DataObject, columns: int, width: int) -> None:
    rows = data.draw(st.lists(st.tuples(*[CELLS] * columns), min_size=1, max_size=4))
    groups = list(column_groups(rows, width))
    assert [column for group in groups for column in group] == list(range(1, columns))
    said = lines(ColumnTable(rows=rows), width)
    assert all(cell in "\n".join(said) for row in rows for cell in row)
    assert sum(line == "" for line in said) == len(groups) - 1
