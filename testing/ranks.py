"""Real processes, one a rank: forked here, joined as a run's are, with the results of all ranks brought back."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any, TypeVar

import torch

from lengthwise.comm import SoloTransport, TorchTransport, World
from lengthwise.core.errors import LengthwiseError, RankError, TransferError
from lengthwise.core.processes import end_with_parent, let_threads_end

Result = TypeVar("Result")
_GRACE_SECONDS = 3.0  # after the first error, which may not be the cause


def fork_ranks(
    work: Callable[[World], Result], ranks: int, *, gpus: int = 0, timeout_seconds: float = 300.0
) -> list[Result]:
    """Call `work` in one forked process a rank, with its world; return what each returned, by rank.

    Raises:
        LengthwiseError: of the lowest rank that failed by itself, else of one that lost another; RankError if one died.
    """
    context, pipes, processes = multiprocessing.get_context("fork"), dict[int, Connection](), list[ForkProcess]()
    let_threads_end()
    with tempfile.TemporaryDirectory(prefix="lengthwise-test-") as folder:
        for rank in range(ranks):
            pipes[rank], theirs = context.Pipe(duplex=False)
            meeting = Path(folder) / "ranks" if ranks > 1 else None
            world = World(rank=rank, world_size=ranks, local_rank=rank, local_size=ranks, rendezvous=meeting, gpus=gpus)
            processes.append(context.Process(target=_be_rank, args=(work, world, theirs, os.getpid())))
            processes[-1].start()
            theirs.close()
        try:
            found = _received(pipes, processes, time.monotonic() + timeout_seconds)
        finally:
            for process in processes:
                process.kill()
                process.join()
    failed = [each for _, each in sorted(found.items()) if isinstance(each, LengthwiseError)]
    failed.sort(key=lambda error: isinstance(error, TransferError))
    if failed:
        raise failed[0]
    return [found[rank][0] for rank in range(ranks)]


def _received(pipes: dict[int, Connection], processes: list[ForkProcess], deadline: float) -> dict[int, Any]:
    """Return the result of each rank, in a tuple, or its error; without those that are late after an error."""
    found = dict[int, Any]()
    while len(found) < len(pipes) and (left := deadline - time.monotonic()) > 0:
        ready = wait([pipe for rank, pipe in pipes.items() if rank not in found], timeout=left)
        for rank, pipe in pipes.items():
            if pipe not in ready:
                continue
            try:
                found[rank] = pickle.loads(pipe.recv_bytes())  # from our own child
            except EOFError:
                processes[rank].join()
                got = f"its process died (exit code {processes[rank].exitcode})"
                found[rank] = RankError(f"rank {rank}", expected="the rank to finish", got=got, remedy="")
            if isinstance(found[rank], LengthwiseError):
                deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
    if len(found) < len(pipes) and not any(isinstance(each, LengthwiseError) for each in found.values()):
        late = [rank for rank in pipes if rank not in found]
        raise RankError(f"ranks {late}", expected="an end in time", got="none", remedy="")
    return found


def _be_rank(work: Callable[[World], Any], world: World, pipe: Connection, parent: int) -> None:
    end_with_parent(parent)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # first: a forked child hangs in its first threaded operation if the parent ever ran one
    torch.set_num_threads(threads)
    try:
        sent = pickle.dumps((work(world),))
    except LengthwiseError as error:
        sent = pickle.dumps(error)
    except BaseException as error:  # noqa: BLE001 - whatever it is, the parent raises it
        traceback.print_exc()
        got = f"{type(error).__name__}: {error}"
        sent = pickle.dumps(RankError(f"rank {world.rank}", expected="the rank to finish", got=got, remedy=""))
    pipe.send_bytes(sent)
    os._exit(0)


def run_ranks(
    work: Callable[[TorchTransport | SoloTransport], Result],
    ranks: int,
    *,
    timeout_seconds: float = 120.0,
    before_joining: Callable[[int], None] | None = None,
) -> list[Result]:
    """Call `work` in one forked process a rank, joined over gloo; return what each returned, by rank.

    `before_joining` is called in each of them with its rank, before it opens a socket.

    Raises:
        LengthwiseError: see `fork_ranks`.
    """

    def rank_work(world: World) -> Result:
        if before_joining is not None:
            before_joining(world.rank)
        transport = SoloTransport() if ranks == 1 else TorchTransport(world, timeout_seconds=timeout_seconds)
        result = work(transport)
        transport.close()
        return result

    return fork_ranks(rank_work, ranks)
