"""`running.json` at the URL of an output: which run writes there, so that another one is refused.

A store has no locks. The owner writes the file again and again with another number; one that does not change while
another start watches it is of a run that is gone. Two starts in the same second may both pass, and an owner that was
cut off for longer than that does not know that another took its place until it reads the file again, which it does
before each commit: then it ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from lengthwise.core.errors import OutputError
from lengthwise.core.remote import RemoteFolder, storing
from lengthwise.core.strict_json import parse_json

NAME = "running.json"
OWNER = "owner"  # in the folder of this machine: the name under which it writes at the URL
BEAT_SECONDS = 15.0
WATCH_SECONDS = 60.0  # without a change, after which its owner is gone
_LAST_SECONDS = 10.0
_AGREE_SECONDS = 0.5  # in which another start may write the marker, too
_BOOT = Path("/proc/sys/kernel/random/boot_id")

_beating = threading.Lock()
os.register_at_fork(
    before=_beating.acquire, after_in_parent=_beating.release, after_in_child=_beating.release
)  # a child that is forked within a request would have its library's locks held by nobody


@dataclass(frozen=True, slots=True, kw_only=True)
class Marker:
    """What the file says. `beat` grows while the owner lives; `ended`: it has let go."""

    owner: str
    host: str
    pid: int
    boot: str
    beat: int = 0
    ended: bool = False

    @property
    def is_gone(self) -> bool:
        """Whether its process ended, or was one of this machine that is not there any more."""
        if self.ended:
            return True
        if (self.host, self.boot) != (socket.gethostname(), _boot()):
            return False
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return True
        except OSError:
            pass
        return False


def _boot() -> str:
    try:
        return _BOOT.read_text(encoding="ascii").strip()
    except OSError:
        return ""


def read_marker(remote: RemoteFolder) -> Marker | None:
    """Return what the file says; None: there is none, or none that can be read. OSError: the store failed."""
    try:
        found = Marker(**parse_json(remote.read(NAME, most_bytes=1 << 16).decode("utf-8")))
    except (FileNotFoundError, ValueError, TypeError):
        return None
    is_right = all(type(getattr(found, each.name)).__name__ == each.type for each in fields(Marker))
    return found if is_right else None


def owner_of(folder: Path) -> str | None:
    """Return the name under which this machine's folder was last written to the URL; None: it never was."""
    try:
        return (folder / OWNER).read_text(encoding="ascii").strip() or None
    except (OSError, UnicodeDecodeError):
        return None


def still_owns(remote: RemoteFolder, folder: Path) -> bool:
    """Whether no other run has taken the place of the one that writes `folder`. OSError: the store failed."""
    found = read_marker(remote)
    return found is not None and found.owner == owner_of(folder)


def in_time(work: Callable[[], None]) -> None:
    """Do what a store should still hear of, for some seconds at most: one that does not answer keeps no run alive."""

    def quietly() -> None:
        with contextlib.suppress(OSError):
            work()

    thread = threading.Thread(target=quietly, name="last words", daemon=True)
    thread.start()
    thread.join(_LAST_SECONDS)


class Ownership:
    """The claim of one run on a URL, from `take` to `release`; the folder of this machine is locked meanwhile."""

    def __init__(self, remote: RemoteFolder, folder: Path, say: Callable[[str], None]) -> None:
        self._remote, self._folder, self._say = remote, folder, say
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self._marker: Marker | None = None

    def take(self) -> bool:
        """Take the URL over where its owner is gone; return whether this machine's folder was the last to write there.

        Raises:
            OutputError: the owner lives, another start came between, or the store cannot be written.
        """
        with storing(self._remote.url, OutputError):
            found = read_marker(self._remote)
            mine = found is not None and found.owner == owner_of(self._folder)
            if found is not None and not mine and not found.is_gone:
                self._watch(found)
            self._folder.mkdir(parents=True, exist_ok=True)
            owner = secrets.token_hex(16)
            self._marker = Marker(owner=owner, host=socket.gethostname(), pid=os.getpid(), boot=_boot())
            self._write(self._marker)
            time.sleep(0.0 if found is None or mine else _AGREE_SECONDS)
            if (now := read_marker(self._remote)) is None or now.owner != owner:
                raise self._refusal("another start of it, at the same time" if now is None else _told(now))
            (self._folder / OWNER).write_text(owner, encoding="ascii")
        self._thread = threading.Thread(target=self._beat, name="running.json", daemon=True)
        self._thread.start()
        return mine

    def release(self) -> None:
        """Say that the run has ended, if it still owns the URL; what fails is left to those who watch."""
        self._ended.set()
        in_time(self._let_go)

    def _let_go(self) -> None:
        if self._thread is not None:
            self._thread.join()
        if self._marker is not None and still_owns(self._remote, self._folder):
            self._write(Marker(**{**asdict(self._marker), "ended": True}))

    def _watch(self, found: Marker) -> None:
        """Wait until the owner has given no sign of life for long enough."""
        self._say(f"{_told(found)} wrote to {self._remote}: waiting {WATCH_SECONDS:.0f} s for a sign of life")
        end = time.monotonic() + WATCH_SECONDS
        while time.monotonic() < end:
            time.sleep(min(1.0, WATCH_SECONDS / 10))
            now = read_marker(self._remote)
            if now is None or now.ended:
                return
            if now != found:
                raise self._refusal(_told(now))

    def _beat(self) -> None:
        number = 0
        while not self._ended.wait(BEAT_SECONDS):
            assert self._marker is not None, "written before"
            number += 1
            with contextlib.suppress(OSError), _beating:
                if not still_owns(self._remote, self._folder):
                    return  # who commits finds out
                self._write(Marker(**{**asdict(self._marker), "beat": number}))

    def _write(self, marker: Marker) -> None:
        self._remote.put_bytes(f"{json.dumps(asdict(marker))}\n".encode(), NAME)

    def _refusal(self, got: str) -> OutputError:
        remedy = f"Choose another output, or wait for the end of that run, {WATCH_SECONDS:.0f} s after a kill."
        expected = "a URL that no other run is writing"
        return OutputError(self._remote.url, expected=expected, got=f"one that {got} is writing", remedy=remedy)


def _told(marker: Marker) -> str:
    return f"process {marker.pid} on {marker.host}"
