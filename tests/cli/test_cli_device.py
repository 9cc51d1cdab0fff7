"""Which device a run takes, what it says of it, and what is set before torch is there."""

import pytest

from lengthwise.cli.machine import prepare_environment
from lengthwise.training import start
from training.small_runs import call, make_rows, write_run


def test_device_cuda_without_a_gpu_is_told_before_anything_starts(tmp_path, capfd):
    path = write_run(tmp_path, make_rows([5]), device="cuda")
    assert call("train", path) == 2
    err = capfd.readouterr().err
    assert "error[config] device: expected a GPU, for device: cuda; got none (torch " in err
    assert not (tmp_path / "out").exists()


def test_device_of_an_unknown_kind_is_refused(tmp_path, capfd):
    assert call("train", write_run(tmp_path, make_rows([5]), device="tpu")) == 2
    err = capfd.readouterr().err
    assert "device" in err
    assert "tpu" in err


@pytest.mark.parametrize(
    ("device", "ranks", "gpus", "expected"),
    [("auto", None, 3, (3, 3)), ("auto", 2, 1, (2, 1)), ("cpu", None, 3, (1, 0)), ("auto", None, 0, (1, 0))],
)
def test_ranks_default_to_one_a_gpu_and_may_outnumber_them(tmp_path, monkeypatch, device, ranks, gpus, expected):
    monkeypatch.setattr(start, "count_gpus", lambda: gpus)
    path = write_run(tmp_path, make_rows([5, 7]), device=device)
    begun = start.prepare(path, (), ranks=ranks, timeout_seconds=10)
    assert (begun.job.ranks, begun.job.gpus) == expected
    assert begun.world is None


def test_torchrun_ranks_know_their_gpus(tmp_path, monkeypatch):
    monkeypatch.setattr(start, "count_gpus", lambda: 2)
    torchrun = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "3", "MASTER_ADDR": "host", "MASTER_PORT": "1"}
    for name, value in torchrun.items():
        monkeypatch.setenv(name, value)
    begun = start.prepare(write_run(tmp_path, make_rows([5, 7])), (), ranks=None, timeout_seconds=10)
    assert begun.world is not None
    assert str(begun.world.device) == "cuda:1", "the fourth rank shares the second GPU"


def test_train_says_device_kernel_and_transfers_with_reasons(tmp_path, capfd):
    assert call("train", write_run(tmp_path, make_rows([30, 5])), "--ranks", 2) == 0
    out = capfd.readouterr().out
    assert "2 processes on CPU" in out
    assert out.count("transfers: gloo; because the run computes on the CPU\n") == 1
    assert out.count("attention kernel: torch flash attention for CPU; because the run computes on the CPU\n") == 1


def test_verify_says_kernel_and_transfers(tmp_path, capfd):
    assert call("verify", write_run(tmp_path, make_rows([30, 5])), "--ranks", 2) == 0
    out = capfd.readouterr().out
    assert "transfers: gloo" in out
    assert "attention kernel: " in out


def test_environment_gets_expandable_segments_unless_the_user_has_set_it():
    empty = {}
    prepare_environment(empty)
    assert empty == {"PYTORCH_ALLOC_CONF": "expandable_segments:True", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
    for key in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        own = {key: "max_split_size_mb:64", "PYTORCH_NVML_BASED_CUDA_CHECK": "0"}
        prepare_environment(own)
        assert own == {key: "max_split_size_mb:64", "PYTORCH_NVML_BASED_CUDA_CHECK": "0"}
