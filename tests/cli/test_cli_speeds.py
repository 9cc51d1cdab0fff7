"""Speeds of ranks as users type them."""

import pytest

from lengthwise.cli.options import parse_speeds
from lengthwise.core.errors import ConfigError


def test_parse_speeds_reads_lists_runs_and_files(tmp_path) -> None:
    assert parse_speeds("1,1,0.5") == [1, 1, 0.5]
    assert parse_speeds(" 2x1.0 , 3x0.6,0.5") == [1, 1, 0.6, 0.6, 0.6, 0.5]
    path = tmp_path / "speeds.json"
    path.write_text("[1, 0.5]")
    assert parse_speeds(str(path)) == [1, 0.5]


@pytest.mark.parametrize("text", ["1,,1", "x1", "0x1", "-1x1", "1.5x1", ""])
def test_parse_speeds_names_the_entry_that_is_none(text: str) -> None:
    with pytest.raises(ConfigError, match="--speeds: entry"):
        parse_speeds(text)


@pytest.mark.parametrize("text", ["{}", "[1,", "1"])
def test_parse_speeds_names_a_file_without_a_list(tmp_path, text: str) -> None:
    path = tmp_path / "speeds.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"speeds\.json: expected a JSON list"):
        parse_speeds(str(path))
    with pytest.raises(ConfigError, match=r"none\.json"):
        parse_speeds(str(tmp_path / "none.json"))
