"""The process of a `Reader`: ranks of its node connect to a socket in a folder of its own, then it answers them.

Its input is the pickled `StreamSpec`, then nothing: the end of that, when whoever started it ends, ends this process.
Only the user may enter the folder, so pickles are safe; it goes once all ranks have connected.
"""

from __future__ import annotations

import os
import pickle
import shutil
import sys
import threading
import traceback
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from queue import SimpleQueue
from typing import Any, BinaryIO

from lengthwise.core.errors import LengthwiseError, RankError
from lengthwise.data.reader import Reader, StreamSpec

LINES = ("lengths", "slices")
"""The connections of each rank: who waits for lengths keeps nobody from slices."""


def _main(path: str) -> None:
    spec: StreamSpec = pickle.load(sys.stdin.buffer)  # noqa: S301 - of the process that started this one
    folder, reader = Path(path).parent, Reader(spec)
    threading.Thread(target=_end_with_input, args=(sys.stdin.buffer, folder), daemon=True).start()
    number = spec.clients * len(LINES)
    with Listener(path, "AF_UNIX", backlog=number) as listener:
        for _ in range(number):
            threading.Thread(target=_serve, args=(reader, listener.accept()), daemon=True).start()
    shutil.rmtree(folder, ignore_errors=True)
    threading.Event().wait()


def _end_with_input(pipe: BinaryIO, folder: Path) -> None:
    pipe.read()
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(0)


def _serve(reader: Reader, connection: Connection) -> None:
    """Answer requests in their order; they are taken in meanwhile, so who asks never waits for who reads answers."""
    requests: SimpleQueue[tuple[str, tuple[Any, ...]] | None] = SimpleQueue()
    threading.Thread(target=_take, args=(connection, requests), daemon=True).start()
    while (request := requests.get()) is not None:
        method, arguments = request
        try:
            answer = getattr(reader, method)(*arguments)
        except LengthwiseError as error:
            answer = error
        except Exception as error:  # noqa: BLE001 - a mistake of ours, for whoever asked
            traceback.print_exc()
            got, remedy = f"{type(error).__name__}: {error}", "This is a defect of lengthwise: please report it."
            answer = RankError("reader of the stream", expected="an answer", got=got, remedy=remedy)
        try:
            connection.send(answer)
        except OSError:  # whoever asked is gone
            return


def _take(connection: Connection, requests: SimpleQueue[tuple[str, tuple[Any, ...]] | None]) -> None:
    try:
        while True:
            requests.put(connection.recv())
    except (EOFError, OSError):
        requests.put(None)


if __name__ == "__main__":
    _main(sys.argv[1])
