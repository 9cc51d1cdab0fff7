"""What `train` promises in numbers, against the same training written plainly with Hugging Face and torch."""

import itertools

import pytest
import torch
from testing.small import make_rows, plain_training

from lengthwise.core.files import read_plan_text
from lengthwise.core.plan import Plan
from lengthwise.program import check_plan
from run.small_runs import METRIC_KEYS, call, losses, read_lines, steps_of, told, train, write_run

pytestmark = pytest.mark.usefixtures("checked_transfers")

LENGTHS = (37, 1, 5, 90, 2, 16, 64, 23, 8, 1, 41, 12, 33, 95)


def test_train_ledger_covers_every_epoch_once_whatever_the_ranks_and_planner_and_metrics_have_a_line_a_step(tmp_path):
    write_run(tmp_path, make_rows(LENGTHS))
    ledgers = []
    for ranks, planner in ((2, "static"), (3, "lengthwise")):
        path = write_run(
            tmp_path, steps=None, epochs=2, global_batch={"sequences": 6}, capacity_tokens=96, planner=planner,
            output=planner, precision="fp32", eval={"data": [{"path": "train.jsonl"}], "every_steps": 9},
        )  # fmt: skip
        assert call("train", path, "--ranks", ranks) == 0
        output = tmp_path / planner
        assert sorted(path.name for path in output.iterdir()) == [
            "config.yaml", "eval.jsonl", "ledger.jsonl", "metrics.jsonl", "model", "plans", "torchrun.txt",
        ]  # fmt: skip
        ledgers.append(steps_of(output))
        rows = read_lines(output / "metrics.jsonl")
        assert [row["step"] for row in rows] == list(range(1, 7))
        assert len(list((output / "plans").iterdir())) == 6
        for row, ids in zip(rows, ledgers[-1], strict=True):
            plan = Plan.from_json(read_plan_text(output / f"plans/step-{row['step']:06d}.json.gz"))
            check_plan(plan)
            check_metrics(row, plan, [LENGTHS[i] for i in ids])
            assert (plan.ranks, plan.capacity, plan.layers) == (ranks, 96, 2)
    assert ledgers[0] == ledgers[1]
    assert [len(step) for step in ledgers[0]] == [6, 6, 2] * 2
    epochs = [list(itertools.chain(*ledgers[0][i : i + 3])) for i in (0, 3)]
    assert all(sorted(epoch) == list(range(14)) for epoch in epochs)
    assert epochs[0] != epochs[1], "each epoch has an order of its own"


def check_metrics(row, plan, lengths):
    assert set(row) == METRIC_KEYS
    assert list(plan.tokens) == lengths
    assert (row["num_sequences"], row["num_tokens"]) == (len(lengths), sum(lengths))
    assert row["num_loss_tokens"] == sum(lengths) - len(lengths)
    assert row["imbalance_ratio"] >= 1 > row["idle_ratio"] >= 0
    assert row["plan_seconds"] > 0


def test_train_goes_on_with_ranks_without_work_or_loss(tmp_path):
    """Design 7: fewer sequences than ranks, one-token rows, ranks whose tokens have no loss."""
    rows = make_rows([1, 1, 1, 2])
    output = train(write_run(tmp_path, rows, steps=2, global_batch={"sequences": 9}), "--ranks", 3)
    steps = steps_of(output)
    expected, _, _ = plain_training(tmp_path / "model", rows, steps, dtype=torch.float64, lrs=[3e-4] * 2)
    assert losses(output) == pytest.approx(expected, rel=1e-11)
    assert [sorted(step) for step in steps] == [[0, 1, 2, 3]] * 2


def test_train_refuses_a_batch_without_any_loss_token_by_its_step(tmp_path, capfd):
    rows = make_rows([9, 9, 9, 9])
    for row in rows[:2]:
        row["labels"] = [-100] * 9
    path = write_run(tmp_path, rows, steps=None, epochs=1, global_batch={"sequences": 1})
    errors = told(capfd, "train", path, "--ranks", 2, status=2)
    assert "error[data] step " in errors
    assert "at least one token with a label" in errors
    assert not (tmp_path / "out").exists()
