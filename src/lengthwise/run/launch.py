"""Run a function on every rank: those of torchrun or mpirun, or local ones, which torch's elastic agent starts here.

Local ranks are forked after the imports: 16 ranks start in under half a second. If a rank ends early, all end. The
launcher raises the first error that is not about a lost peer, and names a killed rank with its last step and phase.
"""

from __future__ import annotations

import contextlib
import json
import math
import mmap
import os
import secrets
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch
from torch._C._distributed_c10d import HashStore
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.events import Event, EventSource
from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

from lengthwise.comm import World, world_from_environment
from lengthwise.comm.devices import has_started_cuda
from lengthwise.core.errors import (
    CallbackError,
    ConfigError,
    LengthwiseError,
    Problems,
    RankError,
    TransferError,
    as_values,
    from_values,
)
from lengthwise.core.processes import end_with_parent, let_threads_end
from lengthwise.run.stop import StopRequest, asking_signals

Result = TypeVar("Result")
RankMain = Callable[[World, Callable[[str], None]], Result]
"""Function that a rank runs: from its world and a function that notes its phase, to its result."""

_GRACE_SECONDS, _POLL_SECONDS = 3.0, 0.05  # after the first rank has ended, for a rank that may know the cause
_ROW_BYTES = 128
_INTERRUPTED = b"interrupted"  # stands for a rank's error
_AGENT_SIGNALS = "TORCHELASTIC_SIGNALS_TO_HANDLE"


def threads_of_each(ranks: int) -> int:
    """Return a local rank's threads: OMP_NUM_THREADS, or a share of the cores; call it before torch's are set."""
    return torch.get_num_threads() if os.environ.get("OMP_NUM_THREADS") else max(1, (os.cpu_count() or 1) // ranks)


class _OneNode(RendezvousHandler):
    """The rendezvous of an agent without other nodes; it opens no port and starts no thread."""

    def __init__(self) -> None:
        self._id = secrets.token_hex(8)

    def get_backend(self) -> str:
        return "one node"

    def next_rendezvous(self) -> RendezvousInfo:
        return RendezvousInfo(HashStore(), 0, 1, RendezvousStoreInfo("127.0.0.1", 0))

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self._id

    def shutdown(self) -> bool:
        return True


class _SameStreams(LogsSpecs):
    """Leaves the standard streams of this process to the ranks, and makes no folder of logs."""

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        streams = dict.fromkeys(envs, "")
        return LogsDest(stdouts=streams, stderrs=streams, error_files=dict.fromkeys(envs, os.devnull))

    @property
    def root_log_dir(self) -> str:
        return os.devnull


class _Agent(LocalElasticAgent):
    """torch's agent; it raises the error that ended the ranks, and passes signals on.

    A failing rank writes its error into memory shared with this process, and exits. The others lose it and exit, too;
    after `_GRACE_SECONDS` the rest are killed. stop: signals of this process. asks_to_stop: as in `on_ranks`.
    """

    def __init__(
        self, work: RankMain[Any], ranks: int, *, gpus: int, max_restarts: int, stop: StopRequest, asks_to_stop: bool
    ) -> None:
        self._work, self._gpus, self._launcher = work, gpus, os.getpid()
        self._stop, self._asks_to_stop, self._passed_on = stop, asks_to_stop, False
        self._phases = mmap.mmap(-1, ranks * _ROW_BYTES)
        self._memory: list[int] = []  # unnamed files: the meeting place of ranks, and an error per rank
        self._ended: dict[int, int] = {}  # exit codes; -n for signal n
        self._deadline = math.inf
        self._error: LengthwiseError | None = None
        spec = WorkerSpec(
            role="rank",
            local_world_size=ranks,
            rdzv_handler=_OneNode(),
            entrypoint=self._be_rank,
            max_restarts=max_restarts,
            monitor_interval=_POLL_SECONDS,
        )
        super().__init__(spec, _SameStreams(), start_method="fork")

    def outcome(self) -> Any:
        """Run the ranks to their end; return rank 0's result, or raise the error that ended them."""
        run: Any = self.run  # its type is hidden by a decorator
        try:
            result = run()
        finally:
            self._forget()
        if self._error is not None and result.is_failed():
            raise self._error
        return result.return_values[0]

    def _forget(self) -> None:
        for file in self._memory:
            os.close(file)
        self._memory, self._ended, self._deadline = [], {}, math.inf

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:  # pyright: ignore - decorated
        agent: Any = super()
        self._forget()
        self._passed_on = False
        self._memory = [os.memfd_create("lengthwise") for _ in range(1 + len(worker_group.workers))]
        self._phases[:] = bytes(len(self._phases))
        sys.stdout.flush()  # otherwise every rank would write the buffered output
        let_threads_end()
        os.environ[_AGENT_SIGNALS] = ""  # otherwise the agent replaces the handlers of `StopRequest`
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "Unable to enable fault handler")  # a notebook's stderr
                return agent._start_workers(worker_group)
        finally:
            del os.environ[_AGENT_SIGNALS]

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:  # pyright: ignore - decorated
        agent: Any = super()
        assert self._pcontext is not None, "the ranks have been started"
        pids = self._pcontext.pids()
        if self._stop.times > self._asks_to_stop:
            raise KeyboardInterrupt  # the second request, or the ranks do not listen
        if self._stop.signal is not None and not self._passed_on:
            self._passed_on = True
            for rank in pids.keys() - self._ended.keys():
                os.kill(pids[rank], self._stop.signal)
        self._ended |= {rank: code for rank, pid in pids.items() if (code := _exit_code(pid)) is not None}
        if not self._ended:
            result = agent._monitor_workers(worker_group)
            if not result.is_failed():
                return result
            self._ended = {rank: failed.exitcode for rank, failed in result.failures.items()}
        self._deadline = min(self._deadline, time.monotonic() + _GRACE_SECONDS)
        if len(self._ended) < len(pids) and time.monotonic() < self._deadline:
            return RunResult(state=WorkerState.HEALTHY)
        self._error = self._cause(len(pids))
        if not isinstance(self._error, RankError | TransferError):
            self._remaining_restarts = 0  # a restart would meet it again
        return RunResult(state=WorkerState.FAILED)

    def _shutdown(self, death_sig: signal.Signals = signal.SIGKILL, timeout: int = 30) -> None:
        del death_sig  # ranks take SIGTERM as a request to save and stop
        super()._shutdown(signal.SIGKILL, timeout)

    def _construct_event(self, state: str, source: EventSource, *_: Any, **__: Any) -> Event:
        return Event(state, source)  # without the host's name, which the base class asks the network for

    def _cause(self, ranks: int) -> LengthwiseError:
        """Return the error of a rank that failed by itself, else of one that lost or waited for another."""
        errors = dict[int, LengthwiseError]()
        for rank in range(ranks):
            report = os.pread(self._memory[1 + rank], os.fstat(self._memory[1 + rank]).st_size, 0)
            code = self._ended.get(rank)
            if report == _INTERRUPTED:
                raise KeyboardInterrupt
            if report:
                problems = from_values(json.loads(report))
                errors[rank] = problems[0] if len(problems) == 1 else Problems(problems)
            elif code is not None:
                errors[rank] = self._death(rank, code)
        own = [error for _, error in sorted(errors.items()) if not isinstance(error, TransferError)]
        if own:
            return own[0]
        error, silent = min(errors.items())[1], [rank for rank in range(ranks) if rank not in errors]
        if not silent:
            return error
        seen = "; ".join(f"rank {rank}, last seen in {self._last_seen(rank)}" for rank in silent)
        got = f"{error.got}; no report from {seen}"
        them = "this rank is" if len(silent) == 1 else "these ranks are"
        remedy = f"Find what {them} waiting for, then start again."
        return type(error)(error.where, expected=error.expected, got=got, remedy=remedy)

    def _death(self, rank: int, code: int) -> RankError:
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
        where, got = f"rank {rank}, {self._last_seen(rank)}", f"its process died ({how})"
        remedy = "The system often sends SIGKILL when memory runs out: lower capacity_tokens, then start again."
        return RankError(where, expected="the rank to finish", got=got, remedy=remedy)

    def _note(self, rank: int, phase: str) -> None:
        row = phase.encode()[:_ROW_BYTES].ljust(_ROW_BYTES, b"\0")
        self._phases[rank * _ROW_BYTES : (rank + 1) * _ROW_BYTES] = row

    def _last_seen(self, rank: int) -> str:
        row = self._phases[rank * _ROW_BYTES : (rank + 1) * _ROW_BYTES]
        return row.rstrip(b"\0").decode(errors="replace") or "start"

    def _be_rank(self) -> Any:
        """Run the work as a rank; if it fails, write the error into the shared memory and exit."""
        end_with_parent(self._launcher)
        for number in asking_signals():
            signal.signal(number, _interrupt_once)  # until `work` listens
        found, meeting = world_from_environment(), Path(f"/proc/self/fd/{self._memory[0]}")
        assert found is not None, "the agent has set it"
        world = replace(found, rendezvous=meeting, gpus=self._gpus, ended=str(self._error or ""))
        # A forked child hangs in its first threaded operation if the parent ever ran one: set one thread first.
        threads = threads_of_each(world.world_size)
        torch.set_num_threads(1)
        torch.set_num_threads(threads)
        try:
            result = self._work(world, partial(self._note, world.rank))
            _ignore_signals()  # the work is done, and the agent reads the result
            Finalize(None, _leave, exitpriority=0)
            return None if world.rank else result
        except KeyboardInterrupt:
            report, status = _INTERRUPTED, 128 + signal.SIGINT
        except BaseException as error:  # noqa: BLE001 - the launcher must know of any error
            problem = self._problem(error, world.rank)
            problems = problem.problems if isinstance(problem, Problems) else [problem]
            report, status = json.dumps(as_values(problems)).encode(), problem.exit_status
        os.pwrite(self._memory[1 + world.rank], report, 0)
        return _leave(status)

    def _problem(self, error: BaseException, rank: int) -> LengthwiseError:
        """Return the error as the launcher raises it; print a traceback that it would lack."""
        if isinstance(error, LengthwiseError):
            if isinstance(error, CallbackError) and error.__cause__ is not None:
                traceback.print_exception(error.__cause__)
            return error
        traceback.print_exception(error)
        where, got = f"rank {rank}, {self._last_seen(rank)}", f"{type(error).__name__}: {error}"
        remedy = "This is a defect of lengthwise: please report it."
        return RankError(where, expected="the rank to finish", got=got, remedy=remedy)


def _ignore_signals() -> None:
    for number in asking_signals():
        signal.signal(number, signal.SIG_IGN)


def _interrupt_once(_number: int, _frame: object) -> None:
    _ignore_signals()  # the launcher passes a terminal's signal on while the rank cleans up
    raise KeyboardInterrupt


def _leave(status: int = 0) -> NoReturn:
    """Exit without waiting for threads, which may be those of the forked process."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(status)


def _exit_code(pid: int) -> int | None:
    """Return the exit code of an ended child (-n for signal n) without reaping it, or None."""
    with contextlib.suppress(ChildProcessError):  # reaped, like all ended children
        ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if ended is not None:
            return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
    return None


def on_ranks(
    work: RankMain[Result], ranks: int, *, gpus: int = 0, max_restarts: int = 0, asks_to_stop: bool = False
) -> Result:
    """Run `work` on every rank; return its result on the rank that this process is, or rank 0's.

    Under torchrun or mpirun, and in a run of one rank, this process is a rank. Otherwise it starts `ranks` local
    processes, and restarts all of them, at most `max_restarts` times, after one died or hung. gpus: number of GPUs of
    this machine that the ranks use. asks_to_stop: True if `work` listens to Ctrl-C, SIGTERM and SIGHUP itself, so that
    only a second signal ends the ranks, by KeyboardInterrupt.
    """
    found = World(rank=0, world_size=1) if ranks == 1 else None
    if (world := world_from_environment() or found) is not None:
        return work(replace(world, gpus=gpus), lambda _phase: None)
    if gpus and has_started_cuda():
        expected, got = "a process without CUDA, from which ranks can be forked", "a process that has started CUDA"
        remedy = "Start the ranks by torchrun, or start this run before its process uses a GPU."
        raise ConfigError(f"{ranks} ranks", expected=expected, got=got, remedy=remedy)
    with StopRequest(announces=asks_to_stop).listening() as stop:
        agent = _Agent(work, ranks, gpus=gpus, max_restarts=max_restarts, stop=stop, asks_to_stop=asks_to_stop)
        return agent.outcome()
