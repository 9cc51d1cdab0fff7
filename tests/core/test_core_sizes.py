"""Numbers of tokens as people write them."""

import pytest

from lengthwise.core.errors import ConfigError
from lengthwise.core.sizes import parse_tokens


@pytest.mark.parametrize(
    ("text", "tokens"),
    [("1", 1), ("8192", 8192), ("8K", 8192), ("256k", 262144), ("2M", 2097152), ("1.5M", 1572864), (" 1G ", 2**30)],
)
def test_sizes_are_binary(text: str, tokens: int) -> None:
    assert parse_tokens(text, "--context") == tokens


@pytest.mark.parametrize("text", ["", "0", "-1", "1.3K", "K", "2MB", "1e6", "two", "9999999999999G", "1" * 400])
def test_sizes_that_are_none_are_refused_by_place(text: str) -> None:
    with pytest.raises(ConfigError, match="--context"):
        parse_tokens(text, "--context")
