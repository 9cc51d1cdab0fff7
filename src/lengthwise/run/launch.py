"""Starts one process a rank on this machine, watches over them, and brings back what rank 0 returned.

Children are forked after the imports: 16 ranks start in under half a second, and data read by the parent is shared.
Whatever ends a rank ends the run: the first error of its own (not that a peer is gone) is raised in the parent, and a
rank that was killed is named with the step and phase it was last seen in.
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
"""What a rank runs: (its world, a function that notes its phase) -> result."""

_GRACE_SECONDS = 3.0
_ROW_BYTES = 128
_PLACE, _LOCK = "lengthwise-", "lock"
_LEFT = re.compile(rf"{_LOCK}|rendezvous")  # what a launcher and its ranks write there
_ASKING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class StatusBoard:
    """Where each rank was last seen, in memory that outlives it."""

    def __init__(self, ranks: int) -> None:
        self._memory = mmap.mmap(-1, ranks * _ROW_BYTES)

    def note(self, rank: int, phase: str) -> None:
        """Say where `rank` is."""
        row = phase.encode()[:_ROW_BYTES].ljust(_ROW_BYTES, b"\0")
        self._memory[rank * _ROW_BYTES : (rank + 1) * _ROW_BYTES] = row

    def last_seen(self, rank: int) -> str:
        """Return where `rank` was last seen."""
        row = self._memory[rank * _ROW_BYTES : (rank + 1) * _ROW_BYTES]
        return row.rstrip(b"\0").decode(errors="replace") or "start"


class StopRequest:
    """Whether, and how often, someone asked this process to stop (Ctrl-C, SIGTERM, or SIGHUP: the terminal is gone).

    A process without a parent that would end it does so itself when asked twice (`ends_at_the_second`): Python is
    interrupted, and where that cannot be, in minutes of one operation of torch, the process ends three seconds later.
    One that listens after another, in a forked child too, knows what was asked before: nobody has to ask again.
    announces: whether it answers the first Ctrl-C at once, in words, where a step may take minutes to end.
    """

    def __init__(self, *, ends_at_the_second: bool = False, announces: bool = False) -> None:
        self.signal: int | None = None
        self.times = 0
        self._ends_at_the_second, self._announces = ends_at_the_second, announces

    @contextlib.contextmanager
    def listening(self) -> Iterator[StopRequest]:
        """Note signals inside the block instead of being interrupted by them.

        In a thread that is not the main one nothing is noted: Python lets signals be handled in the main one alone.
        """
        if threading.current_thread() is not threading.main_thread():
            yield self
            return
        asking = [each for each in _ASKING if each != signal.SIGHUP or not _is_ignored(each)]  # by nohup
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
                os.write(2, b"\nstopping after this step; Ctrl-C again: now\n")
        if self.times > 1 and self._ends_at_the_second:
            raise KeyboardInterrupt


def _is_ignored(number: int) -> bool:
    return signal.getsignal(number) == signal.SIG_IGN


@contextlib.contextmanager
def _ending_at_the_second() -> Iterator[None]:
    """End this process some seconds after a second signal, if the block has not ended then: a thread sees to it.

    Python handles signals between its own instructions; a pipe gets them at once.
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
                2, b"interrupted: within a step, nothing more was saved; --resume goes on from the newest checkpoint\n"
            )
            os._exit(128 + signal.SIGINT)

    thread = threading.Thread(target=watch, name="second signal", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        signal.set_wakeup_fd(before)
        os.close(writer)  # which ends the thread
        thread.join()
        os.close(reader)


def launch(
    work: RankMain[Result], ranks: int, *, asks_to_stop: bool = False, gpus: int = 0, stacks: Path | None = None
) -> Result:
    """Run `work` on `ranks` local ranks, in this process when it is one, and return the result of rank 0.

    Ctrl-C, SIGTERM and SIGHUP end the ranks; with `asks_to_stop`, where `work` listens itself, only the second does.
    `gpus`: how many of this machine they use.
    `stacks`: a folder for where each rank stood, should one wait in vain (`run.stacks`).

    Raises:
        LengthwiseError: what a rank raised, or RankError for one that died.
        ConfigError: this process has started CUDA, which does not survive a fork.
        KeyboardInterrupt: a signal ended the ranks.
    """
    if ranks == 1:
        return work(World(rank=0, world_size=1, gpus=gpus), lambda _phase: None)
    if gpus and has_started_cuda():
        expected, got = "a process that has not started CUDA, from which ranks can be forked", "one that has"
        remedy = "Start the ranks by torchrun, or this run before anything in its process uses a GPU."
        raise ConfigError(f"{ranks} ranks", expected=expected, got=got, remedy=remedy)
    with _meeting_place() as folder, StopRequest(announces=asks_to_stop).listening() as stop:
        return _Children(work, ranks, folder / "rendezvous", gpus).outcome(stop, asks=asks_to_stop, stacks=stacks)


@contextlib.contextmanager
def _meeting_place() -> Iterator[Path]:
    """Give a temporary folder, locked while its launcher or one of its ranks lives; those of killed ones are removed.

    Nothing removes the folder of a launcher that is killed, but the next one on this machine.
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
            is_ours = Path(file.name).exists()  # another start may have had it first, and taken us for dead
            if is_ours:
                yield Path(folder)


def _remove_left(folder: Path) -> None:
    """Remove a folder that a launcher of this user left; one of somebody else, or with anything else in it, stays."""
    found = {each: each.lstat() for each in sorted(folder.iterdir(), reverse=True)}  # the lock is the last to go
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
    """Return how many threads each of several local ranks computes with, by OMP_NUM_THREADS or an even share of cores.

    Before anything in this process has set its own.
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
            # Before stacks are asked for: that lets a rank which was stopped go on for a while.
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
        """Say beside a time-out which ranks never answered, one of them is why, and where stacks are."""
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
                raise KeyboardInterrupt  # asked twice, or nobody listens: the ranks are ended without another word
            for rank, pipe in list(running.items()):
                if pipe in ready:
                    del running[rank]
                    self._receive(rank, pipe)
            if self._errors and deadline == float("inf"):
                deadline = time.monotonic() + _GRACE_SECONDS  # others may know better what went wrong

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
    # A forked child hangs in its first threaded operation if the parent ever ran one: go through one thread first.
    threads = threads_of_each(world.world_size)
    torch.set_num_threads(1)
    torch.set_num_threads(threads)
    with StopRequest().listening():
        try:
            result = work(world, lambda phase: board.note(world.rank, phase))
            message = ("result", None if world.rank else result)
        except LengthwiseError as error:
            if isinstance(error, CallbackError) and error.__cause__ is not None:  # the pipe does not carry it
                traceback.print_exception(error.__cause__)
            if isinstance(error, TransferError):
                with contextlib.suppress(OSError):
                    write_stacks(stacks, error)
            message = ("error", error)
        except KeyboardInterrupt:  # all ranks were asked to stop before they had begun
            message = ("interrupted", None)
        except BaseException as error:  # noqa: BLE001 - whatever it is, the parent must know it
            where, expected = f"rank {world.rank}, {board.last_seen(world.rank)}", "the rank to finish"
            got, remedy = f"{type(error).__name__}: {error}", "This is a defect of lengthwise: please report it."
            traceback.print_exc()
            message = ("error", RankError(where, expected=expected, got=got, remedy=remedy))
        pipe.send(message)
    os._exit(message[1].exit_status if message[0] == "error" else 0)
