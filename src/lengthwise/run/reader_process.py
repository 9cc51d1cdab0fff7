"""The process of a `Reader`: it answers the ranks of its node at a socket, whose number and folder it is given.

Its input is the pickled `StreamSpec`, then nothing: the end of that, when whoever started it ends, ends this process.
Only the user may enter the folder, so pickles are safe; it goes once all ranks have connected.
"""

from __future__ import annotations

import os
import pickle
import shutil
import socket
import sys
import threading
import traceback
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any, BinaryIO

from lengthwise.core.errors import LengthwiseError, RankError
from lengthwise.data.reader import Reader, StreamSpec

LINES = ("lengths", "slices")
"""The connections of each rank: who waits for lengths keeps nobody from slices."""


def _main(number: int, folder: str) -> None:
    spec: StreamSpec = pickle.load(sys.stdin.buffer)  # noqa: S301 - of the process that started this one
    reader = Reader(spec)
    threading.Thread(target=_end_with_input, args=(sys.stdin.buffer, folder), daemon=True).start()
    with socket.socket(fileno=number) as listening:
        for _ in range(spec.clients * len(LINES)):
            connection = Connection(listening.accept()[0].detach())
            threading.Thread(target=_serve, args=(reader, connection), daemon=True).start()
    shutil.rmtree(folder, ignore_errors=True)
    threading.Event().wait()


def _end_with_input(pipe: BinaryIO, folder: str) -> None:
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
    _main(int(sys.argv[1]), sys.argv[2])
