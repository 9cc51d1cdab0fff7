"""File locks; files and folders written whole or not at all; readers of plain files, strict JSON and plans."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import gzip
import io
import json
import os
import shutil
import socket
import stat
import time
import warnings
import zlib
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Any, TextIO

from lengthwise.core.errors import ConfigError, OutputError

MOST_BYTES = 256 << 20  # limit of a whole file; a plan of a million sequences has 30 MB
_FORKS_END_SECONDS = 10.0  # time in which the forks of a killed process, such as a launcher's ranks, end
_WITHOUT_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP)
_GZIP = b"\x1f\x8b"
_OPENED = ("/dev/fd", "/proc/self/fd")  # pipes that a shell opened: `--lengths <(command)`


def try_lock(path: Path) -> TextIO | str:
    """Create and lock `path` until the returned file is closed, or return the name of the process that holds it.

    On a disk without locks, as some networks have, return the file unlocked, with a warning. OSError: the file cannot
    be created.
    """
    while True:
        file = path.open("a+", encoding="utf-8")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            with file:
                file.seek(0)
                return file.read().strip() or "another process"
        except OSError as error:
            if error.errno not in _WITHOUT_LOCKS:
                file.close()
                raise
            text = f"{path.parent}: this disk has no file locks ({error.strerror}); let no other job write there"
            warnings.warn(text, RuntimeWarning, stacklevel=2)
        with contextlib.suppress(FileNotFoundError):  # the owner removed it between our two calls
            if os.path.samestat(os.fstat(file.fileno()), path.stat()):
                break
        file.close()
    file.truncate(0)
    file.write(f"{owner_name(os.getpid())}\n")
    file.flush()
    return file


def claim(path: Path, *, what: str) -> TextIO:
    """Lock `path` until the returned file is closed; wait for forks of a dead owner, which still hold it.

    what: the folder of the lock, for messages. OutputError: another process holds the lock. OSError: the file cannot be
    created.
    """
    deadline = time.monotonic() + _FORKS_END_SECONDS
    while isinstance(locked := try_lock(path), str):
        if not _is_dead(locked) or time.monotonic() >= deadline:
            expected, got = "a folder that no other run is writing", f"one that {locked} is writing"
            remedy = "Choose another output, or wait for the end of that run."
            raise OutputError(what, expected=expected, got=got, remedy=remedy)
        time.sleep(0.05)
    return locked


def _is_dead(owner: str) -> bool:
    """Return whether a lock names a process of this machine that has ended."""
    pid = (*owner.split(), "", "")[1]
    if not pid.isdecimal() or owner != owner_name(int(pid)):
        return False
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return True
    except OSError:
        pass
    return False


def owner_name(pid: int) -> str:
    """Return the name by which `try_lock` reports a process of this machine."""
    return f"process {pid} on {socket.gethostname()}"


def sync(path: Path) -> None:
    """Flush a file or folder to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_readable(path: Path) -> None:
    """Set the usual mode of a new file: some libraries write theirs for the owner alone."""
    mask = os.umask(0)
    os.umask(mask)
    path.chmod(0o666 & ~mask)


def replace_file(path: Path, text: str | bytes) -> None:
    """Write a file whole and synced; on OSError the old file stays."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        unfinished.write_bytes(text.encode() if isinstance(text, str) else text)
        sync(unfinished)
        unfinished.replace(path)
    except BaseException:  # removes the unfinished file, after Ctrl-C too
        with contextlib.suppress(OSError):
            unfinished.unlink()
        raise


@contextlib.contextmanager
def whole_folder(path: Path, *, replaces: bool = False) -> Iterator[Path]:
    """Yield a folder that becomes `path`, synced and whole, when the block ends without an error.

    replaces: True replaces an existing `path`.
    """
    unfinished, previous = unfinished_of(path), previous_of(path)
    try:
        unfinished.mkdir(parents=True)
        yield unfinished
        for each in (*unfinished.rglob("*"), unfinished):
            if each.is_file():
                make_readable(each)
            sync(each)
        if replaces and path.exists():
            path.rename(previous)
        unfinished.rename(path)
        sync(path.parent)
        shutil.rmtree(previous, ignore_errors=True)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def put_back(folder: Path) -> None:
    """Restore the previous folder after a crash between the two renames of `whole_folder`; remove unfinished ones."""
    shutil.rmtree(unfinished_of(folder), ignore_errors=True)
    if folder.exists():
        shutil.rmtree(previous_of(folder), ignore_errors=True)
    elif previous_of(folder).exists():
        previous_of(folder).rename(folder)


def unfinished_of(path: Path) -> Path:
    """Return the folder that `whole_folder` writes before it renames it to `path`."""
    return path.with_name(f"{path.name}.unfinished")


def previous_of(path: Path) -> Path:
    """Return the folder to which `whole_folder` renames an old `path`."""
    return path.with_name(f"{path.name}.previous")


def read_plain(path: str | Path, *, most_bytes: int = MOST_BYTES) -> bytes:
    """Read a regular file, or a pipe that the shell opened.

    OSError: it does not exist, has too many bytes, or is a device or another pipe (which may be endless).
    """
    with open(_opened(path), "rb") as file:
        content = file.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise OSError(errno.EFBIG, f"more than {most_bytes:,} bytes")
    return content


def _opened(path: str | Path) -> int:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # otherwise opening a pipe waits for a writer
    except ValueError:  # NUL, or characters that cannot be encoded
        raise OSError(errno.EINVAL, "not a valid file name") from None
    kind = os.fstat(descriptor).st_mode
    if stat.S_ISREG(kind) or (stat.S_ISFIFO(kind) and _is_the_shells(path)):
        os.set_blocking(descriptor, True)
        return descriptor
    os.close(descriptor)
    if stat.S_ISDIR(kind):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    raise OSError(errno.EINVAL, "a device or a pipe")


def _is_the_shells(path: str | Path) -> bool:
    return str(path) == "/dev/stdin" or os.path.dirname(path) in _OPENED


def read_json(path: str | Path) -> Any:
    """Read a JSON file; ValueError if it cannot be read, is not UTF-8, or `parse_json` refuses it."""
    try:
        raw = read_plain(path)
    except OSError as error:
        raise ValueError(error.strerror or str(error)) from None
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8: byte {raw[error.start]:#04x} at offset {error.start}") from None
    return parse_json(text)


def parse_json(text: str) -> Any:
    """Parse JSON and refuse repeated keys; NaN and Infinity become floats, which the caller must refuse.

    ValueError: empty text, invalid JSON, a byte order mark, a repeated key, or nesting too deep to read.
    """
    if not text.strip():
        raise ValueError("an empty file")
    if text.startswith("\ufeff"):
        raise ValueError("a byte order mark; save it without")
    try:
        return json.loads(text, object_pairs_hook=unique_keys)
    except json.JSONDecodeError as error:
        raise ValueError(
            f"broken JSON: {error.msg.removesuffix(' at')} at line {error.lineno}, column {error.colno}"
        ) from None
    except RecursionError:
        raise ValueError("nesting too deep to read") from None


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the dictionary of an object (`json`'s `object_pairs_hook`); ValueError for a repeated key."""
    values = dict(pairs)
    if len(values) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f'the key "{twice}" twice in one object')
    return values


def is_deeper(value: Any, levels: int) -> bool:
    """Return whether lists and objects are nested more than `levels` deep."""
    inside = [value]
    for _ in range(levels + 1):
        lists = (each.values() if isinstance(each, dict) else each for each in inside if isinstance(each, dict | list))
        inside = [item for each in lists for item in each]
        if not inside:
            return False
    return True


def read_package_json(package: str, file: str) -> dict[str, Any]:
    """Read a JSON object that ships inside `package`."""
    return json.loads(resources.files(package).joinpath(file).read_text(encoding="utf-8"))


def is_path(name: str) -> bool:
    """Return whether `name` is a path to a user's file, not the name of a built-in."""
    return name.endswith(".json") or "/" in name


def read_json_object(path: str) -> dict[str, Any]:
    """Read a user's JSON object; ConfigError if the file is missing, invalid, or no object."""
    try:
        content = read_json(path)
    except ValueError as error:
        raise ConfigError(
            path, expected="a JSON file", got=str(error), remedy="Correct the path or the file."
        ) from None
    if not isinstance(content, dict):
        got = type(content).__name__
        raise ConfigError(path, expected="a JSON object", got=got, remedy='Write it as {"key": value, ...}.')
    return content


def compress_plan(text: str) -> bytes:
    """Compress a plan's JSON as in `plans/step-000001.json.gz`; the same text gives the same bytes."""
    return gzip.compress(text.encode(), compresslevel=6, mtime=0)


def read_plan_text(path: str | Path) -> str:
    """Read the JSON of a plan file.

    OSError: as in `read_plain`, broken gzip, or more bytes than a plan can have. UnicodeDecodeError: not UTF-8.
    """
    content = read_plain(path)
    if content.startswith(_GZIP):
        try:
            with gzip.open(io.BytesIO(content)) as file:
                content = file.read(MOST_BYTES + 1)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise OSError(f"broken gzip: {error}") from None
        if len(content) > MOST_BYTES:
            raise OSError(f"more than {MOST_BYTES:,} bytes")
    return content.decode()


def found_at(path: Path) -> str:
    """Return the size of a file in words, or the reason why it has none (a link, the error of reading it)."""
    try:
        return "a link" if path.is_symlink() else f"{path.stat().st_size} bytes"
    except OSError as error:
        return error.strerror or str(error)
