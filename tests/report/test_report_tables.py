"""Numbers, histograms and tables as a person reads them; expected values by hand."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from testing.plans import make_plan

from lengthwise.core.plan import Piece
from lengthwise.report.figures import count, percent, seconds, unitless
from lengthwise.report.histogram import length_histogram, summarize_lengths
from lengthwise.report.plans import degree_table, degrees
from lengthwise.report.tables import ColumnTable, column_groups


@pytest.mark.parametrize(
    ("write", "written"),
    [
        (
            count,
            {
                0: "0", 999: "999", 1000: "1.00K", 12_100: "12.1K", 99_950: "100K", 999_999: "1.00M", 0.5: "0.50",
                4_200_000_000_000: "4200G",
            },
        ),
        (
            seconds,
            {
                1.25e-5: "12.5 us", 0.0009999: "1.00 ms", 0.9999: "1.00 s", 100: "1 min 40 s", 119.9: "2 min 00 s",
                34_669: "9 h 38 min",
            },
        ),
        (unitless, {1.5: "1.5", 21581873.4: "21581873", 1e-7: "1e-07"}),
        (percent, {0.1234: "12.3 %", -1e-9: "0.0 %", -0.5: "-50.0 %"}),
    ],
)  # fmt: skip
def test_numbers_are_written_with_three_digits_and_the_unit_that_fits(write, written):
    assert {value: write(value) for value in written} == written


def test_summary_by_hand():
    found = summarize_lengths([10, 1, 4, 100, 5])
    assert (found.num_sequences, found.num_tokens, found.median_tokens) == (5, 120, 5)
    assert (found.longest_tokens, found.longest_index) == (100, 3)
    assert found.top_token_share == pytest.approx(100 / 120)
    assert found.top_attention_share == pytest.approx(10_000 / (100 + 1 + 16 + 10_000 + 25))
    assert summarize_lengths([1] * 198 + [50, 51]).top_token_share == pytest.approx(101 / (198 + 101))  # a percent


@given(st.lists(st.integers(1, 1 << 22), min_size=1, max_size=60))
def test_histogram_counts_every_sequence_and_fits_the_line(lengths):
    header, *lines = length_histogram(lengths)
    assert "sequences" in header
    assert sum(int(line[15:].split()[0]) for line in lines) == len(lengths)
    assert len(lines) == max(lengths).bit_length() - min(lengths).bit_length() + 1
    assert all(len(line) <= 79 and line == line.rstrip() and line.isascii() for line in lines)


def shown(table, width=120):
    console = Console(width=width, color_system=None, soft_wrap=True)
    with console.capture() as captured:
        console.print(table)
    return [line.rstrip() for line in captured.get().splitlines()]


def test_degree_table_by_hand():
    pieces = [(range(12), [0]), (range(2), [1]), ([3], [2, 3]), (range(16), [4]), (range(9), [5])]
    pieces = [Piece(ranks=tuple(ranks), sequences=tuple(sequences)) for ranks, sequences in pieces]
    plan = make_plan(16, [1000, 300, 50, 50, 2000, 600], pieces)
    assert degrees(plan) == (1, 2, 9, 12, 16)
    assert [re.split(" {2,}", row.strip()) for row in shown(degree_table(plan))[1:]] == [
        ["1", "2", "100", "2.5 %"],
        ["2", "1", "300", "7.5 %"],
        ["9-16", "3", "3.60K", "90.0 %"],
    ]


CELLS = st.text(alphabet="abc 長[]", min_size=1, max_size=12).map(str.strip).filter(bool)


@given(st.data(), st.integers(2, 6), st.integers(1, 60))
def test_groups_take_every_column_once_and_fit_where_one_does(data: st.DataObject, columns: int, width: int) -> None:
    rows = data.draw(st.lists(st.tuples(*[CELLS] * columns), min_size=1, max_size=4))
    groups = list(column_groups(rows, width))
    assert [column for group in groups for column in group] == list(range(1, columns))
    said = shown(ColumnTable(rows=rows), width)
    assert all(cell in "\n".join(said) for row in rows for cell in row)
    assert sum(line == "" for line in said) == len(groups) - 1
