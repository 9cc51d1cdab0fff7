"""What `train` promises in numbers, against the same training written plainly with Hugging Face and torch."""

import itertools
import json
import math

import pytest
import torch

from lengthwise.core.files import read_plan_text
from lengthwise.core.plan import Plan
from lengthwise.program import check_plan
from run.small_runs import (
    DTYPES,
    METRIC_KEYS,
    VOCAB,
    call,
    losses,
    make_rows,
    plain_model,
    plain_training,
    read_lines,
    relative,
    row_losses,
    steps_of,
    train,
    write_model,
    write_run,
)
from tiers import more

pytestmark = pytest.mark.usefixtures("checked_transfers")

LENGTHS = (37, 1, 5, 90, 2, 16, 64, 23, 8, 1, 41, 12, 33, 95)


def mixed_rows():
    """Own labels, fully masked rows and one-token rows among ordinary ones."""
    rows = make_rows(LENGTHS, seed=3)
    rows[0]["labels"] = [-100] * 20 + rows[0]["input_ids"][20:]
    rows[6]["labels"] = [(3 * token + 1) % VOCAB for token in rows[6]["input_ids"]]
    rows[7]["labels"] = [-100] * 23
    rows[13]["labels"] = [5, *[-100, 7] * 47]
    return rows


@pytest.mark.parametrize(("precision", "tolerance"), [("fp64", 1e-13), ("fp32", 2e-6)])
@pytest.mark.parametrize("ranks", [1, more(2), 3])
def test_train_first_loss_and_gradient_norm_equal_plain_hugging_face(tmp_path, precision, tolerance, ranks):
    rows = mixed_rows()
    path = write_run(tmp_path, rows, steps=1, global_batch={"sequences": 14}, precision=precision, capacity_tokens=96)
    output = train(path, "--ranks", ranks, "--set", f"capacity_tokens={ {1: 96, 2: 48, 3: 32}[ranks] }")
    [row] = read_lines(output / "metrics.jsonl")
    assert sorted(steps_of(output)[0]) == list(range(14))
    expected, norms, _ = plain_training(tmp_path / "model", rows, steps_of(output), dtype=DTYPES[precision], lrs=[0.0])
    assert relative(row["loss"], expected[0]) < tolerance
    assert relative(row["grad_norm"], norms[0]) < max(tolerance, 1e-12) * 5
    assert norms[0] > 1, "the norm must be one that is clipped, or this shows nothing"
    assert row["num_loss_tokens"] == sum(row_losses(plain_model(tmp_path / "model", torch.float32), r, torch.float32)[1]
                                         for r in rows)  # fmt: skip
    assert (row["ring_token_ratio"] > 0) == (ranks > 1)


@pytest.mark.parametrize(
    ("ranks", "optimizer", "lrs"),
    [
        (1, {"lr": 3e-3, "weight_decay": 0.5}, [3e-3] * 3),
        (2, {"lr": 3e-3, "weight_decay": 0.5, "warmup_steps": 4}, [0.0, 0.75e-3, 1.5e-3]),
        (3, {"lr": 3e-3, "weight_decay": 0.0, "max_grad_norm": None, "betas": [0.5, 0.8]}, [3e-3] * 3),
        (3, {"lr": 3e-3, "weight_decay": 0.5, "max_grad_norm": 0.1}, [3e-3] * 3),
    ],
)
def test_train_parameters_equal_a_plain_adamw_loop(tmp_path, ranks, optimizer, lrs):
    rows = mixed_rows()
    path = write_run(tmp_path, rows, global_batch={"sequences": 6}, optimizer=optimizer, capacity_tokens=48)
    output = train(path, "--ranks", ranks, *(["--set", "capacity_tokens=95"] if ranks == 1 else []))
    found = read_lines(output / "metrics.jsonl")
    assert [row["lr"] for row in found] == pytest.approx(lrs, rel=1e-12)
    keys = {key: optimizer[key] for key in ("weight_decay", "max_grad_norm", "betas") if key in optimizer}
    expected, norms, model = plain_training(
        tmp_path / "model", rows, steps_of(output), dtype=torch.float64, lrs=lrs, **keys
    )
    for row, loss, norm in zip(found, expected, norms, strict=True):
        assert relative(row["loss"], loss) < 1e-11
        assert relative(row["grad_norm"], norm) < 1e-9
    trained = dict(plain_model(output / "model", torch.float64).named_parameters())
    for name, parameter in model.named_parameters():
        assert (trained[name] - parameter).abs().max() < 1e-9, name


def test_train_decays_only_parameters_of_two_dimensions(tmp_path):
    """A learning rate whose updates are almost all decay: norms stay, matrices shrink."""
    path = write_run(tmp_path, make_rows([4] * 4), steps=1, optimizer={"lr": 1e-3, "weight_decay": 900.0})
    before = dict(plain_model(tmp_path / "model", torch.float64).named_parameters())
    after = dict(plain_model(train(path, "--ranks", 2) / "model", torch.float64).named_parameters())
    for name, parameter in before.items():
        shrunk = after[name].norm() / parameter.norm()
        assert shrunk < 0.3 if parameter.dim() >= 2 else shrunk > 0.9, name


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_train_learning_rate_warms_up_peaks_and_falls(tmp_path, schedule):
    path = write_run(
        tmp_path, make_rows([6] * 4), steps=8, optimizer={"lr": 0.01, "schedule": schedule, "warmup_steps": 3}
    )
    lrs = [row["lr"] for row in read_lines(train(path) / "metrics.jsonl")]
    assert lrs[:3] == pytest.approx([0.0, 0.01 / 3, 0.02 / 3])
    assert lrs[3] == pytest.approx(0.01)
    assert all(later < earlier for earlier, later in itertools.pairwise(lrs[3:]))
    assert 0 <= lrs[-1] < 0.003
    if schedule == "linear":
        falls = [a - b for a, b in itertools.pairwise(lrs[3:])]
        assert falls == pytest.approx([falls[0]] * 4)
    else:
        # A cosine falls slowly, fast, slowly: the first fall is the smallest of the first half.
        assert lrs[3] - lrs[4] < lrs[4] - lrs[5]


def test_eval_batch_without_a_loss_token_counts_for_nothing(tmp_path):
    """Only eval data without any loss token is an error: an eval loss is one mean over all of it."""
    path = write_run(
        tmp_path,
        make_rows([5, 6]),
        steps=1,
        global_batch={"sequences": 1},
        eval={"data": [{"path": "eval.jsonl"}], "every_steps": 1},
    )
    (tmp_path / "eval.jsonl").write_text('{"input_ids": [1]}\n{"input_ids": [1, 2, 3]}\n')
    (row,) = read_lines(train(path, "--ranks", 2) / "eval.jsonl")
    assert row["num_loss_tokens"] == 2
    assert row["num_sequences"] == 2
    assert math.isfinite(row["loss"])


def test_train_writes_one_line_a_step_with_the_named_keys(tmp_path):
    path = write_run(tmp_path, make_rows(LENGTHS), steps=5, eval={"data": [{"path": "train.jsonl"}], "every_steps": 2})
    output = train(path, "--ranks", 3)
    rows = read_lines(output / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]
    for row, ids in zip(rows, steps_of(output), strict=True):
        assert set(row) == METRIC_KEYS
        lengths = [LENGTHS[i] for i in ids]
        assert row["num_sequences"] == len(ids)
        assert row["num_tokens"] == sum(lengths)
        assert row["num_loss_tokens"] == sum(lengths) - len(ids)
        assert row["imbalance_ratio"] >= 1
        assert 0 <= row["idle_ratio"] < 1
        assert row["tokens_per_second"] == pytest.approx(row["num_tokens"] / row["step_seconds"])
        assert row["plan_seconds"] > 0
        plan = Plan.from_json(read_plan_text(output / f"plans/step-{row['step']:06d}.json.gz"))
        assert row["num_microbatches"] == len(plan.microbatches)
        in_rings = {i for m in plan.microbatches for p in m.pieces if len(p.ranks) > 1 for i in p.sequences}
        assert row["ring_token_ratio"] == pytest.approx(sum(plan.tokens[i] for i in in_rings) / sum(lengths))
    assert sorted(path.name for path in output.iterdir()) == [
        "config.yaml", "eval.jsonl", "ledger.jsonl", "metrics.jsonl", "model", "plans",
    ]  # fmt: skip


def test_train_ledger_is_the_same_whatever_ranks_and_planner_and_covers_every_epoch_once(tmp_path):
    ledgers = []
    write_run(tmp_path, make_rows(LENGTHS))
    for number, (ranks, planner) in enumerate([(1, "lengthwise"), (2, "static"), (3, "lengthwise")]):
        path = write_run(
            tmp_path, steps=None, epochs=3, global_batch={"sequences": 4}, capacity_tokens=96, planner=planner,
            output=f"out{number}", precision="fp32",
        )  # fmt: skip
        assert call("train", path, "--ranks", ranks) == 0
        output = tmp_path / f"out{number}"
        steps = steps_of(output)
        ledgers.append(steps)
        plans = sorted((output / "plans").iterdir())
        assert [plan.name for plan in plans] == [f"step-{step:06d}.json.gz" for step in range(1, len(steps) + 1)]
        for file, ids in zip(plans, steps, strict=True):
            plan = Plan.from_json(read_plan_text(file))
            check_plan(plan)
            assert list(plan.tokens) == [LENGTHS[i] for i in ids]
            assert (plan.ranks, plan.capacity, plan.layers) == (ranks, 96, 2)
    assert all(ledger == ledgers[0] for ledger in ledgers)
    steps = ledgers[0]
    assert [len(step) for step in steps] == [4, 4, 4, 2] * 3
    epochs = [list(itertools.chain(*steps[i : i + 4])) for i in (0, 4, 8)]
    assert all(sorted(epoch) == list(range(14)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2], "each epoch has an order of its own"


def test_train_global_batch_of_tokens_takes_as_many_whole_sequences_as_fit_and_at_least_one(tmp_path):
    lengths = [max(2, length) for length in LENGTHS]
    path = write_run(
        tmp_path, make_rows(lengths), steps=None, epochs=2, global_batch={"tokens": 70}, capacity_tokens=96
    )
    steps = steps_of(train(path))
    order = [i for step in steps for i in step]
    assert sorted(order[:14]) == sorted(order[14:]) == list(range(14))
    expected, here = [], []
    for place, i in enumerate(order):
        if here and (sum(lengths[j] for j in here) + lengths[i] > 70 or place == 14):
            expected.append(here)
            here = []
        here.append(i)
    assert steps == [*expected, here]
    assert any(len(step) == 1 and lengths[step[0]] > 70 for step in steps)


def test_train_epochs_are_not_counted_by_world_size(tmp_path):
    """Design 7: three ranks see an epoch once, not a third of it and not three times."""
    write_run(tmp_path, make_rows([9] * 7))
    for ranks in (1, 3):
        path = write_run(tmp_path, steps=None, epochs=1, global_batch={"sequences": 3}, output=f"out{ranks}")
        assert call("train", path, "--ranks", ranks) == 0
        assert sorted(itertools.chain(*steps_of(tmp_path / f"out{ranks}"))) == list(range(7))


def test_train_skipped_rows_keep_their_number_over_data_files(tmp_path):
    first, second = make_rows([5, 40, 7]), make_rows([40, 6], seed=2)
    write_run(tmp_path, first)
    (tmp_path / "more.jsonl").write_text("".join(json.dumps(row) + "\n" for row in second))
    sources = [{"path": name, "max_tokens": 10, "too_long": "skip"} for name in ("train.jsonl", "more.jsonl")]
    path = write_run(tmp_path, data=sources, steps=None, epochs=1, global_batch={"sequences": 9})
    assert sorted(steps_of(train(path))[0]) == [0, 2, 4]


def test_train_shifts_labels_inside_a_sequence_only(tmp_path):
    """Changing the first token's label of a row changes nothing; its last label does, though a pack goes on there."""
    rows = make_rows([5, 6, 7])
    for row in rows:
        row["labels"] = list(row["input_ids"])
    model, found = write_model(tmp_path / "model"), []
    for name, place, value in (("same", 0, 0), ("first", 0, 11), ("last", -1, 11)):
        rows[1]["labels"] = list(rows[1]["input_ids"])
        rows[1]["labels"][place] = value or rows[1]["labels"][place]
        folder = tmp_path / name
        found.append(losses(train(write_run(folder, rows, model=model, steps=1)))[0])
    same, first, last = found
    assert first == same
    assert last != same


@pytest.mark.parametrize("ranks", [more(1), more(2), 3])
def test_train_labels_are_not_shifted_after_the_cut(tmp_path, ranks):
    """Design 7: the last token of a shard is asked for the first token of the next; all on one ring, lengths prime."""
    rows = make_rows([89, 31, 2])
    path = write_run(tmp_path, rows, steps=1, capacity_tokens=89 // ranks + 1)
    output = train(path, "--ranks", ranks)
    [expected], _, _ = plain_training(tmp_path / "model", rows, steps_of(output), dtype=torch.float64, lrs=[0])
    assert relative(losses(output)[0], expected) < 1e-13


def test_train_loss_is_not_scaled_by_world_size_and_does_not_average_averages(tmp_path):
    """Design 7: two rows of very unequal loss tokens on two ranks; each token weighs the same."""
    rows = make_rows([60, 60])
    rows[1]["labels"] = [-100] * 57 + rows[1]["input_ids"][57:]
    output = train(write_run(tmp_path, rows, steps=1, capacity_tokens=60), "--ranks", 2)
    plan = Plan.from_json(read_plan_text(output / "plans/step-000001.json.gz"))
    assert len(plan.microbatches) > 1
    model = plain_model(tmp_path / "model", torch.float64)
    (long, n), (short, m) = (row_losses(model, row, torch.float64) for row in rows)
    assert (n, m) == (59, 3)
    loss = losses(output)[0]
    assert relative(loss, (long + short).item() / 62) < 1e-13
    assert abs(loss - (long.item() / 59 + short.item() / 3) / 2) > 1e-4


@pytest.mark.parametrize("lengths", [[1, 1, 1, 2], more([2]), more([1, 5]), more([3, 1, 1, 1, 1, 1, 1, 1, 1])])
def test_train_goes_on_with_ranks_without_work_or_loss(tmp_path, lengths):
    """Design 7: fewer sequences than ranks, one-token rows, ranks whose tokens have no loss."""
    rows = make_rows(lengths)
    output = train(write_run(tmp_path, rows, steps=2, global_batch={"sequences": 9}), "--ranks", 3)
    steps = steps_of(output)
    expected, _, _ = plain_training(tmp_path / "model", rows, steps, dtype=torch.float64, lrs=[3e-4] * 2)
    assert losses(output) == pytest.approx(expected, rel=1e-11)
    assert [sorted(step) for step in steps] == [list(range(len(lengths)))] * 2


def test_train_refuses_a_batch_without_any_loss_token_by_its_step(tmp_path, capfd):
    rows = make_rows([9, 9, 9, 9])
    for row in rows[:2]:
        row["labels"] = [-100] * 9
    path = write_run(tmp_path, rows, steps=None, epochs=1, global_batch={"sequences": 1})
    assert call("train", path, "--ranks", 2) == 2
    errors = capfd.readouterr().err
    assert "error[data] step " in errors
    assert "at least one token with a label" in errors
    assert not (tmp_path / "out").exists()


def test_train_masked_rows_beside_others_are_in_ledger_and_plan(tmp_path):
    rows = make_rows([9, 1, 9])
    rows[2]["labels"] = [-100] * 9
    output = train(write_run(tmp_path, rows, steps=1), "--ranks", 2)
    assert sorted(steps_of(output)[0]) == [0, 1, 2]
    [row] = read_lines(output / "metrics.jsonl")
    assert (row["num_sequences"], row["num_tokens"], row["num_loss_tokens"]) == (3, 19, 8)
    assert math.isfinite(row["loss"])


def test_train_writes_a_resolved_config_that_trains_the_same_again(tmp_path):
    write_run(tmp_path, make_rows(LENGTHS))
    path = write_run(tmp_path, optimizer={"lr": 1e-3}, capacity_tokens=96)
    output = train(path, "--set", "steps=2")
    resolved = tmp_path / "again.yaml"
    resolved.write_text((output / "config.yaml").read_text())
    assert call("train", resolved, "--set", "output=out2") == 0
    assert losses(tmp_path / "out2") == losses(output)
    assert len(losses(output)) == 2
