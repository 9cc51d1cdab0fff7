"""Runs that measure: what they plan with, what they say of it, and that their losses are those of any other run."""

import json
import random
import time

import pytest
from testing.small import make_rows

from cost.measured_samples import measurements_of, samples_of
from cost.test_cost_fit import machine
from lengthwise.config import load_config
from lengthwise.core.files import read_plan_text
from lengthwise.core.plan import Plan
from lengthwise.cost.measured import read_measurements
from lengthwise.engine import step
from lengthwise.run import setup
from lengthwise.run.checks import prepare_job
from lengthwise.run.launch import threads_of_each
from run.small_runs import METRIC_KEYS, call, losses, read_lines, train, write_run
from tiers import more

LENGTHS = [200, 30, 7, 90, 150, 12, 64, 41]


def test_a_run_that_measures_first_predicts_its_steps_and_trains_the_same(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(setup, "MEASURING_SECONDS", 0.5)
    keys = {"steps": 3, "capacity_tokens": 128}
    plain = losses(train(write_run(tmp_path / "plain", make_rows(LENGTHS), **keys), "--ranks", 2))
    keys |= {"measurements": "auto", "model": tmp_path / "plain/model"}
    run = write_run(tmp_path / "measured", make_rows(LENGTHS), **keys)
    output = train(run, "--ranks", 2)
    assert "measured" in capfd.readouterr().out
    assert losses(output) == pytest.approx(plain, rel=1e-12)
    rows = read_lines(output / "metrics.jsonl")
    assert all(row["predicted_step_seconds"] > 0 for row in rows)
    assert set(rows[0]) == METRIC_KEYS
    assert read_measurements(output / "measurements.json").precision == "fp64"
    versions = [line["cost"] for line in map(_plan_of(output), range(1, 4))]
    assert all(version.startswith("measured/1") for version in versions)


def _plan_of(output):
    return lambda step: json.loads(read_plan_text(output / f"plans/step-{step:06d}.json.gz"))


def test_a_run_plans_with_a_file_and_refuses_one_of_another_model(tmp_path, capfd):
    found = measurements_of(samples_of(machine()), threads_of_each(2))
    (tmp_path / "measurements.json").write_text(found.to_json())
    keys = {"measurements": "measurements.json", "steps": 2, "capacity_tokens": 64}
    rows = make_rows([20, 90, 5, 40])
    output = train(write_run(tmp_path, rows, model="tiny", precision="fp32", **keys), "--ranks", 2)
    assert _plan_of(output)(1)["cost"].startswith("measured/1 tiny cpu")
    assert call("train", write_run(tmp_path, rows, **keys, output="other"), "--ranks", 2) == 2
    err = capfd.readouterr().err
    assert "measurements.json: model: hidden: expected 32" in err
    assert "precision: expected fp64" in err
    found = measurements_of(samples_of(machine()), threads_of_each(2) + 1)
    (tmp_path / "measurements.json").write_text(found.to_json())
    assert call("train", write_run(tmp_path, rows, **keys, output="other"), "--ranks", 2) == 2
    assert f"place: threads: expected {threads_of_each(2)}, as in the run" in capfd.readouterr().err
    keys["measurements"] = "nothing.json"
    assert call("train", write_run(tmp_path, rows, **keys), "--ranks", 2) == 2
    assert "nothing there -> auto, off or an existing file" in capfd.readouterr().err


@pytest.mark.exhaustive
def test_a_slow_rank_is_seen_and_gets_less_work_and_losses_stay(tmp_path, monkeypatch, capfd):
    """Rank 1 sleeps for every token: from the step after it is seen it holds fewer of them."""
    found = measurements_of(samples_of(machine()), threads_of_each(2))
    (tmp_path / "measurements.json").write_text(found.to_json())
    choose = random.Random(3)
    rows = make_rows([choose.randrange(20, 200) for _ in range(40)])
    keys = {"model": "tiny", "precision": "fp32", "steps": 15, "capacity_tokens": 256}
    keys["global_batch"] = {"sequences": 6}
    plain = losses(train(write_run(tmp_path / "plain", rows, **keys), "--ranks", 2))
    forward = step._RankStep.forward

    def slow(self, action):
        if self.mesh.world.rank == 1:
            program = self.program.microbatches[action.place.microbatch]
            time.sleep(3e-4 * sum(each.num_tokens for each in program.segments(1)))
        forward(self, action)

    monkeypatch.setattr(step._RankStep, "forward", slow)
    output = train(write_run(tmp_path, rows, **keys, measurements="measurements.json"), "--ranks", 2)
    assert losses(output) == pytest.approx(plain, rel=1e-4)
    assert "predicted seconds of steps from 11 on were off by" in capfd.readouterr().out
    plans = [Plan.from_json(read_plan_text(output / f"plans/step-{number:06d}.json.gz")) for number in range(1, 16)]
    assert "speeds" in plans[-1].notes
    first, last = (sum(_tokens_of(plan, 1) for plan in some) for some in (plans[:3], plans[-3:]))
    whole = [sum(sum(plan.tokens) for plan in some) for some in (plans[:3], plans[-3:])]
    assert last / whole[1] < 0.95 * first / whole[0]


def _tokens_of(plan, rank):
    held = 0.0
    for microbatch in plan.microbatches:
        for piece in microbatch.pieces:
            if rank in piece.ranks:
                shares = piece.shares or (1.0,) * piece.degree
                part = shares[piece.ranks.index(rank)] / sum(shares)
                held += part * sum(plan.tokens[i] for i in piece.sequences)
    return held


def _job(folder, **keys):
    config = load_config(write_run(folder, make_rows(LENGTHS), **{"capacity_tokens": None, **keys}))
    return prepare_job(config, ranks=2, timeout_seconds=10)


def test_only_long_runs_are_measured_unasked(tmp_path):
    assert not _job(tmp_path / "short", steps=3).measures_at_start("zero1")
    long = {"model": "tiny", "steps": 1_000_000}
    assert _job(tmp_path / "long", **long).measures_at_start("zero1")
    assert not _job(tmp_path / "long", **long).measures_at_start("zero3"), "it needs whole models"
    assert not _job(tmp_path / "off", **long, measurements="off").measures_at_start("zero1")
    assert _job(tmp_path / "asked", steps=3, measurements="auto").measures_at_start("zero1")


@pytest.mark.parametrize("capacity", [more(256), "auto"])
def test_recompute_auto_keeps_all_where_the_capacity_is_a_number(capacity, tmp_path):
    run = write_run(tmp_path / "run", make_rows(LENGTHS), capacity_tokens=capacity)
    kinds = {each.get("recompute", "none") for each in _plan_of(train(run, "--ranks", 2))(1)["microbatches"]}
    assert kinds == {"none"}, "there is memory for all of it"
