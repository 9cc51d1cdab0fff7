"""Which GPUs a process may use: asked of torch itself, and never guessed from a count."""

import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from lengthwise.comm import devices
from lengthwise.comm.devices import Gpus, count_gpus, find_gpus, has_started_cuda, has_unused_gpu
from lengthwise.core.errors import ConfigError
from lengthwise.run.launch import on_ranks

TOO_OLD = "The NVIDIA driver on your system is too old (found version 11040).\nPlease update your GPU driver."


@pytest.fixture
def cuda(monkeypatch):
    """Make torch one of CUDA; returned is what its parts do, to be changed."""
    parts = SimpleNamespace(init=lambda: None, number=3, initialized=False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "init", lambda: parts.init())
    monkeypatch.setattr(torch.cuda, "device_count", lambda: parts.number)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: parts.initialized)
    return parts


def _raise(error):
    raise error


def test_torch_is_started_in_a_child_only(cuda, tmp_path):
    cuda.init = lambda: (tmp_path / "pid").write_text(str(os.getpid()))
    assert count_gpus() == 3
    assert int((tmp_path / "pid").read_text()) != os.getpid()


def test_process_that_has_started_cuda_asks_no_child(cuda):
    cuda.initialized, cuda.number, here = True, 2, os.getpid()
    cuda.init = lambda: os.getpid() == here or _raise(RuntimeError("Cannot re-initialize CUDA in forked subprocess"))
    assert find_gpus() == Gpus(number=2)


def test_cuda_that_a_library_has_started_is_seen_by_what_its_driver_answers(monkeypatch):
    answers = iter([3, 0, 0])
    driver = SimpleNamespace(cuDeviceGetCount=lambda _number: next(answers))
    assert not has_started_cuda(), "nobody has loaded it"
    monkeypatch.setattr(devices.ctypes, "CDLL", lambda _name, mode: driver)
    assert not has_started_cuda(), "loaded, and not started"
    assert has_started_cuda()
    with pytest.raises(ConfigError, match="expected a process without CUDA"):
        on_ranks(lambda *_: None, 2, gpus=1)


def test_a_child_that_does_not_answer_is_killed(monkeypatch):
    monkeypatch.setattr(devices, "_ANSWER_SECONDS", 0.2)
    assert devices.ask_in_a_child(lambda: time.sleep(60)) == -signal.SIGKILL


@pytest.mark.parametrize(
    ("init", "said"),
    [
        # It is counted all the same, where NVML does the counting.
        (lambda: _raise(RuntimeError(TOO_OLD)), "The NVIDIA driver on your system is too old (found version 11040)"),
        (lambda: os._exit(7), "the driver ended the process that asked it (exit code 7)"),
        (None, f"torch {torch.__version__} was built without CUDA"),
    ],
)
def test_without_a_gpu_that_works_there_is_none_and_why_is_said(cuda, monkeypatch, init, said):
    cuda.init = init
    if init is None:
        monkeypatch.setattr(torch.version, "cuda", None)
        monkeypatch.setattr(torch.version, "hip", None, raising=False)
    assert find_gpus() == Gpus(number=0, why_none=said)


@pytest.mark.parametrize(("visible", "expected"), [(None, True), ("3,1", True), ("", False), ("-1", False)])
def test_unused_gpu_is_one_that_nobody_has_hidden(monkeypatch, tmp_path, visible, expected):
    monkeypatch.setattr(devices, "_DRIVER", tmp_path / "nvidiactl")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert not has_unused_gpu(), "no driver"
    Path(tmp_path / "nvidiactl").touch()
    assert has_unused_gpu() == expected
