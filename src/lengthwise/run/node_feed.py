"""The feed of a stream in a process of every node, and the clients of its ranks.

The first rank of a node starts the process, and restarts it if it ends; other ranks find its socket by a name that rank
0 draws. A rank repeats a request that the end of the process interrupts. All nodes read the same stream: ranks agree on
its files, and on the digest of the rows of every step.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import secrets
import shutil
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from multiprocessing.connection import Client
from pathlib import Path
from typing import Any

from lengthwise.comm import Transport, World, agree, broadcast_bytes, share_numbers
from lengthwise.core.errors import LengthwiseError, RankError, TransferError
from lengthwise.core.names import counted
from lengthwise.core.processes import ending_signals_blocked, start_module
from lengthwise.data.feed import FeedClient, FeedSpec
from lengthwise.data.feed_dataset import FeedDataset
from lengthwise.run.workers import usable_cores

_START_SECONDS = 60.0  # extra time for the first answer of a process, which imports and looks for files
_AGAIN_SECONDS = 0.05  # before a request is repeated
_MOST_PATH_BYTES = 100  # of a socket: 107 on Linux, 103 on macOS
_SOON_SECONDS, _ENDS = 20.0, 3  # a process that ends so soon, so often in a row, is not restarted
_MOST_PROCESSES = 16  # tokenizing: 20 to 50 MB/s of text, more than steps take
_GONE = "See what it printed, and whether the machine ran out of memory; then go on from the newest checkpoint."


def tokenizing_processes(ranks: int, cores: int) -> int:
    """Return the number of tokenizing processes of a node, half of its free cores; 1 is the feed's own process."""
    return max(1, min((cores - ranks - 1) // 2, _MOST_PROCESSES))


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedRank:
    """A rank that takes the rows of `dataset` from feeds.

    say: function that is called with lines for the user. cleanup: stack that ends the processes this rank starts. A
    rank with an error should close it last: the other ranks fail without the processes, and the launcher then gives
    this rank a few seconds to report its error.
    """

    dataset: FeedDataset
    world: World
    transport: Transport
    timeout_seconds: float
    say: Callable[[str], None]
    cleanup: contextlib.ExitStack

    def attach(self, clients: Sequence[FeedClient], number: int, files: str) -> None:
        """Use these clients; check that the ranks agree on the files, which errors call `files`. Collective."""
        self.dataset.on_restart = self.say
        self.dataset.attach(clients, number)
        if self.transport.world_size > 1:
            agree(self.transport, self.dataset.digest(), files)


@contextlib.contextmanager
def node_feed(rank: FeedRank) -> Iterator[None]:
    """Feed the dataset from a process of each node inside the block. Collective."""
    dataset, world, transport = rank.dataset, rank.world, rank.transport
    transport.phase = "start, feed of the stream"
    drawn = broadcast_bytes(transport, None if transport.rank else secrets.token_hex(8).encode()).decode()
    first = world.rank - world.local_rank
    ranks = [int(row[0]) for row in share_numbers(transport, [float(first)])].count(first)
    processes, path = tokenizing_processes(ranks, usable_cores()), socket_path(f"lengthwise-rows-{drawn}-{first}")
    where, started, error = f"rank {transport.rank}, {transport.phase}", None, None
    if not world.local_rank:
        try:
            started = rank.cleanup.enter_context(_Process(path, replace(dataset.specs[0], clients=ranks), processes))
        except OSError as raised:
            remedy = "See what it printed, and that TMPDIR is a folder of this machine."
            error = RankError(where, expected="a process that reads the stream", got=f"{raised}", remedy=remedy)
    if any(row[0] for row in share_numbers(transport, [float(error is not None)])):
        remedy = "See the error of the rank that should have started it."
        raise error or TransferError(where, expected="a feed on each node", got="none on one", remedy=remedy)
    client = _Client(path, transport, rank.timeout_seconds, started)
    try:
        rank.attach([client], world.local_rank, "files of the stream")
        rank.say(f"streaming: rows are tokenized ahead, in {counted(processes, 'process')} of each node")
        yield
        transport.phase = "end, feed of the stream"
        share_numbers(transport, [0.0])  # no rank of this node asks any more
    except TransferError:
        if started is not None and started.has_ended:  # another rank met that first, and ended
            raise client.gone() from None
        raise


def socket_path(name: str) -> Path:
    """Return the path of a node's socket: in a folder of TMPDIR, or of /tmp if that path is too long."""
    path = Path(tempfile.gettempdir(), name, "socket")
    return path if len(os.fsencode(path)) <= _MOST_PATH_BYTES else Path("/tmp", name, "socket")  # noqa: S108 - 0700


class _Process:
    """A process that answers at a socket inside the block, and is restarted if it ends.

    The socket stays, so ranks that connect meanwhile wait for the next process. OSError if it cannot start.
    """

    def __init__(self, path: Path, spec: FeedSpec, processes: int) -> None:
        self._path, self._spec, self._processes = path, pickle.dumps(spec), processes
        self._lock, self._is_over = threading.Lock(), False
        self.why = "no socket to ask it at"  # the reason why it does not answer

    def __enter__(self) -> _Process:
        self._listening = socket.socket(socket.AF_UNIX)
        self._path.parent.mkdir(mode=0o700)
        try:
            self._listening.bind(str(self._path))
            self._listening.listen(socket.SOMAXCONN)  # ranks that connect from now on wait for the process
            self._begin()
        except BaseException:
            self._close()
            raise
        self._watching = threading.Thread(target=self._watch, name="feed's process", daemon=True)
        self._watching.start()
        return self

    def _begin(self) -> None:
        with ending_signals_blocked():
            number, arguments = self._listening.fileno(), (f"{self._processes}", str(self._path.parent))
            module, of_start = "lengthwise.run.node_feed_process", {"stdin": subprocess.PIPE, "pass_fds": [number]}
            self._began, self._process = time.monotonic(), start_module(module, f"{number}", *arguments, **of_start)
        assert self._process.stdin is not None, "a pipe was asked for; it stays open as long as this process lives"
        with contextlib.suppress(BrokenPipeError):  # the process has ended already
            self._process.stdin.write(self._spec)
            self._process.stdin.flush()

    def _watch(self) -> None:
        soon = 0
        while True:
            status = self._process.wait()
            how = f"signal {-status}" if status < 0 else f"status {status}"
            soon = soon + 1 if time.monotonic() - self._began < _SOON_SECONDS else 1
            with self._lock:
                if self._is_over:
                    return
                self._process.communicate()  # closes its input
                self.why = f"its end by {how}, {_ENDS} times in a row"
                try:
                    if soon < _ENDS:
                        self._begin()
                        continue
                except OSError as error:  # too little memory, or too many processes
                    self.why = f"its end by {how}, after which it does not start: {error}"
                self._close()
                return

    @property
    def has_ended(self) -> bool:
        """Whether it will not be restarted."""
        return self._is_over

    def _close(self) -> None:
        self._is_over = True
        self._listening.close()
        shutil.rmtree(self._path.parent, ignore_errors=True)

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._process.kill()
            self._close()
        self._watching.join()
        self._process.communicate()


class _Client:
    """`FeedClient` of this node's process; every request has its own connection and thread."""

    def __init__(self, path: Path, transport: Transport, timeout_seconds: float, process: _Process | None) -> None:
        self._path, self._transport, self._seconds, self._process = path, transport, timeout_seconds, process

    def __call__(self, method: str, *arguments: Any) -> Callable[[], Any]:
        found: Future[Any] = Future()
        threading.Thread(target=self._ask, args=(found, (method, arguments)), daemon=True).start()
        return lambda: self._wait(found)

    def _wait(self, found: Future[Any]) -> Any:
        try:
            return found.result(self._seconds + _START_SECONDS)
        except TimeoutError:  # a process that stops within an answer holds the thread
            raise self._late() from None

    def _ask(self, found: Future[Any], request: tuple[str, tuple[Any, ...]]) -> None:
        try:
            answer = self._answer(request)
        except BaseException as error:  # noqa: BLE001 - for the rank that waits
            found.set_exception(error)
        else:
            found.set_result(answer)

    def _answer(self, request: tuple[str, tuple[Any, ...]]) -> Any:
        """Return the answer of the process or, if it ends, of the next one."""
        is_new = request[0] == "describe"
        end = time.monotonic() + self._seconds + _START_SECONDS * is_new
        while True:
            try:
                with Client(str(self._path), "AF_UNIX") as connection:
                    connection.send(request)
                    if not connection.poll(max(0.0, end - time.monotonic())):
                        raise self._late()
                    answer = connection.recv()
            except (FileNotFoundError, ConnectionRefusedError):
                raise self.gone() from None
            except (EOFError, OSError):
                end, is_new = end + _START_SECONDS * (not is_new), True
                if time.monotonic() > end:
                    raise self._late() from None
                time.sleep(_AGAIN_SECONDS)
                continue
            if isinstance(answer, LengthwiseError):
                raise answer
            return answer

    def gone(self) -> LengthwiseError:
        """Return the error for a process that has ended."""
        if self._process is None:  # the rank that started it knows why, or has an error of its own
            return self._error("rows", "a closed connection: its process has ended", _GONE, kind=TransferError)
        return self._error("rows", self._process.why, _GONE)

    def _late(self) -> LengthwiseError:
        remedy = "Check that the process runs and its disk or network answers, or raise {timeout_seconds}."
        return self._error(f"rows within {self._seconds:g} s", "none", remedy)

    def _error(self, expected: str, got: str, remedy: str, kind: type[LengthwiseError] = RankError) -> LengthwiseError:
        where = f"rank {self._transport.rank}, {self._transport.phase}, waiting for the feed of the stream"
        return kind(where, expected=expected, got=got, remedy=remedy)
