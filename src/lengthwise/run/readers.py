"""The reader of a streamed data set beside the ranks of each node, and how a rank asks it.

The first rank of a node starts a process, which ends with it; the others find its socket by a name that rank 0 draws.
All nodes read the same stream: ranks agree on its files, and on the digests of all rows of each step.
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
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Client
from pathlib import Path
from typing import Any

from lengthwise.comm import Transport, World, agree, broadcast_bytes, share_numbers
from lengthwise.core.errors import LengthwiseError, RankError, TransferError
from lengthwise.core.processes import ending_signals_blocked, start_module
from lengthwise.data.reader import StreamSpec
from lengthwise.data.stream import StreamDataset
from lengthwise.run.reader_process import LINES

_START_SECONDS = 60.0  # more for its first answer: it imports, and looks for files
_LOOK_SECONDS = 0.1  # whether it has ended
_MOST_PATH_BYTES = 100  # of a socket: 107 on Linux, 103 on macOS
_GRACE_SECONDS = 3.0  # for the status of a process whose socket is closed
_GONE = "See what it printed, and whether the machine ran out of memory; then go on from the newest checkpoint."

_Process = subprocess.Popen[bytes]


@contextlib.contextmanager
def reading(
    dataset: StreamDataset,
    world: World,
    transport: Transport,
    *,
    timeout_seconds: float,
    say: Callable[[str], None],
    ending: contextlib.ExitStack,
) -> Iterator[None]:
    """Let a process of each node read `dataset` inside the block. Collective.

    ending: ends the process. It should be the last that a rank with an error ends: other ranks that miss the process
    fail, too, and whoever watches gives this rank a few seconds then to report why.

    Raises:
        LengthwiseError: a process does not start, or the stream cannot be read.
    """
    transport.phase = "start, reader of the stream"
    drawn = broadcast_bytes(transport, None if transport.rank else secrets.token_hex(8).encode()).decode()
    first = world.rank - world.local_rank
    clients = [int(row[0]) for row in share_numbers(transport, [float(first)])].count(first)
    path = socket_path(f"lengthwise-rows-{drawn}-{first}")
    where, process, error = f"rank {transport.rank}, {transport.phase}", None, None
    if not world.local_rank:
        try:
            process = ending.enter_context(_process(path, replace(dataset.spec, clients=clients)))
        except OSError as raised:
            remedy = "See what it printed, and that TMPDIR is a folder of this machine."
            error = RankError(where, expected="a process that reads the stream", got=f"{raised}", remedy=remedy)
    if any(row[0] for row in share_numbers(transport, [float(error is not None)])):
        remedy = "See the error of the rank that should have started it."
        raise error or TransferError(where, expected="a reader on each node", got="none on one", remedy=remedy)
    client = _ReaderClient(path, world.local_rank, transport, timeout_seconds, process)
    try:
        dataset.attach(client)
        if transport.world_size > 1:
            agree(transport, dataset.digest(), "files of the stream")
        say("streaming: a process of each node reads and tokenizes rows ahead")
        yield
        transport.phase = "end, reader of the stream"
        share_numbers(transport, [0.0])  # nobody of this node asks any more
    except TransferError:
        with contextlib.suppress(subprocess.TimeoutExpired):
            if process is not None and process.wait(_LOOK_SECONDS) is not None:  # other ranks met that first, and ended
                raise client.gone() from None
        raise


def socket_path(name: str) -> Path:
    """Return where ranks of a node meet: in a folder of TMPDIR, or of /tmp where that is too long for a socket."""
    path = Path(tempfile.gettempdir(), name, "socket")
    return path if len(os.fsencode(path)) <= _MOST_PATH_BYTES else Path("/tmp", name, "socket")  # noqa: S108 - 0700


@contextlib.contextmanager
def _process(path: Path, spec: StreamSpec) -> Iterator[_Process]:
    """Let a process answer at a socket inside the block; OSError where it cannot start."""
    path.parent.mkdir(mode=0o700)
    try:
        with socket.socket(socket.AF_UNIX) as listening, ending_signals_blocked():
            listening.bind(str(path))
            listening.listen(spec.clients * len(LINES))  # from now on whoever connects waits for the process
            number = listening.fileno()
            process = start_module(
                "lengthwise.run.reader_process",
                str(number),
                str(path.parent),
                stdin=subprocess.PIPE,
                pass_fds=[number],
            )
        try:
            assert process.stdin is not None, "a pipe was asked for; it stays open as long as this process lives"
            pickle.dump(spec, process.stdin)
            process.stdin.flush()
            yield process
        finally:
            process.kill()
            process.communicate()  # which closes its input
    finally:
        shutil.rmtree(path.parent, ignore_errors=True)


class _ReaderClient:
    def __init__(
        self, path: Path, number: int, transport: Transport, timeout_seconds: float, process: _Process | None
    ) -> None:
        self.number, self._transport, self._process = number, transport, process
        self._seconds, self._start_seconds = timeout_seconds, _START_SECONDS  # the second is 0 after the first answer
        try:
            self._lines = {name: _Line(Client(str(path), "AF_UNIX")) for name in LINES}
        except OSError:
            raise self.gone() from None

    def ask(self, method: str, *arguments: Any) -> Callable[[], Any]:
        line = self._lines["slices" if method == "slices" else "lengths"]
        try:
            return partial(self._answer, line, line.ask((method, arguments)))
        except OSError:
            raise self.gone() from None

    def _answer(self, line: _Line, number: int) -> Any:
        seconds = self._seconds + self._start_seconds
        try:
            answer = line.answer(number, seconds)
            self._start_seconds = 0.0
        except TimeoutError:
            remedy = "Check that the process runs and its disk or network answers, or raise {timeout_seconds}."
            raise self._error(f"rows within {seconds:g} s", "none", remedy) from None
        except (EOFError, OSError):
            raise self.gone() from None
        if isinstance(answer, LengthwiseError):
            raise answer
        return answer

    def gone(self) -> LengthwiseError:
        """Return the error that its process has ended; how, on the rank that started it."""
        got = "a closed connection: its process has ended"
        if self._process is None:  # the rank that started it knows why, or has an error of its own
            return self._error("rows", got, _GONE, kind=TransferError)
        with contextlib.suppress(subprocess.TimeoutExpired):
            status = self._process.wait(_GRACE_SECONDS)
            got = f"its end by signal {-status}" if status < 0 else f"its end with status {status}"
        return self._error("rows", got, _GONE)

    def _error(self, expected: str, got: str, remedy: str, kind: type[LengthwiseError] = RankError) -> LengthwiseError:
        where = f"rank {self._transport.rank}, {self._transport.phase}, waiting for the reader of the stream"
        return kind(where, expected=expected, got=got, remedy=remedy)


class _Line:
    """A connection whose answers come in the order of the requests."""

    def __init__(self, connection: Any) -> None:
        self._connection, self._asking, self._waiting = connection, threading.Lock(), threading.Lock()
        self._asked = self._received = 0
        self._answers = dict[int, Any]()

    def ask(self, request: tuple[str, tuple[Any, ...]]) -> int:
        with self._asking:
            self._connection.send(request)
            self._asked += 1
            return self._asked - 1

    def answer(self, number: int, seconds: float) -> Any:
        with self._waiting:
            while self._received <= number:
                if not self._connection.poll(seconds):
                    raise TimeoutError
                self._answers[self._received] = self._connection.recv()
                self._received += 1
            return self._answers.pop(number)
