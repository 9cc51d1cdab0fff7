"""The GPUs that a process may use, or the reason why none, found out in a child process.

With a driver too old for it, torch trains on the CPU silently, so the child starts CUDA and reports torch's own error;
a process that has started CUDA itself cannot fork ranks that use a GPU.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import socket
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch

from lengthwise.core.processes import let_threads_end

Answer = TypeVar("Answer")
_ANSWER_SECONDS, _END_SECONDS = 600.0, 10.0  # for a child to answer, and to end after its answer
_DRIVER_LIBRARY, _NOT_INITIALIZED = "libcuda.so.1", 3  # CUDA_ERROR_NOT_INITIALIZED
_DRIVER = Path("/dev/nvidiactl")  # exists with the NVIDIA driver, also in a container with access to it


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpus:
    """The number of GPUs that this process may use. why_none: the reason if it is 0."""

    number: int
    why_none: str = ""


def find_gpus() -> Gpus:
    """Count the GPUs that torch can start, in a child process."""
    if not built_for_gpus():
        return Gpus(number=0, why_none=f"torch {torch.__version__} was built without CUDA")
    found = ask_in_a_child(_start_cuda)
    if isinstance(found, Gpus):
        return found
    return Gpus(number=0, why_none=f"the driver ended the process that asked it (exit code {found})")


def ask_in_a_child(ask: Callable[[], Answer]) -> Answer | int | None:
    """Return the result of `ask` in a forked child, or the exit code of a child that ended without an answer.

    A process that has started CUDA calls `ask` itself, because its fork could not use CUDA. A child that does not
    answer is killed.
    """
    if torch.cuda.is_initialized():
        return ask()
    context = multiprocessing.get_context("fork")
    our_pipe, their_pipe = context.Pipe(duplex=False)

    def answer() -> None:
        torch.set_num_threads(1)  # a fork lacks torch's threads and would wait for them
        their_pipe.send(ask())

    child = context.Process(target=answer)
    let_threads_end()
    child.start()
    their_pipe.close()
    try:
        if our_pipe.poll(_ANSWER_SECONDS):
            with suppress(EOFError):
                return our_pipe.recv()
        else:
            child.kill()
        child.join()
        return child.exitcode
    finally:
        child.join(_END_SECONDS)
        child.kill()
        our_pipe.close()


def has_started_cuda() -> bool:
    """Return whether torch or any other library has started CUDA in this process."""
    if torch.cuda.is_initialized():
        return True
    try:
        driver = ctypes.CDLL(_DRIVER_LIBRARY, mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    except OSError:  # not loaded
        return False
    return driver.cuDeviceGetCount(ctypes.byref(ctypes.c_int())) != _NOT_INITIALIZED


def count_gpus() -> int:
    """Return the number of GPUs that this process may use."""
    return find_gpus().number


def built_for_gpus() -> bool:
    """Return whether this build of torch can use any GPU."""
    return torch.version.cuda is not None or torch.version.hip is not None


def has_unused_gpu() -> bool:
    """Return whether the machine has an NVIDIA GPU that CUDA_VISIBLE_DEVICES does not hide."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    hidden = visible is not None and not visible.split(",")[0].strip().startswith(("GPU", "MIG", *"0123456789"))
    return _DRIVER.exists() and not hidden


def gpu_of(device: torch.device) -> str:
    """Return the name of the GPU behind a device, the same in all processes that use it, and unique for NCCL.

    Launchers may show each process its GPU as number 0. NCCL_HOSTID overrides the machine's name, as in NCCL.
    """
    host = os.environ.get("NCCL_HOSTID") or socket.gethostname()
    return f"{host} {torch.cuda.get_device_properties(device).uuid}"


def _start_cuda() -> Gpus:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch also raises what it warns of
            torch.cuda.init()
            return Gpus(number=torch.cuda.device_count())
    except Exception as error:  # noqa: BLE001 - whatever it is, it is the reason
        return Gpus(number=0, why_none=(str(error).splitlines() or [repr(error)])[0].rstrip("."))
