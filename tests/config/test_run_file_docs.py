"""The page that users read names every key there is, with its default."""

from pathlib import Path

import pytest

from lengthwise.config.schema import DataSource, EvalConfig, GlobalBatch, OptimizerConfig, RunConfig

PAGE = (Path(__file__).parents[2] / "docs" / "run-file.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "key",
    sorted(
        {
            key
            for section in (RunConfig, DataSource, EvalConfig, GlobalBatch, OptimizerConfig)
            for key in section.model_fields
        }
    ),
)
def test_run_file_page_names_every_key(key):
    assert f"`{key}`" in PAGE


def test_run_file_page_names_the_optimizer_defaults():
    rows = {
        line.split("|")[1].strip(" `"): line.split("|")[2].strip(" `")
        for line in PAGE.splitlines()
        if line.startswith("| `")
    }
    assert float(rows["lr"]) == OptimizerConfig().lr
    assert float(rows["weight_decay"]) == OptimizerConfig().weight_decay
    assert float(rows["max_grad_norm"]) == OptimizerConfig().max_grad_norm
    assert float(rows["eps"]) == OptimizerConfig().eps
    assert int(rows["capacity_tokens"]) == RunConfig.model_fields["capacity_tokens"].default
