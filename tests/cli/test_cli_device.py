"""Which device a run takes, what it says of it, and what is set before torch is there."""

import pytest
import torch
from testing.small import make_rows

from lengthwise.comm import devices
from lengthwise.core.environment import prepare_environment
from lengthwise.run import prepared_run as start
from lengthwise.run.launch import on_ranks
from run.small_runs import told, write_run


def _driver_too_old(monkeypatch, tmp_path):
    """Let torch be one of CUDA on a machine whose driver it cannot use."""
    (tmp_path / "nvidiactl").touch()
    monkeypatch.setattr(devices, "_DRIVER", tmp_path / "nvidiactl")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def fail():
        raise RuntimeError("The NVIDIA driver is too old (11040).")

    monkeypatch.setattr(torch.cuda, "init", fail)


@pytest.mark.parametrize(
    ("device", "expected", "remedy"),
    [
        ("cuda", "a GPU, for device: cuda", "a driver that is new enough"),
        ("auto", "a GPU that torch can use, because this machine has one", "set device: cpu to train without it"),
    ],
)
def test_driver_that_torch_cannot_use_is_told_of_in_its_words(tmp_path, monkeypatch, capfd, device, expected, remedy):
    _driver_too_old(monkeypatch, tmp_path)
    err = told(capfd, "train", write_run(tmp_path, make_rows([5]), device=device), status=2)
    assert f"error[config] device: expected {expected}; got none (The NVIDIA driver is too old (11040))" in err
    assert remedy in err


def begun(folder, device="auto", ranks=None):
    path = write_run(folder, make_rows([5, 7]), device=device)
    return start.read_start(path, (), ranks=ranks, timeout_seconds=10)


@pytest.mark.parametrize(("device", "hidden"), [("cpu", False), ("auto", True)])
def test_gpu_that_the_user_has_hidden_or_does_not_ask_for_is_not_missed(tmp_path, monkeypatch, device, hidden):
    _driver_too_old(monkeypatch, tmp_path)
    if hidden:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert (begun(tmp_path, device).ranks, begun(tmp_path, device).gpus) == (1, 0)


@pytest.mark.parametrize(
    ("device", "ranks", "gpus", "expected"),
    [("auto", None, 3, (3, 3)), ("auto", 2, 1, (2, 1)), ("cpu", None, 3, (1, 0)), ("auto", None, 0, (1, 0))],
)
def test_ranks_default_to_one_a_gpu_and_may_outnumber_them(tmp_path, monkeypatch, device, ranks, gpus, expected):
    monkeypatch.setattr(start, "count_gpus", lambda: gpus)
    found = begun(tmp_path, device, ranks)
    assert (found.ranks, found.gpus) == expected


def test_torchrun_ranks_know_their_gpus(tmp_path, monkeypatch):
    monkeypatch.setattr(start, "count_gpus", lambda: 2)
    torchrun = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "3", "MASTER_ADDR": "host", "MASTER_PORT": "1"}
    for name, value in torchrun.items():
        monkeypatch.setenv(name, value)
    found = begun(tmp_path)
    assert found.ranks == 4
    assert str(on_ranks(lambda world, _: world.device, 4, gpus=found.gpus)) == "cuda:1", "the fourth rank, of two GPUs"


def test_environment_gets_expandable_segments_unless_the_user_has_set_it():
    empty = {}
    prepare_environment(empty)
    assert empty == {"PYTORCH_ALLOC_CONF": "expandable_segments:True", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
    for key in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        own = {key: "max_split_size_mb:64", "PYTORCH_NVML_BASED_CUDA_CHECK": "0"}
        prepare_environment(own)
        assert own == {key: "max_split_size_mb:64", "PYTORCH_NVML_BASED_CUDA_CHECK": "0"}
