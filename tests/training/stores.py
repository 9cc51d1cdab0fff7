"""A store for tests: a folder of this machine that any process may reach, which behaves as an object store.

A file is there whole or not at all. Faults are asked for by files in the folder that `FAULTS` names, so that they reach
ranks, which are processes of their own.
"""

import contextlib
import os
import threading
import time
from pathlib import Path

import fsspec
from fsspec.implementations.local import LocalFileSystem

from lengthwise.core.remote import staging_of

SCHEME = "store"
FAULTS = "LENGTHWISE_TEST_STORE"
SECRET = "AKIAVERYSECRET"


class Store(LocalFileSystem):
    """`store:///tmp/...`.

    slow: seconds that each fifth of a file takes. closed: files of a name wait. fails: so many writes of a name do.
    cuts: files of a name are half there.
    """

    protocol = SCHEME
    local_file = False

    @classmethod
    def _strip_protocol(cls, path):
        return LocalFileSystem._strip_protocol(os.fspath(path).removeprefix(f"{SCHEME}://"))

    def put_file(self, path1, path2, **_options):
        self.pipe_file(path2, Path(path1).read_bytes())

    def pipe_file(self, path, value, mode="overwrite", **_options):
        path = Path(self._strip_protocol(path))
        path.parent.mkdir(parents=True, exist_ok=True)
        while (name := asked("closed")) and name in str(path):
            time.sleep(0.01)
        self._fail("fails", path)
        hidden = unfinished() / f"{path.name}.{os.getpid()}.{threading.get_ident()}"
        with hidden.open("wb") as file:
            for start in range(0, len(value), max(1, len(value) // 5)):
                file.write(value[start : start + max(1, len(value) // 5)])
                time.sleep(float(asked("slow") or 0))
        if (cut := asked("cuts")) and cut in str(path):
            hidden.write_bytes(value[: len(value) // 2])
        hidden.replace(path)

    def _fail(self, kind, path):
        """Fail where a fault says so: "3 metrics" three times for names with "metrics" in them."""
        number, _, name = asked(kind).partition(" ")
        if number and name in str(path) and int(number) > 0:
            (Path(os.environ[FAULTS]) / kind).write_text(f"{int(number) - 1} {name}")
            raise ConnectionError(f"no answer from https://key:{SECRET}@host/x?sig={SECRET} token={SECRET}")


def unfinished():
    """Where a store has what is not a file yet."""
    return Path(os.environ[FAULTS]) / "unfinished"


def asked(kind):
    with contextlib.suppress(KeyError, FileNotFoundError):
        return (Path(os.environ[FAULTS]) / kind).read_text()
    return ""


def register(folder, monkeypatch):
    """Make the store known to this process and those that it forks, with its folder of faults."""
    fsspec.register_implementation(SCHEME, Store, clobber=True)
    (folder / "faults/unfinished").mkdir(parents=True)
    monkeypatch.setenv(FAULTS, str(folder / "faults"))
    monkeypatch.setenv("LENGTHWISE_CACHE", str(folder / "cache"))
    return f"{SCHEME}://{folder}/there"


def ask(kind, what):
    (Path(os.environ[FAULTS]) / kind).write_text(what)


def here(url):
    return staging_of(url)
