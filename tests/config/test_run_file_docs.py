"""The page that users read names every key there is, with its default."""

from pathlib import Path

import pytest

from lengthwise.config import FRESH_RATE, LOADED_RATE, LOADED_WARMUP, OptimizerConfig, RunConfig
from lengthwise.config.problems import sections_of
from lengthwise.planner import PLANNERS

PAGE = (Path(__file__).parents[2] / "docs" / "run-file.md").read_text(encoding="utf-8")


def test_run_file_page_names_every_key():
    keys = {key for section in sections_of(RunConfig).values() for key in section.model_fields}
    assert [key for key in sorted(keys) if f"`{key}`" not in PAGE] == []


def test_run_file_page_names_the_optimizer_defaults():
    rows = {
        line.split("|")[1].strip(" `"): line.split("|")[2].strip(" `")
        for line in PAGE.splitlines()
        if line.startswith("| `")
    }
    assert f"{LOADED_RATE:g}" in rows["lr"].replace("2e-5", "2e-05")
    assert f"{FRESH_RATE:g}" in rows["lr"].replace("3e-4", "0.0003")
    assert str(LOADED_WARMUP) in rows["warmup_steps"]
    assert float(rows["weight_decay"]) == OptimizerConfig().weight_decay
    assert float(rows["max_grad_norm"]) == OptimizerConfig().max_grad_norm
    assert float(rows["eps"]) == OptimizerConfig().eps
    for key in ("capacity_tokens", "recompute", "heads", "loss", "precision", "device"):
        assert rows[key] == RunConfig.model_fields[key].default, key


@pytest.mark.parametrize("page", ["run-file.md", "plan-file.md"])
def test_pages_name_every_planner_in_the_planner_row(page):
    text = (Path(__file__).parents[2] / "docs" / page).read_text(encoding="utf-8")
    (row,) = [line for line in text.splitlines() if line.startswith("| `planner`")]
    assert all(f"`{name}`" in row for name in PLANNERS)
