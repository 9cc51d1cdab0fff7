"""The process of a `Feed`: it answers the ranks of its node at a socket, and starts processes that tokenize.

Its input is the pickled `FeedSpec`; it ends when the input ends, with the rank that started it. Only the user may enter
the folder of the socket, so pickles are safe.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import shutil
import socket
import sys
import threading
import traceback
from multiprocessing.connection import Connection
from typing import Any

from lengthwise.core.errors import LengthwiseError, RankError
from lengthwise.data.feed import Feed, FeedSpec
from lengthwise.run.workers import worker_processes


def _main(number: int, processes: int, folder: str) -> None:
    spec: FeedSpec = pickle.load(sys.stdin.buffer)  # noqa: S301 - of the process that started this one
    quiet = "ignore::UserWarning:multiprocessing.resource_tracker"  # the tracker removes semaphores of a killed process
    os.environ["PYTHONWARNINGS"] = ",".join(filter(None, (os.environ.get("PYTHONWARNINGS"), quiet)))
    feed = Feed(spec, worker_processes(processes, start="spawn"))
    threading.Thread(target=_end_with_input, args=(folder,), daemon=True).start()
    with socket.socket(fileno=number) as listening:
        while True:
            connection = Connection(listening.accept()[0].detach())
            threading.Thread(target=_answer, args=(feed, connection), daemon=True).start()


def _end_with_input(folder: str) -> None:
    sys.stdin.buffer.read()
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(0)


def _answer(feed: Feed, connection: Connection) -> None:
    with connection, contextlib.suppress(EOFError, OSError):  # the rank is gone
        method, arguments = connection.recv()
        try:
            answer: Any = getattr(feed, method)(*arguments)
        except LengthwiseError as error:
            answer = error
        except Exception as error:  # noqa: BLE001 - a defect of ours, for the rank that asked
            traceback.print_exc()
            got, remedy = f"{type(error).__name__}: {error}", "This is a defect of lengthwise: please report it."
            answer = RankError("the feed", expected="an answer", got=got, remedy=remedy)
        connection.send(answer)


if __name__ == "__main__":
    _main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
