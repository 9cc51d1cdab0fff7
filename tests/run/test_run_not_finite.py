"""A loss, gradient or parameter that is not finite: what each policy makes of it, against the plain loop."""

import math
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from testing.small import make_rows, plain_training

import lengthwise
from lengthwise.engine.optimizer import SlicedOptimizer
from lengthwise.run import step_end
from lengthwise.session import engine
from run.small_runs import FailsAfter, losses, read_lines, steps_of, told, train, whole, write_run

ROWS = make_rows([5, 40, 9, 12, 33, 7, 21, 3], seed=3)
LR = 0.01
KEYS = {"optimizer": {"lr": LR}, "capacity_tokens": 48}


def poison(monkeypatch, what, *, rank):
    """Make a value of one rank NaN or infinite in some steps: its loss, its gradients, or what its update leaves.

    what: which of them, by step.
    """
    run_part, update = engine.run_part, SlicedOptimizer.update
    updates = []

    def poisoned_run(plan, batch, context):
        work, poisoned = run_part(plan, batch, context), what.get(int(context.name.split()[-1]))
        if context.mesh.world.rank == rank:
            if poisoned == "loss":
                return replace(work, loss_sum=math.nan)
            if poisoned == "gradient":
                context.parameters.grads[3] = math.inf
        return work

    def poisoned_update(self, lr, without):
        update(self, lr, without)
        updates.append(lr)
        if what.get(len(updates)) == "parameter" and self.rank == rank:
            self.parameters.master_weights[0] = math.nan

    monkeypatch.setattr(engine, "run_part", poisoned_run)
    monkeypatch.setattr(SlicedOptimizer, "update", poisoned_update)


def run_of(folder, **keys):
    path = write_run(folder, ROWS, steps=5, checkpoint={"every_steps": 2}, **{**KEYS, **keys})
    whole(path)  # before anything is poisoned
    return path


def assert_kept(path, kept):
    """The run is a plain loop over these steps of the undisturbed one, and others changed nothing."""
    output, undisturbed = path.parent / "out", steps_of(whole(path))
    expected, _, model = plain_training(
        path.parent / "model", ROWS, [undisturbed[step - 1] for step in kept], dtype=torch.float64, lrs=[LR] * len(kept)
    )
    assert [row["step"] for row in read_lines(output / "ledger.jsonl")] == kept
    assert losses(output) == pytest.approx(expected, rel=1e-11)
    weights = dict(model.named_parameters())
    for key, value in load_file(output / "model/model.safetensors").items():
        torch.testing.assert_close(value, weights[key], rtol=1e-9, atol=1e-11, check_dtype=False)


def test_a_step_that_is_not_finite_is_left_out(tmp_path, monkeypatch, capfd):
    path = run_of(tmp_path)
    poison(monkeypatch, {1: "loss", 4: "gradient"}, rank=1)
    output = train(path, "--ranks", 2, "--set", "not_finite=skip")
    assert_kept(path, [2, 3, 5])
    found = read_lines(output / "not_finite.jsonl")
    assert [(row["step"], row["what"]) for row in found] == [(1, "loss"), (4, "norm of the gradient")]
    assert not any(math.isfinite(float(row["value"])) for row in found)
    undisturbed = steps_of(whole(path))
    assert [row["sequences"] for row in found] == [undisturbed[0], undisturbed[3]]
    said = capfd.readouterr().out
    assert f"step 4: {found[1]['what']} is {found[1]['value']} over sequences" in said
    assert "2 steps made no update" in said


@pytest.mark.exhaustive
def test_a_run_that_left_steps_out_goes_on_to_the_same_bits(tmp_path, monkeypatch):
    """AdamW counts updates, not steps: a checkpoint knows both."""
    path = run_of(tmp_path)
    poison(monkeypatch, {1: "gradient"}, rank=0)
    arguments = ("--ranks", 1, "--set", "not_finite=skip")
    train(path, "--set", "output=undisturbed", *arguments)
    with pytest.raises(lengthwise.LengthwiseError, match="Fault"):
        lengthwise.train(path, ranks=1, overrides=["not_finite=skip"], callbacks=[FailsAfter(3)])
    train(path, "--resume", *arguments)
    for name in ("ledger.jsonl", "not_finite.jsonl"):
        assert read_lines(tmp_path / "out" / name) == read_lines(tmp_path / "undisturbed" / name)
    ours, theirs = (load_file(tmp_path / name / "model/model.safetensors") for name in ("out", "undisturbed"))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize(
    ("policy", "what", "words"),
    [
        ("stop", {3: "parameter"}, "step 3: expected a finite parameter; got nan over sequences"),
        ("skip", dict.fromkeys(range(2, 7), "gradient"), "The 4 steps before it made no update either"),
    ],
)
def test_a_run_that_cannot_be_helped_stops_and_saves_no_model(tmp_path, monkeypatch, capfd, policy, what, words):
    path = write_run(tmp_path, ROWS, steps=7, checkpoint={"every_steps": 4}, **KEYS)
    monkeypatch.setattr(step_end, "MOST_IN_A_ROW", 4)
    poison(monkeypatch, what, rank=0)
    assert words in told(capfd, "train", path, "--set", f"not_finite={policy}", status=1)
    assert not (tmp_path / "out/model").exists()
    assert read_lines(tmp_path / "out/not_finite.jsonl")[-1]["step"] == max(what)
