"""A folder at a URL (`s3://bucket/run`, `gs://`, `file://`, ...): what a run's output needs of it, through fsspec.

Every failure is an OSError, whatever library it came from, and its text holds no password, token or signed link.
An object store shows a file whole or not at all; where files can be renamed they are written beside and renamed, for
the same. What was put is looked up: a store that kept fewer bytes has failed.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lengthwise.core.errors import OutputError, WriteError

_RENAMES = frozenset(("file", "local", "sftp", "ssh"))  # where a rename takes the place of what has the name
_CHUNK_BYTES = 4 << 20
_QUIET_SECONDS = 60.0  # without a byte of a server, after which it has failed
_UNFINISHED = ".unfinished"
# What stores call that which changes with a file.
_STATES = ("ETag", "etag", "version_id", "VersionId", "generation", "md5Hash", "LastModified", "last_modified", "mtime",
           "Last-Modified", "Content-MD5", "Digest", "updated", "created", "blob_id", "lfs")  # fmt: skip
_SECRETS = (
    (re.compile(r"(://)[^/\s@]*@"), r"\1***@"),
    (re.compile(r"(\w+://[^\s?'\"]*)\?[^\s'\"]*"), r"\1?***"),
    (re.compile(r"(?i)((?:secret|token|password|signature|credential|authorization|api_?key|access_?key)\w*['\"]?\s*[=:]\s*)"
                r"(?:bearer\s+)?['\"]?[^\s,;'\"&]+"), r"\1***"),
)  # fmt: skip


def without_secrets(text: str) -> str:
    """Return a text without what libraries may tell of passwords, tokens and signed links."""
    for pattern, shown in _SECRETS:
        text = pattern.sub(shown, text)
    return text


def cache_folder() -> Path:
    """Return where this user keeps what can be made again: LENGTHWISE_CACHE, unless that says off."""
    asked = os.environ.get("LENGTHWISE_CACHE", "")
    usual = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "lengthwise"
    return Path(os.path.abspath(os.path.expanduser(usual if asked in ("", "off") else asked)))


def staging_of(url: str) -> Path:
    """Return the folder of this machine that a run writes whose output is a URL: one a machine, if homes are shared."""
    return cache_folder() / "output" / hashlib.sha256(url.encode()).hexdigest()[:16] / socket.gethostname()


def is_url(text: object) -> bool:
    """Whether a setting is a URL, not a path of this machine."""
    return isinstance(text, str) and "://" in text


def wrong_in_url(url: str) -> str | None:
    """Say why a URL cannot be an output, in words that may follow "got", without its secrets; None: it may be."""
    shown = without_secrets(url)
    scheme, _, rest = url.partition("://")
    if "@" in rest or "?" in rest or "#" in rest:
        return f"{shown}, with what may be a password: the library of the store reads it from the environment"
    if "::" in url or not re.fullmatch(r"[a-z][a-z0-9+.-]*", scheme):
        return f"{shown}, which names no store"
    if not rest.strip("/") or ".." in rest.split("/") or not rest.isprintable():
        return f"{shown}, which names no folder"
    try:
        import fsspec
    except ImportError:
        return f"{shown}, and fsspec is not installed"
    try:
        fsspec.get_filesystem_class(scheme)
    except (ImportError, ValueError) as error:
        return f"{shown}: {without_secrets(' '.join(str(error).split()))}"
    return None


class RemoteFolder:
    """Files below a URL, by their names within it ("checkpoints/step-000050/manifest.json").

    Every method raises OSError where it fails, FileNotFoundError where there is no such file. One that was made before
    a fork is not to be used after it.
    """

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        with _as_oserror(self.url):
            import fsspec

            self._files: Any
            self._files, root = fsspec.core.url_to_fs(self.url)
        self._root = str(root).rstrip("/")
        protocol = self._files.protocol
        names = {protocol} if isinstance(protocol, str) else set(protocol)
        self._renames = bool(names & _RENAMES) or bool(getattr(self._files, "local_file", False))

    def __str__(self) -> str:
        return self.url

    def named(self, name: str) -> str:
        """Return the URL of a file."""
        return f"{self.url}/{name}"

    def put(self, path: Path, name: str) -> None:
        """Copy a file of this machine, which nobody writes meanwhile."""
        with _as_oserror(self.named(name)):
            self._place(name, lambda to: self._files.put_file(os.fspath(path), to), path.stat().st_size)

    def put_bytes(self, content: bytes, name: str) -> None:
        """Write a file."""
        with _as_oserror(self.named(name)):
            self._place(name, lambda to: self._files.pipe_file(to, content), len(content))

    def read(self, name: str, most_bytes: int = 256 << 20) -> bytes:
        """Read a file whole; OSError: it has more bytes."""
        with _as_oserror(self.named(name)), self._files.open(self._at(name), "rb") as file:
            content = file.read(most_bytes + 1)
        if len(content) > most_bytes:
            raise OSError(f"{self.named(name)}: more than {most_bytes:,} bytes")
        return content

    def fetch(self, name: str, path: Path) -> str:
        """Copy a file to this machine; return its SHA-256."""
        with _as_oserror(self.named(name)), path.open("wb") as copy:
            return self._digest(name, copy)

    def digest(self, name: str) -> str:
        """Return the SHA-256 of a file, of which nothing is kept."""
        with _as_oserror(self.named(name)):
            return self._digest(name)

    def sizes(self, under: str = "") -> Mapping[str, int]:
        """Return the bytes of all files there, below a folder where one is named; nothing for a folder not there."""
        with _as_oserror(self.named(under)):
            self._files.invalidate_cache()
            try:
                found = self._files.find(self._at(under), detail=True)
            except FileNotFoundError:
                return {}
        start = len(self._root) + 1
        return {path[start:]: row["size"] for path, row in sorted(found.items()) if not path.endswith(_UNFINISHED)}

    def delete(self, name: str) -> None:
        """Remove a file, or a folder with all that is in it; one that is not there is no failure."""
        with _as_oserror(self.named(name)), contextlib.suppress(FileNotFoundError):
            self._files.invalidate_cache()
            self._files.rm(self._at(name), recursive=True)

    def _at(self, name: str) -> str:
        return f"{self._root}/{name}" if name else self._root

    def _place(self, name: str, write: Any, num_bytes: int) -> None:
        target = self._at(name)
        writing = f"{target}{_UNFINISHED}" if self._renames else target
        if self._renames:
            self._files.makedirs(target.rpartition("/")[0], exist_ok=True)
        write(writing)
        self._files.invalidate_cache()
        found = self._files.info(writing)["size"]
        if found != num_bytes:
            raise OSError(f"{found} bytes are there of {num_bytes}")
        if self._renames:
            self._files.mv(writing, target)

    def _digest(self, name: str, copy: Any = None) -> str:
        found = hashlib.sha256()
        with self._files.open(self._at(name), "rb") as file:
            while chunk := file.read(_CHUNK_BYTES):
                found.update(chunk)
                if copy is not None:
                    copy.write(chunk)
        return found.hexdigest()


@contextlib.contextmanager
def _as_oserror(url: str) -> Iterator[None]:
    """Raise what goes wrong in the block as an OSError that names the file and tells no secrets."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 - libraries of stores raise kinds of their own
        kind = FileNotFoundError if isinstance(error, FileNotFoundError | NotADirectoryError) else OSError
        told = str(error) if type(error) is OSError else f"{type(error).__name__}: {error}"
        said = without_secrets(told)
        raise kind(f"{without_secrets(url)}: {' '.join(said.split())[:300]}") from None


@contextlib.contextmanager
def storing(url: str, kind: type[OutputError] = WriteError) -> Iterator[None]:
    """Raise an error of this kind, which names the URL, for what a store does not do in the block."""
    try:
        yield
    except OSError as error:
        remedy = "See that the URL is right, the store can be reached, and this machine may write there."
        raise kind(url, expected="a store that can be written", got=str(error), remedy=remedy) from None


def _http_options() -> dict[str, Any]:
    import aiohttp

    quiet = aiohttp.ClientTimeout(total=None, sock_connect=_QUIET_SECONDS, sock_read=_QUIET_SECONDS)
    return {"client_kwargs": {"timeout": quiet}}


@contextlib.contextmanager
def _telling_absence() -> Iterator[None]:
    """Tell a file that is not there from a server that fails: fsspec says the first of each failure of HTTP."""
    try:
        yield
    except FileNotFoundError as error:
        cause = error.__cause__
        if type(cause).__module__.startswith("aiohttp") and getattr(cause, "status", None) not in (404, 410):
            raise OSError(f"{type(cause).__name__}: {cause}") from None
        raise


def _told(info: Mapping[str, Any]) -> tuple[int | None, str | None]:
    told = {key: str(info[key]) for key in _STATES if info.get(key) is not None}
    return info.get("size"), json.dumps(told) if told else None


class RemoteFile:
    """One file, or a folder of them, at a URL, to be read.

    Every method raises OSError, FileNotFoundError where there is none.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        with _as_oserror(url):
            import fsspec

            self._files: Any
            # One answer from its beginning: servers need no ranges. Its default ends whatever takes over 5 minutes.
            http = url.startswith(("http://", "https://"))
            self._opening = {"block_size": 0} if http else {}
            self._files, self._path = fsspec.core.url_to_fs(url, **(_http_options() if http else {}))

    def states(self) -> dict[str, tuple[int | None, str | None]]:
        """Return its bytes, and what changes when it does (ETag, version, time); None: the store does not tell.

        By "", or of a folder by the names of all files in it but hidden ones. FileNotFoundError: also a page of HTML,
        as servers show for a folder.
        """
        with _as_oserror(self.url), _telling_absence():
            self._files.invalidate_cache()
            found = self._files.info(self._path)
            if found.get("type") != "directory":
                if found.get("mimetype") == "text/html" and not self._path.endswith((".html", ".htm")):
                    raise FileNotFoundError("a page of HTML, no file of data; over HTTP a folder cannot be listed")
                return {"": _told(found)}
            rows = self._files.find(self._path, detail=True)
        start = len(str(self._files._strip_protocol(self._path)).rstrip("/")) + 1
        names = ((path[start:], row) for path, row in sorted(rows.items()))
        return {name: _told(row) for name, row in names if not any(each.startswith(".") for each in name.split("/"))}

    def fetch(self, path: Path) -> tuple[int, str]:
        """Copy it to this machine; return its bytes and SHA-256."""
        found, num_bytes = hashlib.sha256(), 0
        with (
            _as_oserror(self.url),
            _telling_absence(),
            path.open("wb") as copy,
            self._files.open(self._path, "rb", **self._opening) as file,
        ):
            while chunk := file.read(_CHUNK_BYTES):
                found.update(chunk)
                copy.write(chunk)
                num_bytes += len(chunk)
        return num_bytes, found.hexdigest()
