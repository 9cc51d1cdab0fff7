"""Published lengths, drawn again, and lengths from files."""

import json
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lengthwise.core.errors import ConfigError, DataError, Problems
from lengthwise.data.recipes import RECIPES, draw_lengths, lengths_from_file

MILLIONS = 2**20


def test_recipes_are_the_published_sets() -> None:
    assert set(RECIPES) == {"byted", "github", "wikipedia", "prolong", "wlb_like"}


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("tokens", [1, 17, 5000, 2 * MILLIONS])
def test_draw_lengths_sum_to_the_tokens_and_repeat(recipe: str, tokens: int) -> None:
    lengths = draw_lengths(recipe, tokens, 3)
    assert sum(lengths) == tokens
    assert min(lengths) >= 1
    assert lengths == draw_lengths(recipe, tokens, 3)
    assert all(type(length) is int for length in lengths)


def test_draw_lengths_differ_by_seed() -> None:
    assert draw_lengths("github", MILLIONS, 0) != draw_lengths("github", MILLIONS, 1)


def test_draw_lengths_are_the_same_on_every_machine() -> None:
    assert draw_lengths("byted", 100_000, 7)[:6] == BYTED_7
    assert draw_lengths("wikipedia", 100_000, 7)[:6] == WIKIPEDIA_7


BYTED_7 = [98347, 1520, 133]
WIKIPEDIA_7 = [372, 352, 1851, 174, 271, 441]


@pytest.mark.parametrize(("recipe", "above_128k"), [("byted", 0.443), ("github", 0.162)])
def test_draw_lengths_meet_the_token_shares(recipe: str, above_128k: float) -> None:
    lengths = draw_lengths(recipe, 128 * MILLIONS, 0)
    assert sum(length for length in lengths if length >= 128 * 1024) / sum(lengths) == pytest.approx(
        above_128k, abs=0.01
    )
    assert sum(length for length in lengths if length < 4096) / sum(lengths) == pytest.approx(
        {"byted": 0.076, "github": 0.34}[recipe], abs=0.01
    )


@pytest.mark.parametrize(
    ("recipe", "mean", "median"), [("wikipedia", 1014, 347), ("prolong", 3052, 1913), ("wlb_like", 3962, 3227)]
)
def test_draw_lengths_resemble_what_was_measured(recipe: str, mean: float, median: float) -> None:
    lengths = draw_lengths(recipe, 64 * MILLIONS, 0)
    assert statistics.mean(lengths) == pytest.approx(mean, rel=0.25)
    assert statistics.median(lengths) == pytest.approx(median, rel=0.25)


def test_draw_lengths_are_log_uniform_inside_a_bin() -> None:
    lengths = [length for length in draw_lengths("byted", 512 * MILLIONS, 0) if 4096 <= length < 8192]
    assert np.mean([length < 4096 * 2**0.5 for length in lengths]) == pytest.approx(0.5, abs=0.02)


def test_draw_lengths_clip_to_what_a_cluster_holds() -> None:
    lengths = draw_lengths("byted", 32 * MILLIONS, 0, longest_tokens=100_000)
    assert max(lengths) == 100_000
    assert sum(lengths) == 32 * MILLIONS


def test_draw_lengths_name_the_nearest_recipe() -> None:
    with pytest.raises(ConfigError, match="Did you mean `github`"):
        draw_lengths("gihub", 10, 0)


@pytest.mark.parametrize("values", [("byted", 0, 0), ("byted", 1.5, 0), ("byted", 5, -1), ("byted", 5, True)])
def test_draw_lengths_refuse_numbers_out_of_range(values: tuple[Any, ...]) -> None:
    with pytest.raises(ConfigError, match=r"tokens|seed"):
        draw_lengths(*values)


def test_lengths_from_file_reads_a_list_and_a_recipe(tmp_path: Path) -> None:
    file = tmp_path / "lengths.json"
    file.write_text("[5, 1, 99]")
    assert lengths_from_file(file) == [5, 1, 99]
    file.write_text(json.dumps({"recipe": "prolong", "tokens": 9000, "seed": 2}))
    assert lengths_from_file(str(file)) == draw_lengths("prolong", 9000, 2)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[]", "an empty list"),
        ("", "expected a JSON file; got an empty file"),
        ('{"recipe": "byted", "tokens": 5, "seed": 0, "seed": 1}', 'the key "seed" twice'),
        ('{"recipes": "byted", "tokens": 0}', "(?s)Did you mean `recipe`.*no recipe, seed"),
        ("[0, 5, 1.5, -1, 0, 0, 0, 0]", r"(?s)\[0\].*\[2\].*2 more"),
        ("5", "got int"),
        ("[1, 0]", r"lengths\.json\[1\]: .*got 0"),
        ("[1, 2, true]", r"lengths\.json\[2\]: .*got true"),
        ("[1.0]", r"lengths\.json\[0\]: .*got 1\.0"),
        ("[NaN]", r"lengths\.json\[0\]: .*got NaN"),
        ('["7"]', r"lengths\.json\[0\]"),
        ("[[1]]", r"lengths\.json\[0\]"),
        ('{"recipe": "byte", "tokens": 5, "seed": 0}', r"lengths\.json: recipe.*Did you mean `byted`"),
        ('{"recipe": "byted", "tokens": 5}', "no seed"),
        ('{"recipe": "byted", "token": 5, "seed": 0}', "Did you mean `tokens`"),
        ('{"recipe": 5, "tokens": 5, "seed": 0}', "recipe"),
        ('{"recipe": "byted", "tokens": -5, "seed": 0}', r"lengths\.json: tokens"),
        ("[" * 100_000, r"lengths\.json"),
    ],
)
def test_lengths_from_file_name_file_and_index(tmp_path: Path, text: str, told: str) -> None:
    file = tmp_path / "lengths.json"
    file.write_text(text)
    with pytest.raises((DataError, Problems), match=told):
        lengths_from_file(file)


def test_lengths_from_file_refuse_a_missing_file_and_bytes_that_are_no_text(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="No such file"):
        lengths_from_file(tmp_path / "none.json")
    (tmp_path / "odd.json").write_bytes(b"\xff\xfe\x00[1]")
    with pytest.raises(DataError, match="no UTF-8: byte 0xff at offset 0"):
        lengths_from_file(tmp_path / "odd.json")
