"""Data sources to files of rows: JSON lines, tables, datasets, folders of text, the Python standard library.

A source is a list of `Listing`s in a fixed order. All wrong files are reported together.
"""

from __future__ import annotations

import gzip
import os
import re
import sysconfig
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from io import BufferedReader, RawIOBase
from pathlib import Path
from typing import TYPE_CHECKING, cast

from lengthwise.core.errors import DataError
from lengthwise.core.names import counted
from lengthwise.data.hub import hub_files
from lengthwise.data.prepared import is_prepared
from lengthwise.data.tables import (
    ARROW_FILE,
    ARROW_STREAM,
    PARQUET,
    ZSTANDARD,
    is_saved_dataset,
    saved_files,
    unpacked,
)

if TYPE_CHECKING:
    from lengthwise.config import DataSource

HEAD = 4096  # first bytes of a file, which show its kind
GZIP = b"\x1f\x8b"
PACKED = (GZIP, ZSTANDARD)  # first bytes of packed lines
_BEGINS = (b"{", b"\xef")  # first bytes of JSON lines; the error of the first row names a byte order mark
_AS_LINES = """Write an object a line, CSV for example by: python -c "import pandas; pandas.read_csv('NAME', \
dtype=str, keep_default_na=False).to_json('NAME.jsonl', orient='records', lines=True)\""""
PART_BYTES = 16 << 20  # of tokens or source files
# tests, and packages installed or compiled beside the library
_STDLIB_LEFT_OUT = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"})

_ENDINGS_OF_ROWS = (".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet", ".arrow")  # of files in a folder
_BESIDE_ROWS = re.compile(r"(README|LICENSE)(\.\w+)?|dataset_infos?\.json", re.IGNORECASE)  # of hubs, without data

Report = Callable[[DataError], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """A file of rows, or documents in order.

    root: file of rows, or folder of documents. label: its name in names of rows. names: paths of documents below
    `root`, None for a file of rows. python: True for Python documents. part: bytes [first, last) of `root`, for the
    lines that begin there; None for the whole file.
    """

    root: Path
    label: str
    names: tuple[str, ...] | None = None
    python: bool = False
    part: tuple[int, int] | None = None

    @property
    def paths(self) -> list[Path]:
        """All files of the listing."""
        return [self.root] if self.names is None else [self.root / name for name in self.names]

    @property
    def goes_on(self) -> bool:
        """Whether the part begins after the start of its file."""
        return self.part is not None and self.part[0] > 0

    @property
    def shown(self) -> str:
        """Name of the file or folder in messages."""
        return printable_name(self.root)

    def shown_name(self, name: str) -> str:
        """Return the name of a document in messages."""
        return printable_name(self.root / name)


def list_source(source: DataSource, report: Report) -> list[Listing]:
    """Find the files of a source, sorted by path: one listing per file of rows, or one for all documents."""
    if source.python_stdlib:
        root, label = Path(sysconfig.get_paths()["stdlib"]), "python_stdlib"
        names = [name for name in _walk(root, _STDLIB_LEFT_OUT, report) if name.endswith(".py")]
    else:
        if source.dataset is not None:
            return _list_hub(source, report)
        assert source.path is not None, "a DataSource has a path, a dataset or python_stdlib"
        root, label = source.path, printable_name(source.path.name)
        if not os.path.isdir(root):
            return [Listing(root=root, label=label)]
        if is_saved_dataset(root):
            return _list_saved(root, label, report)
        names = _walk(root, frozenset(), report)
    rows = [] if source.python_stdlib else sorted(name for name in names if name.lower().endswith(_ENDINGS_OF_ROWS))
    others = sorted(name for name in names if name not in rows and not _BESIDE_ROWS.fullmatch(name.rpartition("/")[2]))
    if rows and others:
        got = f"{counted(len(rows), 'file')} of rows ({rows[0]}) and {counted(len(others), 'other')} ({others[0]})"
        remedy = "{name_files|Name each file of rows as a source of its own, or move the others away}."
        report(DataError(printable_name(root), expected="a folder of rows or of texts", got=got, remedy=remedy))
    elif rows:
        return [Listing(root=root / name, label=printable_name(f"{label}/{name}")) for name in rows]
    if not names:
        remedy = "Hidden files and links are left out; name a folder that has others."
        report(DataError(printable_name(root), expected="files", got="a folder without any", remedy=remedy))
    return [Listing(root=root, label=label, names=tuple(sorted(names)), python=source.python_stdlib)]


def raw_listings(source: DataSource, key: str, word: str, report: Report) -> list[Listing]:
    """Find the files of a source that is read during training; report prepared data. word: `remote` or `streaming`."""
    if source.path is not None and is_prepared(source.path):
        remedy = f"Take `{word}` out: it has ids, which are read from the disk as they are needed."
        report(DataError(key, expected=f"raw rows, for `{word}`", got="prepared data", remedy=remedy))
        return []
    return list_source(source, report)


def _list_hub(source: DataSource, report: Report) -> list[Listing]:
    name, split = source.dataset, source.split
    assert name is not None, "asked of a dataset"
    assert split is not None, "a DataSource of a dataset has a split"
    try:
        files = hub_files(name, subset=source.subset, split=split, revision=source.revision)
    except DataError as error:
        report(error)
        return []
    return [Listing(root=file, label=printable_name(f"{name}/{file.name}")) for file in files]


def _list_saved(folder: Path, label: str, report: Report) -> list[Listing]:
    try:
        return [Listing(root=each, label=f"{label}/{each.name}") for each in saved_files(folder)]
    except DataError as error:
        report(error)
        return []


def _walk(root: Path, left_out: frozenset[str], report: Report) -> list[str]:
    """Return paths of the regular files below `root`, with slashes, without hidden files and links.

    A link inside the folder would repeat a document; one that leads out of it could read anything.
    """

    def refuse(error: OSError) -> None:
        report(_unreadable(Path(error.filename or root), error))

    names = []
    for folder, folders, files in os.walk(root, onerror=refuse):
        folders[:] = [name for name in folders if not name.startswith(".") and name not in left_out]
        for name in files:
            path = os.path.join(folder, name)
            if not name.startswith(".") and os.path.isfile(path) and not os.path.islink(path):
                names.append(Path(path).relative_to(root).as_posix())
    return names


def is_table(file: BufferedReader) -> bool:
    """Return whether an open file is Parquet or Arrow."""
    return file.peek(HEAD).startswith((PARQUET, ARROW_FILE, ARROW_STREAM))


def check_lines(file: BufferedReader, path: Path) -> None:
    """Raise DataError for an open, unpacked file that is an array, or whose first lines have no object."""
    head = file.peek(HEAD)[:HEAD]
    has_objects = any(line.lstrip().startswith(_BEGINS) for line in head.split(b"\n"))
    if head.strip() and (head.lstrip()[:1] == b"[" or not has_objects):
        expected = "JSON lines (plain, gzip or Zstandard), Parquet or Arrow"
        got, remedy = f"a file that begins with {head[:16]!r}", _AS_LINES.replace("NAME", path.name)
        raise DataError(printable_name(path), expected=expected, got=got, remedy=remedy)


def parts_of(listing: Listing, most_bytes: int) -> list[Listing]:
    """Cut plain lines and documents into parts of about `most_bytes`; a table or packed file is one part."""
    if listing.names is not None:
        sizes = [path.stat().st_size for path in listing.paths]
        return [replace(listing, names=listing.names[first:last]) for first, last in _spans(sizes, most_bytes)]
    with open_source(listing.root) as rows, listing.root.open("rb") as file:
        if is_table(rows) or file.read(4).startswith(PACKED):
            return [listing]
        size = os.fstat(file.fileno()).st_size
    firsts = range(0, max(1, size), most_bytes)
    return [replace(listing, part=(first, first + most_bytes)) for first in firsts]


def _spans(sizes: Sequence[int], most: int) -> Iterator[tuple[int, int]]:
    """Yield [first, last) of runs of about `most` bytes."""
    first = num_bytes = 0
    for number, size in enumerate(sizes):
        num_bytes += size
        if num_bytes >= most or number == len(sizes) - 1:
            yield first, number + 1
            first, num_bytes = number + 1, 0


@contextmanager
def open_source(path: Path, *, rows: bool = True) -> Iterator[BufferedReader]:
    """Open a regular file to read it whole; DataError if the system refuses, or if the file changes meanwhile.

    rows: True allows tables, and unpacks gzip and Zstandard.
    """
    shown = printable_name(path)
    try:
        if not path.is_file():  # a pipe would block, a device would never end
            got = "something else" if path.exists() else "nothing there"
            raise DataError(shown, expected="a regular file", got=got, remedy="Correct the path.")
        with path.open("rb") as file:
            before = os.fstat(file.fileno())
            head = file.peek(HEAD)
            if rows and head.startswith(GZIP):
                with gzip.GzipFile(fileobj=file) as packed:
                    yield BufferedReader(cast(RawIOBase, packed))
            elif rows and head.startswith(ZSTANDARD):
                with unpacked(file, shown) as lines:
                    yield lines
            else:
                yield file
        after = path.stat()
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(shown, expected="a whole file of gzip", got=f"{error}", remedy="Copy it again.") from None
    except OSError as error:
        raise _unreadable(path, error) from None
    if version_of(before) != version_of(after):
        raise changed_file(path, f"a change ({before.st_size} bytes before, {after.st_size} after)")


def version_of(status: os.stat_result) -> tuple[int, int, int]:
    """Return inode, size and time of a file, which differ if it was changed or replaced."""
    return status.st_ino, status.st_size, status.st_mtime_ns


def changed_file(path: Path, got: str = "a change") -> DataError:
    """Return the error for a file that was changed or replaced while it is needed."""
    remedy = "Let whatever writes it finish, then start again."
    return DataError(printable_name(path), expected="a file that does not change", got=got, remedy=remedy)


def _unreadable(path: Path, error: OSError) -> DataError:
    got, remedy = error.strerror or str(error), "Correct the path or its permissions."
    return DataError(printable_name(path), expected="a file or folder that can be read", got=got, remedy=remedy)


def printable_name(name: str | Path) -> str:
    """Return a file name as UTF-8, for messages."""
    return str(name).encode("utf-8", "backslashreplace").decode("utf-8")
