"""What is settled before the ranks start: defaults, whose figures price a run and when it measures, how it computes."""

import json
import os

import pytest
import torch
from testing.small import make_rows, write_model
from torch import nn

from cost.measured_samples import measurements_of, samples_of
from cost.test_cost_fit import machine
from lengthwise.config import build_config, load_config
from lengthwise.core.errors import ConfigError
from lengthwise.core.files import read_plan_text
from lengthwise.core.plan import RECOMPUTE_KINDS
from lengthwise.cost.measured import read_measurements
from lengthwise.models import Computing
from lengthwise.profiler.place import first_gpu_name
from lengthwise.run import job as jobs
from lengthwise.run import setup
from lengthwise.run.checks import prepare_job, session_options, settle, stored_model
from lengthwise.run.job import RunStart
from lengthwise.run.launch import threads_of_each
from lengthwise.run.prepared_run import read_start
from lengthwise.session.settings import check_settings, cost_of
from run.small_runs import METRIC_KEYS, read_lines, told, train, write_run

LENGTHS = (40, 9, 17, 3)


def job_of(folder, *, gpus=0, gpu_name=None, **keys):
    return prepared(write_run(folder, make_rows(LENGTHS), **keys), gpus=gpus, gpu_name=gpu_name)


def prepared(path, **where):
    config = build_config(json.loads(path.read_text()), folder=path.parent)
    return prepare_job(RunStart(config=config, ranks=2, timeout_seconds=10, **where))


def unsettled(folder, *, optimizer="", **keys):
    """Write a run file without precision, and of whose optimizer nothing else is said."""
    path = write_run(folder, make_rows([4] * 4), precision=None, **keys)
    path.write_text(path.read_text().replace('"schedule": "constant", "warmup_steps": 0, "lr": 0.0003', optimizer))
    return path


def settled(folder, *, gpus=0, **keys):
    return settle(load_config(unsettled(folder, **keys)), gpus=gpus)


def test_loaded_weights_are_fine_tuned_fresh_ones_trained_and_adapters_begin_at_ten_times_the_rate(tmp_path):
    config, why = settled(tmp_path)
    assert (config.precision, config.optimizer.lr) == ("fp32", 2e-5)
    assert (config.optimizer.schedule, config.optimizer.warmup_steps) == ("cosine", 0.03)
    assert set(why) == {"precision", "lr", "schedule", "warmup_steps"}
    assert settled(tmp_path, gpus=1)[0].precision == "bf16"
    bare = str(write_model(tmp_path / "bare", weights=False))
    for keys in ({"model": "tiny"}, {"weights": "fresh"}, {"model": bare}):
        fresh, _ = settled(tmp_path, **keys)
        assert (fresh.optimizer.lr, fresh.optimizer.schedule, fresh.optimizer.warmup_steps) == (3e-4, "constant", 0)
    assert settle(config, gpus=1) == (config, {})
    adapters, why = settled(tmp_path, lora={"r": 2})
    assert (adapters.optimizer.lr, adapters.optimizer.schedule) == (2e-4, "cosine")
    assert set(map(why.get, ("lr", "schedule", "warmup_steps"))) == {"the default for LoRA"}, "said once"


@pytest.mark.parametrize(("schedule", "warmup"), [("constant", 0), ("linear", 0.03)])
def test_what_the_run_file_says_stays_and_constant_has_no_warm_up(tmp_path, schedule, warmup):
    config, why = settled(tmp_path, gpus=1, optimizer=f'"lr": 3e-4, "schedule": "{schedule}"')
    assert (config.optimizer.schedule, config.optimizer.warmup_steps) == (schedule, warmup)
    assert (config.optimizer.lr, "lr" in why) == (3e-4, False)


def test_the_header_says_what_was_chosen_and_the_run_writes_it_down(tmp_path, capsys):
    path = unsettled(tmp_path, steps=2, capacity_tokens=64)
    assert "the default for loaded weights" in told(capsys, "train", path, "--ranks", 1)
    assert load_config(tmp_path / "out" / "config.yaml").optimizer.warmup_steps == 0.03


@pytest.mark.parametrize(
    ("name", "hardware", "said"),
    [
        (None, "cpu", None),
        ("NVIDIA H100 80GB HBM3", "h100", None),
        ("NVIDIA L4", "h100", "NVIDIA L4 is planned with the figures of h100"),
    ],
)
def test_a_session_is_priced_as_its_gpu(tmp_path, monkeypatch, name, hardware, said):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: name)
    job = job_of(tmp_path, gpus=int(name is not None), gpu_name=name)
    options = {**session_options(job.config), "device": torch.device("cuda" if name else "cpu")}
    cost, note = cost_of(check_settings(stored_model(job.config, job.model), job.config.optimizer, options), 2)
    assert job.hardware == hardware
    assert hardware in cost.version
    assert note is None if said is None else note.startswith(said)


def test_ranks_of_different_gpus_agree_whether_to_measure(tmp_path, monkeypatch):
    """A rank that measured alone would wait for the others for ever."""
    monkeypatch.setattr(jobs, "hardware_of_gpu", lambda name: ("cpu" if name == "slow" else "h100", None))
    slow, fast = (job_of(tmp_path / name, gpus=1, gpu_name=name) for name in ("slow", "fast"))
    assert (slow.hardware, fast.hardware) == ("cpu", "h100")
    lowest, highest = sorted(each.estimated_step_seconds * each.num_steps for each in (slow, fast))
    assert lowest < highest
    for run_seconds in (lowest / 2, (lowest * highest) ** 0.5, 2 * highest):  # the middle one parts the two estimates
        monkeypatch.setattr(jobs, "MEASURING_SECONDS", run_seconds / jobs._MEASURED_RUN)
        assert slow.measures_at_start("zero1") == fast.measures_at_start("zero1") == (run_seconds < lowest)


def test_the_gpu_is_asked_in_a_child(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: f"NVIDIA H200 of {os.getpid()}")
    assert first_gpu_name() not in (None, f"NVIDIA H200 of {os.getpid()}")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: (_ for _ in ()).throw(RuntimeError("no driver")))
    assert first_gpu_name() is None


def test_the_job_hands_all_of_it_on_or_refuses_it_before_a_gpu_is_touched(tmp_path):
    for keys, said in (
        ({"gpus": 1, "precision": "bf16", "attention": "flash3"}, "flash3: there is no package flash_attn_interface"),
        ({"gpus": 1, "attention": "flash2"}, "flash2: flash attention takes bf16, not float64"),
        ({"experts": "grouped_mm", "precision": "fp32"}, r"experts: expected .* got no experts in one parameter"),
    ):
        with pytest.raises(ConfigError, match=said):
            job_of(tmp_path, **keys)


AUTO = {"shard": "auto", "lora": {"r": 2}, "capacity_tokens": "auto"}


@pytest.mark.parametrize("keys", [{"stages": 2, "capacity_tokens": 40}, AUTO])
def test_no_model_is_made_in_the_process_that_forks_ranks_which_use_gpus(tmp_path, monkeypatch, keys):
    """What a model imports (flash-linear-attention) or runs (masks) starts CUDA, which does not survive a fork."""
    path = write_run(tmp_path, make_rows(LENGTHS), precision="bf16", **keys)
    wrong = write_run(tmp_path / "wrong", make_rows(LENGTHS), model=tmp_path / "model", heads=3, **keys)
    job = prepared(path, gpus=2)
    assert job.trained.parameters > 10_000
    assert job.trained.kinds == RECOMPUTE_KINDS
    with pytest.raises(ConfigError, match="heads: expected auto, off, or a number that divides"):
        prepared(wrong, gpus=2)
    built, init = [], nn.Module.__init__
    monkeypatch.setattr(nn.Module, "__init__", lambda module, *a, **k: (built.append(module), init(module, *a, **k))[1])
    read_start(path, [], ranks=2, timeout_seconds=10)
    assert not built


def test_what_is_measured_before_the_first_step_computes_as_the_run_does(tmp_path, monkeypatch, capfd):
    asked = []
    error = ConfigError("samples", expected="none", got="none", remedy="None.")

    def profile(source, world, transport, settings, **_):
        asked.append(settings.computing)
        raise error

    monkeypatch.setattr(setup, "profile", profile)
    monkeypatch.setattr(setup, "open_store", lambda *_, **__: None)
    output = train(
        write_run(tmp_path, make_rows(LENGTHS), attention="reference", measurements="auto", capacity_tokens=64, steps=1)
    )
    assert asked == [Computing(attention="reference")]
    assert "not measured, planned by estimates" in " ".join(capfd.readouterr().out.split())
    assert output.is_dir()


MEASURED = [200, 30, 7, 90, 150, 12, 64, 41]


@pytest.mark.exhaustive
def test_a_run_that_measures_first_predicts_its_steps(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(setup, "MEASURING_SECONDS", 0.5)
    run = write_run(tmp_path, make_rows(MEASURED), steps=2, capacity_tokens=128, measurements="auto")
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


def _measured_job(folder, **keys):
    config = load_config(write_run(folder, make_rows(MEASURED), **{"capacity_tokens": None, **keys}))
    return prepare_job(RunStart(config=config, ranks=2, timeout_seconds=10))


def test_only_long_runs_are_measured_unasked(tmp_path):
    assert not _measured_job(tmp_path / "short", steps=3).measures_at_start("zero1")
    long = {"model": "tiny", "steps": 1_000_000}
    assert _measured_job(tmp_path / "long", **long).measures_at_start("zero1")
    assert not _measured_job(tmp_path / "long", **long).measures_at_start("zero3"), "it needs whole models"
    assert not _measured_job(tmp_path / "off", **long, measurements="off").measures_at_start("zero1")
    assert _measured_job(tmp_path / "asked", steps=3, measurements="auto").measures_at_start("zero1")
