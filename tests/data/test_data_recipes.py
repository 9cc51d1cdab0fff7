"""Published lengths, drawn again, and lengths from files."""

import json
import statistics
from pathlib import Path

import numpy as np
import pytest

from lengthwise.core.errors import DataError, Problems
from lengthwise.core.plan import images_beside
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
    clipped = draw_lengths(recipe, tokens, 3, longest_tokens=100)
    assert max(clipped) <= 100
    assert sum(clipped) == tokens


def test_draw_lengths_are_the_same_on_every_machine() -> None:
    assert set(RECIPES) == {"byted", "github", "wikipedia", "prolong", "wlb_like"}
    assert draw_lengths("byted", 100_000, 7)[:6] == [98347, 1520, 133]
    assert draw_lengths("wikipedia", 100_000, 7)[:6] == [372, 352, 1851, 174, 271, 441]
    assert draw_lengths("github", MILLIONS, 0) != draw_lengths("github", MILLIONS, 1)


@pytest.mark.parametrize(("recipe", "above_128k", "below_4k"), [("byted", 0.443, 0.076), ("github", 0.162, 0.34)])
def test_draw_lengths_meet_the_token_shares(recipe: str, above_128k: float, below_4k: float) -> None:
    lengths = np.array(draw_lengths(recipe, 128 * MILLIONS, 0))
    assert lengths[lengths >= 128 * 1024].sum() / lengths.sum() == pytest.approx(above_128k, abs=0.01)
    assert lengths[lengths < 4096].sum() / lengths.sum() == pytest.approx(below_4k, abs=0.01)
    in_a_bin = lengths[(lengths >= 4096) & (lengths < 8192)]
    assert np.mean(in_a_bin < 4096 * 2**0.5) == pytest.approx(0.5, abs=0.05), "log-uniform inside of a bin"


@pytest.mark.parametrize(
    ("recipe", "mean", "median"), [("wikipedia", 1014, 347), ("prolong", 3052, 1913), ("wlb_like", 3962, 3227)]
)
def test_draw_lengths_resemble_what_was_measured(recipe: str, mean: float, median: float) -> None:
    lengths = draw_lengths(recipe, 64 * MILLIONS, 0)
    assert statistics.mean(lengths) == pytest.approx(mean, rel=0.25)
    assert statistics.median(lengths) == pytest.approx(median, rel=0.25)


def test_lengths_from_file_reads_a_list_and_a_recipe(tmp_path: Path) -> None:
    file = tmp_path / "lengths.json"
    file.write_text("[5, 1, 99]")
    assert lengths_from_file(file) == [5, 1, 99]
    file.write_text(json.dumps({"recipe": "prolong", "tokens": 9000, "seed": 2}))
    assert lengths_from_file(str(file)) == draw_lengths("prolong", 9000, 2)
    file.write_text(json.dumps({"schema": "of a plan", "tokens": [5, 7], "images": [[0, 0], [9, 4]]}))
    assert lengths_from_file(file) == [5, 7]
    assert images_beside(lengths_from_file(file)) == [[], [(0, 4), (0, 4), (0, 1)]]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[]", "an empty list"),
        ("", "expected a JSON file; got an empty file"),
        ('{"recipe": "byted", "tokens": 5, "seed": 0, "seed": 1}', 'the key "seed" twice'),
        ('{"recipes": "byted", "tokens": 0}', "(?s)Did you mean `recipe`.*no recipe, seed"),
        ("[0, 5, 1.5, -1, 0, 0, 0, 0]", r"(?s)\[0\].*\[2\].*2 more"),
        ("[1, 2, true]", r"lengths\.json\[2\]: .*got true"),
        ("[NaN]", r"lengths\.json\[0\]: .*got NaN"),
        ("[[1]]", r"lengths\.json\[0\]"),
        ('{"recipe": "byte", "tokens": 5, "seed": 0}', r"lengths\.json: recipe.*Did you mean `byted`"),
        ('{"recipe": 5, "tokens": 5, "seed": 0}', "recipe"),
        ('{"recipe": "byted", "tokens": 0, "seed": 0}', r"lengths\.json: tokens"),
        ('{"recipe": "byted", "tokens": 5, "seed": -1}', "seed"),
        ('{"recipe": "byted", "tokens": 5, "seed": true}', "seed"),
        ('{"tokens": [1, 0]}', r"lengths\.json: tokens\[1\]"),
        ('{"tokens": [1], "parents": [null]}', r"lengths\.json: parents: expected whole sequences"),
        ('{"tokens": [1], "images": []}, [1, 1]]}', r"lengths\.json"),
        ('{"tokens": [9], "images": [[1e12, 1]]}', r"images\[0\]: expected the work of at most 9 images"),
        ('{"tokens": [1000000000000], "images": [[1e12, 1]]}', r"images\[0\]: expected .* at most 100000 images"),
        ('{"tokens": [9], "images": [[5, 0]]}', r"images\[0\]: .*got \[5, 0\]"),
        ("[" * 100_000, r"lengths\.json"),
    ],
)
def test_lengths_from_file_name_file_and_index(tmp_path: Path, text: str, told: str) -> None:
    file = tmp_path / "lengths.json"
    file.write_text(text)
    with pytest.raises((DataError, Problems), match=told):
        lengths_from_file(file)
