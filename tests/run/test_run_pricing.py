"""Runs that measure: when, what they plan with, and which files of measurements they refuse."""

import json

import pytest
from testing.small import make_rows

from cost.measured_samples import measurements_of, samples_of
from cost.test_cost_fit import machine
from lengthwise.config import load_config
from lengthwise.core.files import read_plan_text
from lengthwise.cost.measured import read_measurements
from lengthwise.run import setup
from lengthwise.run.checks import prepare_job
from lengthwise.run.job import RunStart
from lengthwise.run.launch import threads_of_each
from run.small_runs import METRIC_KEYS, read_lines, told, train, write_run

LENGTHS = [200, 30, 7, 90, 150, 12, 64, 41]


@pytest.mark.exhaustive
def test_a_run_that_measures_first_predicts_its_steps(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(setup, "MEASURING_SECONDS", 0.5)
    run = write_run(tmp_path, make_rows(LENGTHS), steps=2, capacity_tokens=128, measurements="auto")
    output = train(run, "--ranks", 2)
    assert "measured" in capfd.readouterr().out
    rows = read_lines(output / "metrics.jsonl")
    assert all(row["predicted_step_seconds"] > 0 for row in rows)
    assert set(rows[0]) == METRIC_KEYS
    assert read_measurements(output / "measurements.json").precision == "fp64"
    assert all(_cost_of(output, step).startswith("measured/1") for step in (1, 2))


def _cost_of(output, step):
    return json.loads(read_plan_text(output / f"plans/step-{step:06d}.json.gz"))["cost"]


def test_a_run_plans_with_a_file_and_refuses_one_of_another_model(tmp_path, capfd):
    found = measurements_of(samples_of(machine()), threads_of_each(2))
    (tmp_path / "measurements.json").write_text(found.to_json())
    keys = {"measurements": "measurements.json", "steps": 1, "capacity_tokens": 64}
    rows = make_rows([20, 90, 5, 40])
    output = train(write_run(tmp_path, rows, model="tiny", precision="fp32", **keys), "--ranks", 2)
    assert _cost_of(output, 1).startswith("measured/1 tiny cpu")
    other = write_run(tmp_path, rows, **keys, output="other")
    err = told(capfd, "train", other, "--ranks", 2, status=2)
    assert "measurements.json: model: hidden: expected 32" in err
    assert "precision: expected fp64" in err
    found = measurements_of(samples_of(machine()), threads_of_each(2) + 1)
    (tmp_path / "measurements.json").write_text(found.to_json())
    err = told(capfd, "train", other, "--ranks", 2, status=2)
    assert f"place: threads: expected {threads_of_each(2)}, as in the run" in err


def _job(folder, **keys):
    config = load_config(write_run(folder, make_rows(LENGTHS), **{"capacity_tokens": None, **keys}))
    return prepare_job(RunStart(config=config, ranks=2, timeout_seconds=10))


def test_only_long_runs_are_measured_unasked(tmp_path):
    assert not _job(tmp_path / "short", steps=3).measures_at_start("zero1")
    long = {"model": "tiny", "steps": 1_000_000}
    assert _job(tmp_path / "long", **long).measures_at_start("zero1")
    assert not _job(tmp_path / "long", **long).measures_at_start("zero3"), "it needs whole models"
    assert not _job(tmp_path / "off", **long, measurements="off").measures_at_start("zero1")
    assert _job(tmp_path / "asked", steps=3, measurements="auto").measures_at_start("zero1")
