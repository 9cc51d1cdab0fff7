"""Published lengths, drawn again, and lengths from files."""

import json
import statistics
from pathlib import Path

import numpy as np
import pytest

from lengthwise.core.errors import ConfigError, DataError, Problems
from lengthwise.data.recipes import RECIPES, draw_lengths, lengths_from_file

MILLIONS = 2**20


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("tokens", [1, 17, 5000])
def test_draw_lengths_sum_to_the_tokens_and_repeat(recipe: str, tokens: int) -> None:
    lengths = draw_lengths(recipe, tokens, 3)
    assert sum(lengths) == tokens
    assert min(lengths) >= 1
    assert lengths == draw_lengths(recipe, tokens, 3)
    assert all(type(length) is int for length in lengths)


def test_draw_lengths_are_the_same_on_every_machine() -> None:
    assert set(RECIPES) == {"byted", "github", "wikipedia", "prolong", "wlb_like"}
    assert draw_lengths("byted", 100_000, 7)[:6] == [98347, 1520, 133]
    assert draw_lengths("wikipedia", 100_000, 7)[:6] == [372, 352, 1851, 174, 271, 441]
    assert draw_lengths("github", MILLIONS, 0) != draw_lengths("github", MILLIONS, 1)


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


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (("gihub", 10, 0), "Did you mean `github`"),
        (("byted", 0, 0), "tokens"),
        (("byted", 1.5, 0), "tokens"),
        (("byted", 5, -1), "seed"),
        (("byted", 5, True), "seed"),
    ],
)
def test_draw_lengths_refuse(values, said):
    with pytest.raises(ConfigError, match=said):
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
        ("[1, 0]", r"lengths\.json\[1\]: .*got 0"),
        ("[1, 2, true]", r"lengths\.json\[2\]: .*got true"),
        ("[NaN]", r"lengths\.json\[0\]: .*got NaN"),
        ("[[1]]", r"lengths\.json\[0\]"),
        ('{"recipe": "byte", "tokens": 5, "seed": 0}', r"lengths\.json: recipe.*Did you mean `byted`"),
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
