"""Which GPUs a process may use, and why none, asked in a child process.

A driver too old for this torch makes it train on the CPU in silence, so the child starts CUDA and reports torch's own
words; a process that has started CUDA itself cannot fork ranks that use a GPU.
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
from typing import TypeVar, cast

import torch

from lengthwise.core.errors import LengthwiseError, RankError
from lengthwise.core.processes import let_threads_end

Answer = TypeVar("Answer")
_ANSWER_SECONDS, _END_SECONDS = 600.0, 10.0  # of a child: to answer, and to end after its answer
_DRIVER_LIBRARY, _NOT_INITIALIZED = "libcuda.so.1", 3  # CUDA_ERROR_NOT_INITIALIZED
_DRIVER = Path("/dev/nvidiactl")  # there where the NVIDIA driver, or a container that was given it, is


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpus:
    """How many GPUs this process may use; `why_none` in words where it is none."""

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
    """Return what `ask` says of CUDA in a forked child; the exit code of a child that ended without an answer.

    A process that has started CUDA itself asks here: a fork of it could not. A child that does not answer is killed.
    """
    if torch.cuda.is_initialized():
        return ask()
    context = multiprocessing.get_context("fork")
    our_pipe, their_pipe = context.Pipe(duplex=False)

    def answer() -> None:
        torch.set_num_threads(1)  # a fork has none of the threads that torch computed with before, and would wait
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


def call_apart(call: Callable[[], Answer], *, gpus: int) -> Answer:
    """Return what `call` returns; where ranks will use GPUs, from a forked child.

    Whatever imports or runs a model may start CUDA (flash-linear-attention does when it is imported, Hugging Face's
    masks when they are made), and a process that has started it cannot fork ranks that use a GPU.

    Raises:
        RankError: the child died.
        LengthwiseError: what `call` raised.
    """
    if not gpus:
        return call()

    def answer() -> tuple[Answer | None, LengthwiseError | None]:
        try:
            return call(), None
        except LengthwiseError as error:
            return None, error

    found = ask_in_a_child(answer)
    if not isinstance(found, tuple):
        remedy = "Its own message is above."
        raise RankError(
            "model", expected="the process that checks it to finish", got=f"exit code {found}", remedy=remedy
        )
    returned, error = found
    if error is not None:
        raise error
    return cast("Answer", returned)


def has_started_cuda() -> bool:
    """Whether this process has started CUDA, by torch or by another library: its driver then counts devices."""
    if torch.cuda.is_initialized():
        return True
    try:
        driver = ctypes.CDLL(_DRIVER_LIBRARY, mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    except OSError:  # nobody has loaded it
        return False
    return driver.cuDeviceGetCount(ctypes.byref(ctypes.c_int())) != _NOT_INITIALIZED


def count_gpus() -> int:
    """Count the GPUs that this process may use."""
    return find_gpus().number


def built_for_gpus() -> bool:
    """Whether this build of torch can use any GPU."""
    return torch.version.cuda is not None or torch.version.hip is not None


def has_unused_gpu() -> bool:
    """Whether the machine has an NVIDIA GPU that was not hidden from this process on purpose."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    hidden = visible is not None and not visible.split(",")[0].strip().startswith(("GPU", "MIG", *"0123456789"))
    return _DRIVER.exists() and not hidden


def gpu_of(device: torch.device) -> str:
    """Name the GPU behind a device, alike in all processes that use it and in no others that NCCL can tell apart.

    Launchers may show each process one GPU as number 0; NCCL_HOSTID is the name of the machine.
    """
    host = os.environ.get("NCCL_HOSTID") or socket.gethostname()
    return f"{host} {torch.cuda.get_device_properties(device).uuid}"


def _start_cuda() -> Gpus:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what torch warns of, it also raises
            torch.cuda.init()
            return Gpus(number=torch.cuda.device_count())
    except Exception as error:  # noqa: BLE001 - whatever it is, it is the reason
        return Gpus(number=0, why_none=(str(error).splitlines() or [repr(error)])[0].rstrip("."))
