"""Numbers, histograms and summaries as a person reads them; expected values by hand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lengthwise.report.figures import count, percent, seconds, unitless
from lengthwise.report.histogram import length_histogram, summarize_lengths


@pytest.mark.parametrize(
    ("write", "written"),
    [
        (
            count,
            {
                0: "0", 7: "7", 999: "999", 1000: "1.00K", 1005: "1.00K", 12_100: "12.1K", 99_949: "99.9K",
                99_950: "100K", 999_499: "999K", 999_999: "1.00M", 384_000_000: "384M", 999_600_000: "1.00G",
                0.5: "0.50", 12.34: "12.3", 4_200_000_000_000: "4200G",
            },
        ),
        (
            seconds,
            {
                0: "0.00 us", 1.25e-5: "12.5 us", 0.0009999: "1.00 ms", 0.0032: "3.20 ms", 0.9999: "1.00 s",
                1.25: "1.25 s", 99.9: "99.9 s", 100: "1 min 40 s", 119.9: "2 min 00 s", 138.85: "2 min 19 s",
                125: "2 min 05 s", 3600: "60 min 00 s", 7170: "2 h 00 min", 34_669: "9 h 38 min",
            },
        ),
        (unitless, {0.0: "0", 1.5: "1.5", 123456.7: "123457", 21581873.4: "21581873", 1e-7: "1e-07", 1e200: "1e+200"}),
        (percent, {0.1234: "12.3 %", 0: "0.0 %", 0.9999: "100.0 %", -1e-9: "0.0 %", -0.5: "-50.0 %"}),
    ],
)  # fmt: skip
def test_numbers_are_written_with_three_digits_and_the_unit_that_fits(write, written):
    assert {value: write(value) for value in written} == written


@given(st.floats(1, 9e11))
def test_count_is_never_far_from_the_value_and_never_1000_of_a_unit(value):
    text = count(value)
    scale = {"K": 1e3, "M": 1e6, "G": 1e9}.get(text[-1], 1)
    number = float(text.rstrip("KMG"))
    assert abs(number * scale - value) <= 0.0051 * value + (0.5 if scale == 1 else 0)
    assert number < 1000


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


def test_histogram_by_hand():
    """Bins [2, 4), [4, 8), [8, 16), closed at the longest: 1, 0 and 2 sequences with 3, 0 and 20 tokens."""
    lines = length_histogram([3, 10, 10], width=21)
    assert [line.split() for line in lines[1:]] == [
        ["2", "to", "4", "1", "....." , "3", "##"],
        ["4", "to", "8", "0", "0"],
        ["8", "to", "10", "2", "..........", "20", "##########"],
    ]  # fmt: skip
    assert length_histogram([5, 131_072])[-1].split()[:2] == ["128K", "1"], "no bar to 256K"
