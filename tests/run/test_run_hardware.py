"""Whose figures a run is priced with before anything was measured: by the GPU's name, and what is said of it."""

import json
import os

import pytest
import torch
from testing.small import make_rows

from lengthwise.config import build_config
from lengthwise.profiler.place import first_gpu_name
from lengthwise.run import job as jobs
from lengthwise.run.checks import prepare_job, session_options, stored_model
from lengthwise.session.settings import check_settings, cost_of
from run.small_runs import write_run


def job_of(folder, **where):
    path = write_run(folder, make_rows([30, 12]))
    config = build_config(json.loads(path.read_text()), folder=folder)
    return prepare_job(config, ranks=2, timeout_seconds=10, **where)


@pytest.mark.parametrize(
    ("name", "hardware", "said"),
    [
        (None, "cpu", None),
        ("NVIDIA H200", "h200", None),
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
