"""`save: {best: eval_loss}`: the model of the lowest evaluation loss, whole whatever comes between."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file
from testing.small import make_rows, plain_loss, plain_model, relative

import lengthwise
from lengthwise.run.evaluation import BestModel, read_best
from run.small_runs import Command, broken_off, call, read_lines, told, train, whole, write_rows, write_run
from tiers import more

OTHERS = make_rows([7, 50, 33, 18], seed=8)  # trained on at a rate so large that the second evaluation is the best
KEYS = {
    "steps": 3,
    "capacity_tokens": 64,
    "optimizer": {"lr": 5e-2},
    "eval": {"data": [{"path": "eval.jsonl"}], "every_steps": 1},
    "save": {"best": "eval_loss"},
    "checkpoint": {"every_steps": 1, "background": False},
}


def run_file(folder, **keys):
    folder.mkdir(exist_ok=True, parents=True)
    write_rows(folder / "eval.jsonl", OTHERS)
    return write_run(folder, OTHERS, **{**KEYS, **keys})


def evaluations(output):
    return {row["step"]: row["loss"] for row in read_lines(output / "eval.jsonl")}


def check_best(output):
    """The folder is of the best evaluation, and its model has that loss."""
    losses, found = evaluations(output), read_best(output)
    step = min(losses, key=losses.get)
    assert found is not None
    assert found[0] == output / "model-best"
    assert (found[1].step, found[1].loss) == (step, losses[step])
    loss = plain_loss(plain_model(output / "model-best", torch.float64), OTHERS, torch.float64)
    assert relative(loss, found[1].loss) < 1e-12
    return step


@pytest.mark.parametrize("keys", [{}, more({"shard": "zero3"})], ids=str)
def test_the_best_model_is_kept_beside_the_last(tmp_path, capsys, keys):
    output = train(run_file(tmp_path, **keys), "--ranks", 2)
    step = check_best(output)
    assert step == 2, evaluations(output)
    assert (output / "model").is_dir()
    assert sorted(each.name for each in output.glob("model*")) == ["model", "model-best"]
    shutil.rmtree(output / "checkpoints")
    assert f"after step {step}" in told(capsys, "checkpoint", "list", output)


@pytest.mark.exhaustive
def test_it_survives_a_resume(tmp_path):
    path = run_file(tmp_path)
    undisturbed = whole(path)
    step = check_best(undisturbed)
    for after in (step, step + 1):  # a fault before the best, and after it
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
        broken_off(path, 1, after=after)
        lengthwise.train(path, resume=True)
        assert check_best(tmp_path / "out") == step
        ours, theirs = (load_file(each / "model-best/model.safetensors") for each in (tmp_path / "out", undisturbed))
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.exhaustive
def test_a_fault_while_it_is_written_leaves_the_one_before(tmp_path):
    path = run_file(tmp_path, steps=4)
    assert Command("train", path, "--ranks", 1, LENGTHWISE_FAULT="model-save:0:2:kill").finish()[0] == -9
    assert read_best(tmp_path / "out")[1].step == 1
    plain_model(tmp_path / "out/model-best", torch.float64)
    assert call("train", path, "--resume") == 0
    check_best(tmp_path / "out")
    assert not list((tmp_path / "out").glob("*.unfinished"))


def write_into(text):
    return lambda folder: (folder / "model.txt").write_text(text)


def test_a_fault_between_two_renames_is_mended(tmp_path):
    notes = []
    best = BestModel(tmp_path, "a", notes.append)
    best.offer(1, 2.0, write_into("first"))
    (tmp_path / "model-best").rename(tmp_path / "model-best.previous")
    assert read_best(tmp_path)[1].step == 1
    (tmp_path / "model-best.unfinished").mkdir()
    best = BestModel(tmp_path, "a", notes.append)
    assert [each.name for each in tmp_path.iterdir()] == ["model-best"]
    best.offer(2, 2.0, write_into("as good"))
    best.offer(3, float("nan"), write_into("none"))
    assert (tmp_path / "model-best/model.txt").read_text() == "first"
    best.offer(4, 1.5, write_into("better"))
    assert json.loads((tmp_path / "model-best/evaluation.json").read_text()) == {"step": 4, "loss": 1.5, "data": "a"}
    assert [each.name for each in tmp_path.iterdir()] == ["model-best"]
    other = BestModel(tmp_path, "b", notes.append)
    assert "was evaluated on other data" in notes[-1]
    other.offer(5, 3.0, write_into("second"))
    assert (tmp_path / "model-best/model.txt").read_text() == "second"


def test_the_third_failure_in_a_row_ends_the_run(tmp_path):
    notes = []
    best = BestModel(tmp_path, "a", notes.append)

    def fail(folder):
        raise OSError("disk full")

    best.offer(1, 3.0, fail)
    best.offer(2, 2.0, fail)
    assert len(notes) == 2
    with pytest.raises(lengthwise.LengthwiseError, match="disk full"):
        best.offer(3, 1.0, fail)
