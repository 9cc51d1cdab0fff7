"""`lengthwise profile`, and `plan` and `simulate` with what it wrote."""

import json

from testing.small import make_rows

from cli.calls import read_plan
from cost.measured_samples import measurements_of, samples_of
from cost.test_cost_fit import machine
from lengthwise.cost import named_hardware
from lengthwise.cost.measured import read_measurements
from run.small_runs import told, write_run


def test_profile_writes_what_plan_and_simulate_read(tmp_path, capfd):
    out, described, plan = tmp_path / "measurements.json", tmp_path / "mine.json", tmp_path / "plan.json"
    asked = ("profile", "--ranks", 2, "--seconds", 0.5, "--longest", 128, "--device", "cpu", "--out", out)
    asked = (*asked, "--disk", tmp_path)
    said = told(capfd, *asked, "--hardware-out", described, "--node-size", 4)
    measurements = read_measurements(out)
    assert measurements.place.ranks == 2
    # On a busy machine so little time may tell nothing of a link or a copy; of other nodes it never does.
    assert {"far_bytes_per_second", "far_hop_seconds"} <= set(measurements.fit.not_measured)
    unmeasured = f"not measured, taken from cpu: {', '.join(measurements.fit.not_measured)}"
    for each in ("linear_seconds", unmeasured, "copy_bytes_per_second", "hardware description written to"):
        assert each in said
    made = named_hardware(str(described))
    assert made.ranks_per_node == 4
    assert made.layer_launch_seconds != named_hardware("cpu").layer_launch_seconds
    assert "Measured by `lengthwise profile`" in made.source
    assert "add --overwrite" in told(capfd, *asked, status=2)
    assert "--hardware-out beside it" in told(capfd, *asked, "--overwrite", "--node-size", 0, status=2)
    (tmp_path / "lengths.json").write_text("[3000, 70, 900]")
    rest = ("--lengths", tmp_path / "lengths.json", "--ranks", 2)
    planned = ("plan", *rest, "--capacity", 2048, "--out", plan)
    assert "tiny (measured/1 tiny cpu" in told(capfd, *planned, "--measurements", out)
    told(capfd, *planned, "--hardware", described)
    rest = (*rest, "--measurements", out, "--batch-tokens", "4K", "--batches", 1, "--out", tmp_path / "out")
    told(capfd, "simulate", *rest, "--planners", "lengthwise")
    written = json.loads((tmp_path / "out/simulation.json").read_text())
    assert written["cost"].startswith("measured/1 tiny")
    assert 0 < written["planners"]["lengthwise"]["ideal_ratio"] <= 1


def test_a_run_file_is_planned_with_measurements_of_its_model(tmp_path, capfd):
    measured = tmp_path / "measurements.json"
    measured.write_text(measurements_of(samples_of(machine())).to_json())
    run = write_run(tmp_path, make_rows([3, 40]), model="tiny", precision="fp32")
    asked = ("plan", "--config", run, "--ranks", 2, "--measurements", measured, "--out", tmp_path / "plan.json")
    said = " ".join(told(capfd, *asked).split())
    assert "priced for this CPU" not in said
    assert "model, from measurements" in said
    assert read_plan(tmp_path / "plan.json").notes["cost"].startswith("measured/1 tiny cpu")
    write_run(tmp_path, make_rows([3, 40]), model="tiny", precision="bf16")
    err = told(capfd, *asked, status=2)
    assert "precision: expected bf16" in err
    assert "leave --measurements out" in err
