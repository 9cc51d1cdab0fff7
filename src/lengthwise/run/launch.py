"""Start one process per rank on this machine, watch them, and return the result of rank 0.

Children are forked after the imports: 16 ranks start in under half a second, and share the data that the parent read.
If a rank ends early, the run ends. The parent raises the first error that is not about a lost peer, and names a killed
rank with its last step and phase.
"""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import mmap
import multiprocessing
import os
import re
import signal
import stat
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from io import FileIO
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any, TypeVar

import torch

from lengthwise.comm import World
from lengthwise.comm.devices import has_started_cuda
from lengthwise.core.errors import CallbackError, ConfigError, LengthwiseError, RankError, TransferError
from lengthwise.core.processes import end_with_parent, let_threads_end
from lengthwise.run.stacks import keep_stacks, write_stacks

Result = TypeVar("Result")
RankMain = Callable[[World, Callable[[str], None]], Result]
"""The function that a rank runs, from its world and a function that notes its phase, to its result."""

_GRACE_SECONDS = 3.0
_ROW_BYTES = 128
_PLACE, _LOCK = "lengthwise-", "lock"
_LEFT = re.compile(rf"{_LOCK}|rendezvous")  # files that a launcher and its ranks write there
_ASKING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class StatusBoard:
    """The last phase of every rank, in memory that outlives the ranks."""

    def __init__(self, ranks: int) -> None:
        self._memory = mmap.mmap(-1, ranks * _ROW_BYTES)

    def note(self, rank: int, phase: str) -> None:
        """Set the phase of `rank`."""
        row = phase.encode()[:_ROW_BYTES].ljust(_ROW_BYTES, b"\0")
        self._memory[rank * _ROW_BYTES : (rank + 1) * _ROW_BYTES] = row

    def last_seen(self, rank: int) -> str:
        """Return the last phase of `rank`."""
        row = self._memory[rank * _ROW_BYTES : (rank + 1) * _ROW_BYTES]
        return row.rstrip(b"\0").decode(errors="replace") or "start"


class StopRequest:
    """Counts the signals that ask this process to stop: Ctrl-C, SIGTERM, and SIGHUP when the terminal closes.

    ends_at_the_second: a process without a parent that would end it ends itself at the second signal. Python is
    interrupted; if it does not react, during a long operation of torch, the process exits three seconds later.
    announces: print an answer to the first Ctrl-C at once, as a step may take minutes to end. A `StopRequest` takes
    over the signal of an earlier one, in a forked child too.
    """

    def __init__(self, *, ends_at_the_second: bool = False, announces: bool = False) -> None:
        self.signal: int | None = None
        self.times = 0
        self._ends_at_the_second, self._announces = ends_at_the_second, announces

    @contextlib.contextmanager
    def listening(self) -> Iterator[StopRequest]:
        """Note signals inside the block instead of being interrupted by them.

        Only in the main thread, where Python allows signal handlers.
        """
        if threading.current_thread() is not threading.main_thread():
            yield self
            return
        asking = [each for each in _ASKING if each != signal.SIGHUP or not _is_ignored(each)]  # nohup ignores it
        before = {number: signal.signal(number, self._note) for number in asking}
        for handler in before.values():
            earlier = getattr(handler, "__self__", None)
            if isinstance(earlier, StopRequest):
                self.signal = self.signal or earlier.signal
        try:
            with _ending_at_the_second() if self._ends_at_the_second else contextlib.nullcontext():
                yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _note(self, number: int, _frame: object) -> None:
        self.signal = self.signal or number
        self.times += 1
        if self._announces and number == signal.SIGINT and self.times == 1:
            with contextlib.suppress(OSError):
                os.write(2, b"\nstopping after this step; press Ctrl-C again to stop now\n")
        if self.times > 1 and self._ends_at_the_second:
            raise KeyboardInterrupt


def _is_ignored(number: int) -> bool:
    return signal.getsignal(number) == signal.SIG_IGN


@contextlib.contextmanager
def _ending_at_the_second() -> Iterator[None]:
    """Start a thread that ends this process some seconds after a second signal, unless the block has ended.

    Python handles signals only between its own instructions, so the thread reads them from a pipe.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    ended = threading.Event()

    def watch() -> None:
        times = 0
        while times < 2:
            numbers = os.read(reader, 16)
            times += sum(number in _ASKING for number in numbers)
            if not numbers:
                return
        if not ended.wait(_GRACE_SECONDS):
            os.write(
                2, b"interrupted within a step: nothing more was saved; --resume continues from the newest checkpoint\n"
            )
            os._exit(128 + signal.SIGINT)

    thread = threading.Thread(target=watch, name="second signal", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        signal.set_wakeup_fd(before)
        os.close(writer)  # ends the thread
        thread.join()
        os.close(reader)


def launch(
    work: RankMain[Result], ranks: int, *, asks_to_stop: bool = False, gpus: int = 0, stacks: Path | None = None
) -> Result:
    """Run `work` on `ranks` local ranks, a single one in this process, and return the result of rank 0.

    asks_to_stop: `work` listens to Ctrl-C, SIGTERM and SIGHUP itself, so only a second signal ends the ranks. gpus:
    number of GPUs of this machine that the ranks use. stacks: folder for the stacks of the ranks after a timeout
    (`run.stacks`).

    Raises:
        LengthwiseError: the error of a rank, or RankError if a rank died.
        ConfigError: this process has started CUDA, which does not survive a fork.
        KeyboardInterrupt: a signal ended the ranks.
    """
    if ranks == 1:
        return work(World(rank=0, world_size=1, gpus=gpus), lambda _phase: None)
    if gpus and has_started_cuda():
        expected, got = "a process without CUDA, from which ranks can be forked", "a process that has started CUDA"
        remedy = "Start the ranks by torchrun, or start this run before its process uses a GPU."
        raise ConfigError(f"{ranks} ranks", expected=expected, got=got, remedy=remedy)
    with _meeting_place() as folder, StopRequest(announces=asks_to_stop).listening() as stop:
        return _Children(work, ranks, folder / "rendezvous", gpus).outcome(stop, asks=asks_to_stop, stacks=stacks)


@contextlib.contextmanager
def _meeting_place() -> Iterator[Path]:
    """Yield a temporary folder, locked while its launcher or one of its ranks lives.

    A killed launcher leaves its folder; the next launcher on this machine removes it.
    """
    for folder in Path(tempfile.gettempdir()).glob(f"{_PLACE}*"):
        with contextlib.suppress(OSError):  # its owner lives, or another start removes it
            _remove_left(folder)
    is_ours = False
    while not is_ours:
        with (
            tempfile.TemporaryDirectory(prefix=_PLACE, ignore_cleanup_errors=True) as folder,
            (Path(folder) / _LOCK).open("wb") as file,
        ):
            fcntl.flock(file, fcntl.LOCK_EX)
            is_ours = Path(file.name).exists()  # another launcher may have removed the folder before it was locked
            if is_ours:
                yield Path(folder)


def _remove_left(folder: Path) -> None:
    """Remove a folder that a launcher of this user left, if it has no other files and no living owner."""
    found = {each: each.lstat() for each in sorted(folder.iterdir(), reverse=True)}  # the lock is removed last
    if not all(stat.S_ISREG(each.st_mode) and _LEFT.fullmatch(path.name) for path, each in found.items()):
        return
    if {each.st_uid for each in (folder.lstat(), *found.values())} != {os.getuid()} or folder.is_symlink():
        return
    lock = os.open(folder / _LOCK, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        for path in found:
            path.unlink()
        folder.rmdir()
    finally:
        os.close(lock)


def threads_of_each(ranks: int) -> int:
    """Return the number of threads of a local rank: OMP_NUM_THREADS, or an even share of the cores.

    Call it before anything in this process sets torch's threads.
    """
    return torch.get_num_threads() if os.environ.get("OMP_NUM_THREADS") else max(1, (os.cpu_count() or 1) // ranks)


class _Children:
    def __init__(self, work: RankMain[Any], ranks: int, rendezvous: Path, gpus: int) -> None:
        self._board = StatusBoard(ranks)
        self._pipes: list[Connection] = []
        self._processes: list[ForkProcess] = []
        self._results: dict[int, Any] = {}
        self._errors: dict[int, LengthwiseError] = {}
        self._stacks = [
            tempfile.TemporaryFile(dir=rendezvous.parent, buffering=0)  # noqa: SIM115 - until `_end_all`
            for _ in range(ranks)
        ]
        context = multiprocessing.get_context("fork")
        let_threads_end()
        for rank in range(ranks):
            ours, theirs = context.Pipe(duplex=False)
            world = World(
                rank=rank, world_size=ranks, local_rank=rank, local_size=ranks, rendezvous=rendezvous, gpus=gpus
            )
            process = context.Process(
                target=_child,
                args=(work, world, theirs, self._board, os.getpid(), self._stacks[rank]),
                name=f"rank {rank}",
            )
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def outcome(self, stop: StopRequest, *, asks: bool, stacks: Path | None) -> Any:
        try:
            self._watch(stop, asks=asks)
            own = [error for _, error in sorted(self._errors.items()) if not isinstance(error, TransferError)]
            timed_out = bool(self._errors) and not own
            # Read before stacks are asked for, which continues a stopped rank for a while.
            seen = [f"last seen in {self._board.last_seen(rank)}" for rank in range(len(self._processes))]
            alive = {rank: each.pid for rank, each in enumerate(self._processes) if each.pid and each.is_alive()}
            kept = keep_stacks(self._stacks, seen, alive, stacks) if stacks is not None and timed_out else ""
        finally:
            self._end_all()
        if timed_out:
            raise self._with_silent_ranks(min(self._errors.items())[1], seen, kept)
        if own:
            raise own[0]
        return self._results[0]

    def _with_silent_ranks(self, error: LengthwiseError, seen: Sequence[str], stacks: str) -> LengthwiseError:
        """Add the ranks that never answered, one of which caused the timeout, and the place of the stacks."""
        silent = [rank for rank in range(len(self._processes)) if rank not in {*self._results, *self._errors}]
        if not silent:
            remedy = f"{error.remedy}{stacks}"
            return type(error)(error.where, expected=error.expected, got=error.got, remedy=remedy)
        got = f"{error.got}; no report from {'; '.join(f'rank {rank}, {seen[rank]}' for rank in silent)}"
        them = "this rank is" if len(silent) == 1 else "these ranks are"
        remedy = f"Find what {them} waiting for, then start again.{stacks}"
        return type(error)(error.where, expected=error.expected, got=got, remedy=remedy)

    def _watch(self, stop: StopRequest, *, asks: bool) -> None:
        passed_on, deadline = False, float("inf")
        running = dict(enumerate(self._pipes))
        while running and time.monotonic() < deadline:
            ready = wait(list(running.values()), timeout=0.2)
            if stop.signal is not None and not passed_on:
                passed_on = True
                for process in self._processes:
                    if process.pid is not None and process.is_alive():
                        with contextlib.suppress(ProcessLookupError):
                            os.kill(process.pid, stop.signal)
            if stop.times > asks:
                raise KeyboardInterrupt  # asked twice, or the ranks do not listen: end them
            for rank, pipe in list(running.items()):
                if pipe in ready:
                    del running[rank]
                    self._receive(rank, pipe)
            if self._errors and deadline == float("inf"):
                deadline = time.monotonic() + _GRACE_SECONDS  # another rank may report the root cause

    def _receive(self, rank: int, pipe: Connection) -> None:
        try:
            kind, value = pipe.recv()
        except EOFError:
            kind, value = "error", self._death(rank)
        if kind == "interrupted":
            raise KeyboardInterrupt
        received = self._results if kind == "result" else self._errors
        received[rank] = value

    def _death(self, rank: int) -> RankError:
        process = self._processes[rank]
        process.join(_GRACE_SECONDS)
        code = process.exitcode
        how = f"signal {signal.Signals(-code).name}" if code is not None and code < 0 else f"exit status {code}"
        where, got = f"rank {rank}, {self._board.last_seen(rank)}", f"its process died ({how})"
        remedy = "The system often sends SIGKILL when memory runs out: lower capacity_tokens, then start again."
        return RankError(where, expected="the rank to finish", got=got, remedy=remedy)

    def _end_all(self) -> None:
        for process in self._processes:
            process.join(0.0 if len(self._results) < len(self._processes) else _GRACE_SECONDS)
            if process.is_alive():
                process.kill()
        for process, pipe in zip(self._processes, self._pipes, strict=True):
            process.join()
            pipe.close()
        for file in self._stacks:
            file.close()


def _child(
    work: RankMain[Any], world: World, pipe: Connection, board: StatusBoard, launcher: int, stacks: FileIO
) -> None:
    end_with_parent(launcher)
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    # A forked child hangs in its first threaded operation if the parent ever ran one: set one thread first.
    threads = threads_of_each(world.world_size)
    torch.set_num_threads(1)
    torch.set_num_threads(threads)
    with StopRequest().listening():
        try:
            result = work(world, lambda phase: board.note(world.rank, phase))
            message = ("result", None if world.rank else result)
        except LengthwiseError as error:
            if isinstance(error, CallbackError) and error.__cause__ is not None:  # pickling loses the cause
                traceback.print_exception(error.__cause__)
            if isinstance(error, TransferError):
                with contextlib.suppress(OSError):
                    write_stacks(stacks, error)
            message = ("error", error)
        except KeyboardInterrupt:  # all ranks were asked to stop before they began
            message = ("interrupted", None)
        except BaseException as error:  # noqa: BLE001 - the parent must know of any error
            where, expected = f"rank {world.rank}, {board.last_seen(world.rank)}", "the rank to finish"
            got, remedy = f"{type(error).__name__}: {error}", "This is a defect of lengthwise: please report it."
            traceback.print_exc()
            message = ("error", RankError(where, expected=expected, got=got, remedy=remedy))
        pipe.send(message)
    os._exit(message[1].exit_status if message[0] == "error" else 0)
