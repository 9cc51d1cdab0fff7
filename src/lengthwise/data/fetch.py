"""Data at a URL: copied once to this machine, checked, and read from there as any other.

    LENGTHWISE_CACHE/remote/ab12...        of a URL
        cd34.../train.jsonl                a copy of a file, or of a folder, by what the store says of all that is in
                                           it (size, ETag, version or time)
        cd34.../prepared/                  or of prepared data, by its manifest, all of whose digests are checked
        newest                             the copy that was last found to be of now: it is taken where the store is
                                           not reached, which is said

One process of a machine copies while the others wait.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TextIO, TypeVar

from lengthwise.core.disk import sync
from lengthwise.core.errors import Collector, ConfigError, DataError
from lengthwise.core.locks import try_lock
from lengthwise.core.remote import RemoteFile, cache_folder, without_secrets
from lengthwise.data.manifest import NAME, read_manifest

if TYPE_CHECKING:
    from lengthwise.config import DataSource

_TRIES, _FIRST_WAIT_SECONDS = 4, 0.5  # a wait is twice the one before
_LOOK_SECONDS, _TELL_SECONDS, _QUIET_SECONDS = 0.2, 5.0, 600.0  # of waiting for another process that copies
_NEWEST, _PREPARED = "newest", "prepared"
_STORED = re.compile(r"[a-z]+(-\d{5})?\.(bin|jsonl)")
_ROWS = re.compile(r"(?i).*\.(jsonl|json|parquet|arrow)(\.gz|\.zst)?")

Result = TypeVar("Result")
Tell = Callable[[str], None]


class _Damaged(Exception):  # noqa: N818 - the name says what happened
    """A copy that is not what the store, or a manifest, said."""

    def __init__(self, url: str, expected: str, got: str) -> None:
        super().__init__(f"{got}, not {expected}")
        self.url, self.expected, self.got = url, expected, got


def fetch_sources(sources: Sequence[DataSource], key: str, tell: Tell) -> tuple[DataSource, ...]:
    """Return sources with those at a URL replaced by copies on this machine; `key` is their config path.

    `tell` hears of each copy that is made, each wait, and each URL that is not reached. LengthwiseError names all that
    cannot be had.
    """
    problems = Collector()
    found = [
        source if source.url is None else problems.attempt(lambda source=source, at=at: _fetched(source, at, tell))
        for source, at in ((source, f"{key}.{number}.url") for number, source in enumerate(sources))
    ]
    problems.raise_all()
    return tuple(each for each in found if each is not None)


def _fetched(source: DataSource, key: str, tell: Tell) -> DataSource:
    assert source.url is not None, "asked of a URL"
    if os.environ.get("LENGTHWISE_CACHE") == "off":
        remedy = "Leave LENGTHWISE_CACHE out or name a folder, or copy the data to this machine and name its path."
        raise ConfigError(
            key, expected="a folder for copies of data at a URL", got="LENGTHWISE_CACHE=off", remedy=remedy
        )
    url = source.url.rstrip("/")
    folder = cache_folder() / "remote" / _named(url)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = folder / "lock"
        with _only_copier(lock, url, key, tell):
            path = _current(url, folder, key, tell)
    except OSError as error:
        got = f"{error.strerror or error} at {error.filename or folder}"
        remedy = "Make room, or name another folder with LENGTHWISE_CACHE."
        raise DataError(key, expected="a folder for copies of data", got=got, remedy=remedy) from None
    return source.model_copy(update={"url": None, "path": path})


def _only_copier(lock: Path, url: str, key: str, tell: Tell) -> TextIO:
    """Return the lock once no other process copies.

    Raises:
        DataError: one has it for long and has written nothing.
    """
    seen, since, told = -1, time.monotonic(), False
    while isinstance(held := try_lock(lock), str):
        now = _bytes_in(lock.parent)
        if now != seen:
            seen, since = now, time.monotonic()
        elif not told and time.monotonic() - since > _TELL_SECONDS:
            tell(f"{key}: waiting for {held}, which copies {without_secrets(url)}")
            told = True
        if time.monotonic() - since > _QUIET_SECONDS:
            expected = f"a byte of the copy of {url} within {_QUIET_SECONDS:g} s"
            remedy = "See what holds it up, or end it; then start again."
            raise DataError(key, expected=expected, got=f"none from {held}", remedy=remedy)
        time.sleep(_LOOK_SECONDS)
    return held


def _bytes_in(folder: Path) -> int:
    total = 0
    for each in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):  # renamed meanwhile
            total += each.stat().st_size
    return total


def _current(url: str, folder: Path, key: str, tell: Tell) -> Path:
    """Return the copy of what is at a URL now; the newest that there is where the store is not reached."""
    newest = folder / _NEWEST
    try:
        manifest = None if _ROWS.fullmatch(url) else _manifest(url, folder, tell)
        files = {} if manifest else _files_at(url, tell)
    except FileNotFoundError as error:
        remedy = "Name a file, or a folder without `*`." if set("*?[") & set(url) else "Correct the URL."
        expected, got = "a file, a folder of files or prepared data", f"nothing at {url} ({error})"
        raise DataError(key, expected=expected, got=got, remedy=remedy) from None
    except OSError as error:
        with contextlib.suppress(OSError):
            kept = folder / newest.read_text(encoding="utf-8")
            if kept.exists():
                tell(f"{key}: {url} is not reached ({error}); its copy of {_age(newest)} is taken: {kept}")
                return kept
        remedy = "See that the URL is right and can be reached from this machine."
        raise DataError(key, expected=f"{url} to be reached in {_TRIES} tries", got=str(error), remedy=remedy) from None
    unknown = [file.url for file in files.values() if file.state is None]
    if unknown:
        got = f"{unknown[0]}, of which the store tells no ETag, version or time: a change would not be seen"
        remedy = "Copy it to this machine and name its path."
        raise DataError(key, expected="a file that can be known again", got=got, remedy=remedy)
    known = manifest or json.dumps([[name, file.size, file.state] for name, file in files.items()])
    name = f"{_named(known)}/{_PREPARED if manifest else url.rpartition('/')[2]}"
    if not (folder / name).exists():
        if manifest is None:
            _check_room(sum(file.size or 0 for file in files.values()), folder, url, key)
        tell(f"{key}: {url} is copied once, to {folder / name}")
        _copy(url, folder / name, manifest, files, key, tell)
    unfinished = folder / f"{_NEWEST}.tmp"
    unfinished.write_text(name, encoding="utf-8")
    sync(unfinished)
    unfinished.replace(newest)
    return folder / name


class _File(NamedTuple):
    """A file of a store as it is now."""

    url: str
    size: int | None
    state: str | None


def _files_at(url: str, tell: Tell) -> dict[str, _File]:
    """Return what is at a URL: a file, one of Megatron-LM's pairs, or all of a folder, by names that begin as it ends.

    Raises:
        FileNotFoundError: nothing is.
    """
    pair = [url[: -len(end)] + other for end, other in ((".bin", ".idx"), (".idx", ".bin")) if url.endswith(end)]
    found: dict[str, _File] = {}
    for at in (url, *pair):
        for name, (size, state) in _tried(at, tell, lambda at=at: RemoteFile(at).states()).items():
            leaf = at.rpartition("/")[2]
            found[f"{leaf}/{name}" if name else leaf] = _File(f"{at}/{name}" if name else at, size, state)
    if not found:
        raise FileNotFoundError(f"no file in {url}")
    return found


def _check_room(num_bytes: int, folder: Path, url: str, key: str) -> None:
    """Refuse what the disk has no room for, before any of it is copied."""
    free = shutil.disk_usage(folder).free
    if num_bytes > free:
        got = f"{num_bytes / 1e9:.1f} GB at {url}, {free / 1e9:.1f} GB free at {folder}"
        remedy = "Make room, or name another folder with LENGTHWISE_CACHE."
        raise DataError(key, expected="room for a copy", got=got, remedy=remedy)


def _copy(url: str, path: Path, manifest: str | None, files: Mapping[str, _File], key: str, tell: Tell) -> None:
    """Copy files or prepared data beside `path`, and rename them when all are checked and on the disk."""
    shutil.rmtree(path.parent, ignore_errors=True)
    unfinished = path.parent.with_name(f"{path.parent.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    try:
        if manifest is None:
            for name, file in files.items():
                to = unfinished / name
                to.parent.mkdir(parents=True, exist_ok=True)
                _tried(file.url, tell, lambda file=file, to=to: _fetch_file(file, to))
        else:
            store = unfinished / path.name
            store.mkdir(parents=True)
            (store / NAME).write_text(manifest, encoding="utf-8")
            stored = read_manifest(store).files
            _check_room(sum(file.num_bytes for file in stored.values()), unfinished, url, key)
            for name, file in stored.items():
                if not _STORED.fullmatch(name):
                    raise _Damaged(f"{url}/{NAME}", "names of files of a store", repr(name))
                at, to = f"{url}/{name}", store / name
                _tried(at, tell, lambda at=at, to=to, file=file: _fetch_stored(at, to, file.num_bytes, file.sha256))
    except _Damaged as error:
        remedy = "See that nobody writes it and that the store is whole, then start again."
        raise DataError(key, expected=f"{error.url} with {error.expected}", got=error.got, remedy=remedy) from None
    except OSError as error:
        if error.errno is not None:  # of this machine's disk
            raise
        remedy = "See that the URL is right and can be reached from this machine."
        raise DataError(key, expected=f"all of {url} in {_TRIES} tries", got=str(error), remedy=remedy) from None
    unfinished.rename(path.parent)
    sync(path.parent.parent)


def _fetch_file(file: _File, path: Path) -> None:
    remote = RemoteFile(file.url)
    num_bytes, _ = remote.fetch(path)
    if file.size is not None and num_bytes != file.size:
        raise _Damaged(file.url, f"{file.size} bytes", f"{num_bytes} bytes")
    if remote.states() != {"": (file.size, file.state)}:
        raise _Damaged(file.url, "a file that stays as it is", "a change while it was copied")
    sync(path)


def _fetch_stored(url: str, path: Path, num_bytes: int, sha256: str) -> None:
    got, digest = RemoteFile(url).fetch(path)
    if (got, digest) != (num_bytes, sha256):
        raise _Damaged(url, f"{num_bytes} bytes of SHA-256 {sha256}", f"{got} bytes of {digest}")
    sync(path)


def _manifest(url: str, folder: Path, tell: Tell) -> str | None:
    """Return the text of the manifest of prepared data; None: there is none."""
    copy = folder / NAME
    try:
        _tried(f"{url}/{NAME}", tell, lambda: RemoteFile(f"{url}/{NAME}").fetch(copy))
        return copy.read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError, UnicodeDecodeError):
        return None
    finally:
        copy.unlink(missing_ok=True)


def _tried(url: str, tell: Tell, attempt: Callable[[], Result]) -> Result:
    """Return what `attempt` returns, tried again where it fails; what is not there is not asked for again."""
    for number in range(1, _TRIES):
        try:
            return attempt()
        except FileNotFoundError:
            raise
        except (OSError, _Damaged) as error:
            seconds = _FIRST_WAIT_SECONDS * 2 ** (number - 1)
            tell(f"waiting {seconds:g} s for {without_secrets(url)}, try {number} of {_TRIES} failed: {error}")
            time.sleep(seconds)
    return attempt()


def _age(path: Path) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(path.stat().st_mtime))


def _named(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
