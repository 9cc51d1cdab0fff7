"""Names that nobody knows: the nearest known one, where it is near."""

import pytest

from lengthwise.core.names import did_you_mean


@pytest.mark.parametrize(
    ("typed", "asked"),
    [
        ("h1000", "Did you mean `h100`?"),
        ("h10", "Did you mean `h100`?"),
        ("a100", None),  # another device, not a slip of the finger
        ("trian", None),
    ],
)
def test_did_you_mean_asks_only_for_what_may_have_been_meant(typed: str, asked: str | None) -> None:
    assert did_you_mean(typed, ["h100", "bytescale-gpu", "cpu"]) == asked
