"""`lengthwise profile`, and `plan` and `simulate` with what it wrote."""

import json

import pytest
from testing.small import make_rows

from cli.plan_calls import read_plan, refused
from cost.measured_samples import measurements_of, samples_of
from cost.test_cost_fit import machine
from lengthwise.cost import named_hardware
from lengthwise.cost.measured import read_measurements
from run.small_runs import call, write_run


@pytest.fixture
def measured(tmp_path):
    path = tmp_path / "measurements.json"
    path.write_text(measurements_of(samples_of(machine())).to_json())
    return path


def test_profile_writes_what_plan_and_simulate_read(tmp_path, capfd):
    out, plan = tmp_path / "measurements.json", tmp_path / "plan.json"
    asked = ("profile", "--ranks", 2, "--seconds", 0.5, "--longest", 128, "--device", "cpu", "--out", out)
    described = tmp_path / "mine.json"
    asked = (*asked, "--disk", tmp_path)
    assert call(*asked, "--hardware-out", described, "--node-size", 4) == 0
    said = capfd.readouterr().out
    assert "linear_seconds" in said
    measurements = read_measurements(out)
    assert measurements.place.ranks == 2
    # On a busy machine so little time may tell nothing of a link or a copy; of other nodes it never does.
    assert {"far_bytes_per_second", "far_hop_seconds"} <= set(measurements.fit.not_measured)
    assert f"not measured, taken from cpu: {', '.join(measurements.fit.not_measured)}" in said
    assert "copy_bytes_per_second" in said
    assert "hardware description written to" in said
    made = named_hardware(str(described))
    assert made.ranks_per_node == 4
    assert made.layer_launch_seconds != named_hardware("cpu").layer_launch_seconds
    assert "Measured by `lengthwise profile`" in made.source
    assert call(*asked) == 2
    assert "add --overwrite" in capfd.readouterr().err
    assert call(*asked, "--overwrite", "--node-size", 0) == 2
    err = capfd.readouterr().err
    assert "--hardware-out beside it" in err
    assert "--node-size" in err
    (tmp_path / "lengths.json").write_text("[3000, 70, 900]")
    rest = ("--lengths", tmp_path / "lengths.json", "--measurements", out)
    assert call("plan", *rest, "--ranks", 2, "--capacity", 2048, "--out", plan) == 0
    assert "tiny (measured/1 tiny cpu" in capfd.readouterr().out
    asked = ("--lengths", tmp_path / "lengths.json", "--ranks", 2, "--capacity", 2048, "--out", plan)
    assert call("plan", *asked, "--hardware", described) == 0
    rest = (*rest, "--ranks", 2, "--batch-tokens", "4K", "--batches", 1, "--out", tmp_path / "out")
    assert call("simulate", *rest, "--planners", "lengthwise") == 0
    written = json.loads((tmp_path / "out/simulation.json").read_text())
    assert written["cost"].startswith("measured/1 tiny")
    assert 0 < written["planners"]["lengthwise"]["ideal_ratio"] <= 1


def test_profile_refuses_before_it_measures(tmp_path, capfd):
    rest = ("--seconds", 0, "--longest", "long", "--hardware", "h10", "--ranks", 0, "--disk", "none", "--out", tmp_path)
    assert call("profile", *rest) == 2
    err = capfd.readouterr().err
    for option in ("--seconds", "--longest", "--hardware", "--ranks", "--disk", "Choose another --out"):
        assert option in err
    assert call("profile", "--ranks", 1, "--clock", "cpu", "--model", "none/there", "--out", tmp_path / "m.json") == 2
    assert "none/there" in capfd.readouterr().err


def test_measurements_stand_alone(tmp_path, capfd, measured, lengths):
    rest = ("--lengths", lengths, "--ranks", 2, "--measurements", measured)
    asked = ("--capacity", 64, "--out", tmp_path / "plan.json", "--model-shape", "llama-7b", "--hardware", "h100")
    err = refused(capfd, *rest, *asked, "--stages", 2)
    assert call("simulate", *rest, "--out", tmp_path / "out", "--model", "tiny", "--pp", 2) == 2
    err += capfd.readouterr().err
    for option in ("--model-shape", "--hardware", "--stages", "--model", "--pp"):
        assert f"{option}: expected nothing beside --measurements" in err


def test_a_run_file_is_planned_with_measurements_of_its_model(tmp_path, capfd, measured):
    run = write_run(tmp_path, make_rows([3, 40]), model="tiny", precision="fp32")
    rest = ("--ranks", 2, "--measurements", measured, "--out", tmp_path / "plan.json")
    assert call("plan", "--config", run, *rest) == 0
    said = " ".join(capfd.readouterr().out.split())
    assert "priced for this CPU" not in said
    assert "model, from measurements" in said
    assert read_plan(tmp_path / "plan.json").notes["cost"].startswith("measured/1 tiny cpu")
    other = write_run(tmp_path, make_rows([3, 40]), model="tiny", precision="bf16")
    err = refused(capfd, "--config", other, *rest)
    assert "precision: expected bf16" in err
    assert "leave --measurements out" in err
