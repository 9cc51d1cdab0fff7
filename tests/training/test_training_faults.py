"""What ends a run early, from outside or inside: what is said, what is saved, and that no process is left."""

import json
import os
import resource
import signal
import time

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from lengthwise.training import planning, trainer
from lengthwise.training.planner_process import PlannerProcess
from training.small_runs import (
    Command,
    call,
    children,
    count_lines,
    losses,
    make_rows,
    read_lines,
    steps_of,
    train,
    write_run,
)

ENDLESS = 1_000_000
HANGS = 6  # seconds that a rank is waited for: ranks that share a busy core may be silent for two


def start(folder, *arguments, ranks=3, **environment):
    """Start a run without end and wait until it is well under way."""
    path = write_run(
        folder, make_rows([30, 12, 5, 60]), steps=ENDLESS, precision="fp32", capacity_tokens=60 // min(2, ranks)
    )
    command = Command("train", path, "--ranks", ranks, *arguments, **environment)
    command.wait_for(lambda: count_lines(folder / "out/metrics.jsonl") >= 3)
    return command


def assert_whole(output, *, steps):
    """Three files agree on how far the run came, and the model opens."""
    assert [row["step"] for row in read_lines(output / "metrics.jsonl")] == list(range(1, steps + 1))
    assert len(steps_of(output)) == len(list((output / "plans").iterdir())) == steps
    AutoModelForCausalLM.from_pretrained(output / "model")


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("group", [True, False], ids=["to the group", "to the parent"])
def test_train_interrupted_saves_the_model_and_says_so(tmp_path, ranks, group):
    command = start(tmp_path, ranks=ranks)
    command.send(signal.SIGINT, group=group)
    status, out, err = command.finish(10)
    steps = count_lines(tmp_path / "out/metrics.jsonl")
    assert status == 130
    assert f"stopped by SIGINT after step {steps}" in out
    assert "saved" in out
    assert "Traceback" not in err
    assert_whole(tmp_path / "out", steps=steps)
    path = write_run(tmp_path, steps=2)
    assert call("train", path, "--ranks", ranks, "--overwrite", "--set", "capacity_tokens=60") == 0
    assert_whole(tmp_path / "out", steps=2)


@pytest.mark.parametrize("ranks", [1, 2])
def test_train_terminated_saves_and_exits_0(tmp_path, ranks):
    command = start(tmp_path, ranks=ranks)
    command.send(signal.SIGTERM)
    status, out, err = command.finish(10)
    assert (status, err) == (0, "")
    assert "stopped by SIGTERM" in out
    assert_whole(tmp_path / "out", steps=count_lines(tmp_path / "out/metrics.jsonl"))


@pytest.mark.parametrize("ranks", [1, 2])
def test_train_interrupted_while_ranks_start_trains_nothing(tmp_path, monkeypatch, ranks):
    """A Ctrl-C before the first step is not forgotten on the way to it."""
    connect = trainer.connect

    def slow_connect(*arguments):
        (tmp_path / "here").touch()
        time.sleep(0.5)
        return connect(*arguments)

    monkeypatch.setattr(trainer, "connect", slow_connect)
    path = write_run(tmp_path, make_rows([30, 12]), steps=ENDLESS)
    command = Command("train", path, "--ranks", ranks)
    command.wait_for((tmp_path / "here").exists)
    command.send(signal.SIGINT, group=True)
    status, out, err = command.finish(10)
    assert status == 130
    assert "step 1" not in out
    assert (tmp_path / "out/metrics.jsonl").exists() is False
    if ranks > 1:  # one rank is not listening yet, and ends at once
        assert "Traceback" not in err
        assert "interrupted: nothing was saved" in err


def test_train_interrupted_twice_ends_at_once(tmp_path, monkeypatch):
    """A rank that does not answer holds nobody who asks twice."""
    monkeypatch.setattr(trainer._Trainer, "_save", lambda self, number: time.sleep(60))
    command = start(tmp_path, ranks=2)
    command.send(signal.SIGINT)
    time.sleep(0.4)
    command.send(signal.SIGINT)
    status, _, err = command.finish(5)
    assert status == 130
    assert "interrupted" in err


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_train_names_a_killed_rank_with_step_and_phase(tmp_path, victim):
    command = start(tmp_path)
    os.kill(command.ranks()[victim], signal.SIGKILL)
    begin = time.monotonic()
    status, _, err = command.finish(15)
    assert time.monotonic() - begin < 8
    assert status == 1
    assert err.startswith(f"error[rank] rank {victim}, step ")
    assert "SIGKILL" in err
    assert err.count("\n") == 1, err
    steps = count_lines(tmp_path / "out/metrics.jsonl")
    assert any(f"step {step}, " in err for step in range(steps, steps + 3)), (steps, err)
    path = write_run(tmp_path, steps=1)
    assert call("train", path, "--ranks", 3, "--overwrite") == 0


def test_train_leaves_no_rank_behind_when_the_launcher_is_killed(tmp_path):
    command = start(tmp_path)
    ranks = command.ranks()
    os.kill(command.pid, signal.SIGKILL)
    assert len(ranks) == 3
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline and command.left():
        time.sleep(0.05)
    status, _, _ = command.finish()  # which checks that none is left
    assert status == -signal.SIGKILL


def test_train_names_a_hanging_rank_with_step_and_phase(tmp_path):
    command = start(tmp_path, "--timeout-seconds", HANGS)
    os.kill(command.ranks()[1], signal.SIGSTOP)
    begin = time.monotonic()
    status, _, err = command.finish(60)
    assert time.monotonic() - begin < HANGS + 5
    assert status == 1
    assert "not a word from rank 1, last seen in step " in err, err
    assert err.count("\n") == 1, err


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_train_names_a_planner_process_that_ends_or_hangs(tmp_path, ranks, number):
    """Training waits for a plan, at most as long as for anything else, and leaves neither ranks nor planner behind."""
    command = start(tmp_path, "--timeout-seconds", HANGS, ranks=ranks)
    (planner,) = children(command.pid if ranks == 1 else command.ranks()[0])
    os.kill(planner, number)
    status, _, err = command.finish(60)
    assert status == 1
    if number == signal.SIGKILL:
        assert "error[rank] rank 0, planner process: expected a plan; got its end by signal 9" in err, err
    else:
        assert f"planning: expected a plan within {HANGS} s; got none" in err or "not a word from rank 0" in err, err
    assert err.count("\n") == 1, err


@pytest.mark.parametrize("broken", ["plan", "sequences"])
def test_train_finds_ranks_that_disagree_before_a_transfer(tmp_path, monkeypatch, capfd, broken):
    """Rank 1 holds another plan, or other sequences, for step 3: found by digest, and step 2 was the last."""
    broadcast, begin = planning.broadcast_bytes, planning.PlanAhead._begin
    taken = []

    def other_plan(transport, data):
        taken.append(0)
        text = broadcast(transport, data)
        return text.replace(b"microbatches", b"microbatchez") if transport.rank == 1 and len(taken) == 3 else text

    def other_sequences(self):
        taken.append(0)
        if (found := begin(self)) and self._transport.rank == 1 and len(taken) == 3:
            found[0].ids = tuple(reversed(found[0].ids))
        return found

    path = write_run(tmp_path, make_rows([30, 12, 5, 60]), steps=5)
    if broken == "plan":
        monkeypatch.setattr(planning, "broadcast_bytes", other_plan)
    else:
        monkeypatch.setattr(planning.PlanAhead, "_begin", other_sequences)
    assert call("train", path, "--ranks", 3) == 1
    err = capfd.readouterr().err
    assert "error[rank] rank 0, step 3, agreeing on the plan" in err
    assert "another digest on rank 1" in err
    assert "Traceback" not in err
    assert count_lines(tmp_path / "out/metrics.jsonl") <= 2


@pytest.mark.parametrize("ranks", [1, 2])
def test_train_stops_at_a_loss_that_is_not_finite_without_an_update(tmp_path, capfd, ranks):
    path = write_run(tmp_path, make_rows([30, 12, 5, 40]))
    weights = tmp_path / "model/model.safetensors"
    tensors = load_file(weights)
    tensors["model.norm.weight"][3] = float("nan")
    save_file(tensors, weights, metadata={"format": "pt"})
    assert call("train", path, "--ranks", ranks, "--set", "capacity_tokens=40") == 1
    err = capfd.readouterr().err
    assert "error[numeric] step 1: expected a finite loss; got nan over sequences" in err
    assert sorted(int(i) for i in err.split("sequences ")[1].split(".")[0].split(", ")) == [0, 1, 2, 3]
    assert count_lines(tmp_path / "out/metrics.jsonl") == 0
    assert not (tmp_path / "out/model").exists()


def test_train_stops_at_a_gradient_that_is_not_finite_without_an_update(tmp_path, monkeypatch, capfd):
    """The loss is finite; one rank's gradient is not. Step and sequences are named."""
    run_plan = trainer.run_plan

    def poisoned(model, plan, batch, transport, kernel, *, name, **options):
        work = run_plan(model, plan, batch, transport, kernel, name=name, **options)
        if transport.rank == 1 and name == "step 2":
            next(model.parameters()).grad.view(-1)[5] = float("inf")
        return work

    monkeypatch.setattr(trainer, "run_plan", poisoned)
    assert call("train", write_run(tmp_path, make_rows([30, 12, 5, 60])), "--ranks", 3) == 1
    err = capfd.readouterr().err
    assert "error[numeric] step 2" in err
    assert "expected a finite norm of the gradient; got inf over" in err
    assert sorted(int(i) for i in err.split("sequences ")[1].split(".")[0].split(", ")) == [0, 1, 2, 3]
    assert count_lines(tmp_path / "out/metrics.jsonl") == 1


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("evaluates", [False, True])
def test_train_does_not_save_parameters_that_an_update_ruined(tmp_path, capfd, ranks, precision, steps, evaluates):
    """Loss and gradient are finite; the last update, or one before it, leaves parameters that are not."""
    evaluation = {"eval": {"data": [{"path": "train.jsonl"}], "every_steps": 2}} if evaluates else {}
    path = write_run(
        tmp_path, make_rows([30, 12, 5, 60]), steps=steps, precision=precision, capacity_tokens=60,
        optimizer={"weight_decay": 1e308}, **evaluation,
    )  # fmt: skip
    assert call("train", path, "--ranks", ranks) == 1
    err = capfd.readouterr().err
    assert err.startswith("error[numeric] step 1: expected finite parameters after its update; got "), err
    assert (err.count("\n"), "Traceback" in err) == (1, False)
    assert not (tmp_path / "out/model").exists()
    assert not (tmp_path / "out/eval.jsonl").exists()


@pytest.mark.parametrize("ranks", [1, 2])
def test_train_tells_a_full_disk_in_one_line(tmp_path, ranks):
    """A limit on the size of files stands for a full disk: the ledger or a plan cannot be written."""
    path = write_run(tmp_path, make_rows([30, 12, 5, 40]), steps=ENDLESS, precision="fp32", capacity_tokens=40)

    def limit():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))

    status, _, err = Command("train", path, "--ranks", ranks, prepare=limit).finish(20)
    assert status != 0
    assert "Traceback" not in err, err
    assert err.startswith("error[output] "), err
    assert "File too large" in err
    assert err.count("\n") == 1, err


@pytest.mark.parametrize("ranks", [1, 2])
def test_train_tells_a_model_that_cannot_be_saved_in_one_line(tmp_path, ranks):
    path = write_run(tmp_path, make_rows([30, 12, 5, 40]), steps=1, precision="fp32", capacity_tokens=40)

    def limit():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))

    status, _, err = Command("train", path, "--ranks", ranks, prepare=limit).finish(20)
    assert status != 0
    assert "Traceback" not in err, err
    assert err.startswith("error[output] "), err
    assert err.count("\n") == 1, err


def test_train_output_under_a_file_is_refused_in_one_line(tmp_path, capfd):
    (tmp_path / "file").write_text("mine")
    path = write_run(tmp_path, make_rows([5, 6]), output="file/out")
    assert call("train", path, "--ranks", 2) == 2
    err = capfd.readouterr().err
    assert err.startswith("error[output] ")
    assert err.count("\n") == 1
    assert (tmp_path / "file").read_text() == "mine"


def test_train_plans_the_next_step_while_the_present_one_runs(tmp_path, monkeypatch):
    """Design 7: planning that stalls. Rank 0 does not end a step before the plan of the next one is begun beside it."""
    begun, ran = [], []
    plan, run_plan = PlannerProcess.plan, trainer.run_plan

    def counted(self, planning, lengths):
        begun.append(lengths)
        return plan(self, planning, lengths)

    def run(model, a_plan, batch, transport, *arguments, **keys):
        ran.append(batch)
        deadline = time.monotonic() + 30
        while transport.rank == 0 and len(ran) < 3 and len(begun) <= len(ran):
            assert time.monotonic() < deadline, "the next plan is not begun while this step runs"
            time.sleep(0.01)
        return run_plan(model, a_plan, batch, transport, *arguments, **keys)

    monkeypatch.setattr(PlannerProcess, "plan", counted)
    monkeypatch.setattr(trainer, "run_plan", run)
    output = train(write_run(tmp_path, make_rows([30, 12, 9]), steps=3), "--ranks", 2)
    assert count_lines(output / "metrics.jsonl") == 3


@pytest.mark.parametrize("changed", ["flat_tokens", "flat_labels", "offsets"])
def test_train_ranks_that_read_other_data_are_found_at_the_start(tmp_path, monkeypatch, capfd, changed):
    rows = [{**row, "labels": list(row["input_ids"])} for row in make_rows([30, 12])]
    connect = trainer.connect

    def other_data(world, job, *rest):
        if world.rank == 2:
            values = getattr(job.dataset, changed).copy()
            values[1] += 1
            object.__setattr__(job.dataset, changed, values)
        return connect(world, job, *rest)

    monkeypatch.setattr(trainer, "connect", other_data)
    assert call("train", write_run(tmp_path, rows), "--ranks", 3) == 1
    err = capfd.readouterr().err
    assert "the same run file and data on all ranks; got another digest on rank 2" in err
    assert not (tmp_path / "out").exists()


def test_train_metrics_are_whole_lines_at_every_moment(tmp_path):
    """Whoever follows metrics.jsonl reads whole lines only; each step's plan and ledger line are there before."""
    command = start(tmp_path, ranks=2)
    for _ in range(30):
        text = (tmp_path / "out/metrics.jsonl").read_text()
        assert text.endswith("\n")
        last = json.loads(text.splitlines()[-1])["step"]
        assert count_lines(tmp_path / "out/ledger.jsonl") >= last
        assert (tmp_path / f"out/plans/step-{last:06d}.json").read_text().endswith("}\n")
        time.sleep(0.01)
    command.send(signal.SIGTERM)
    assert command.finish(10)[0] == 0


def test_train_one_update_is_the_same_on_all_ranks(tmp_path, monkeypatch):
    """Every rank's copy of the parameters after the run, compared bit for bit."""
    save = trainer._Trainer._save

    def keep(self, number):
        torch.save(self._parameters.values, tmp_path / f"rank{self._transport.rank}.pt")
        save(self, number)

    monkeypatch.setattr(trainer._Trainer, "_save", keep)
    train(write_run(tmp_path, make_rows([30, 12, 5, 60]), precision="bf16"), "--ranks", 3)
    values = [torch.load(tmp_path / f"rank{rank}.pt", weights_only=True) for rank in range(3)]
    assert torch.equal(values[0], values[1])
    assert torch.equal(values[0], values[2])
    assert len(losses(tmp_path / "out")) == 3
