"""How a run computes: refused before any process starts, the same in all that runs the model, the same result."""

import json

import pytest
from testing.small import make_rows
from torch import nn

from lengthwise.config import build_config
from lengthwise.core.errors import ConfigError
from lengthwise.core.plan import RECOMPUTE_KINDS
from lengthwise.models import Computing
from lengthwise.run import setup
from lengthwise.run.checks import prepare_job
from lengthwise.run.prepared_run import read_start
from run.small_runs import train, write_run

LENGTHS = (40, 9, 17, 3)


def job_of(folder, *, gpus=0, **keys):
    return prepared(write_run(folder, make_rows(LENGTHS), **keys), gpus=gpus)


def prepared(path, *, gpus=0):
    config = build_config(json.loads(path.read_text()), folder=path.parent)
    return prepare_job(config, ranks=2, timeout_seconds=10, gpus=gpus)


def test_the_job_hands_all_of_it_on_or_refuses_it_before_a_gpu_is_touched(tmp_path):
    with pytest.raises(ConfigError, match="flash3: there is no package flash_attn_interface"):
        job_of(tmp_path, gpus=1, precision="bf16", attention="flash3")
    with pytest.raises(ConfigError, match="flash2: flash attention takes bf16, not float64"):
        job_of(tmp_path, gpus=1, attention="flash2")
    with pytest.raises(ConfigError, match=r"experts: expected .* got no experts in one parameter"):
        job_of(tmp_path, experts="grouped_mm", precision="fp32")


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
