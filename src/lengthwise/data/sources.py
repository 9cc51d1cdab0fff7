"""Data sources to files of rows, in a fixed order; the `datasets` library reads them.

A source is a list of `RowFile`s: files of JSON lines, tables, saved datasets, the documents of a folder, a split of a
hub's dataset. All wrong ones are reported together.
"""

from __future__ import annotations

import codecs
import csv
import gzip
import hashlib
import io
import json
import os
import re
import sysconfig
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Literal

from lengthwise.core.errors import DataError
from lengthwise.core.names import counted
from lengthwise.data.files import content_of, printable_name, readable, unreadable, version_of
from lengthwise.data.image_store import leave_encoded
from lengthwise.data.library import Place, library, versions_of
from lengthwise.data.prepared import is_prepared

if TYPE_CHECKING:
    from lengthwise.config import DataSource

HEAD = 4096  # first bytes of a file, which show its kind
_CSV_HEAD = 1 << 17  # that hold its header and first row, as much as `csv` takes for a field
GZIP, ZSTANDARD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
PACKED = (GZIP, ZSTANDARD)
_TABLES = {b"PAR1": "parquet", b"ARROW1": "arrow", b"\xff\xff\xff\xff": "arrow"}
_BEGINS = ("{", "\ufeff")  # first characters of JSON lines; the error of the first row names a byte order mark
_UNPACKED_BYTES = 4 << 20
# tests, and packages installed or compiled beside the library
_STDLIB_LEFT_OUT = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"})
_ENDINGS = {".jsonl": "text", ".json": "text", ".parquet": "parquet", ".arrow": "arrow", ".csv": "csv", ".tsv": "csv"}
_OF_ROWS = re.compile(r".*\.(jsonl|parquet|arrow|csv|tsv)(\.gz|\.zst)?", re.IGNORECASE)  # files in a folder
_BESIDE_ROWS = re.compile(r"(README|LICENSE)(\.\w+)?|dataset_infos?\.json", re.IGNORECASE)  # are no data, say hubs
_SAVED = ("state.json", "dataset_dict.json")  # of a folder that `save_to_disk` wrote

Report = Callable[[DataError], None]

# A byte that is no UTF-8 becomes a character that no JSON has, so its line is refused when it is parsed, by its number.
_NO_UTF8 = "lengthwise.no_utf8"
codecs.register_error(_NO_UTF8, lambda error: ("\0", getattr(error, "end", 0)))
LINES: Mapping[str, Any] = {"keep_linebreaks": True, "encoding_errors": _NO_UTF8}
"""Options with which `datasets` reads lines of JSON as text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowFile:
    """Rows that `datasets` loads together: of one file, of a split, or a folder's documents.

    form: form of a row: a line of JSON, the columns of a table, or the path of a document (`texts`, `python`). label:
    name in names of rows. shown: name in messages. asked: arguments of `datasets.load_dataset`, without its split.
    paths: files of this machine. names: paths of documents below `root`. share: (k, n) for part k of n of the rows.
    """

    form: Literal["lines", "columns", "texts", "python"]
    label: str
    shown: str
    asked: Mapping[str, Any] = field(default_factory=dict)
    split: str = "train"
    root: Path = Path()
    paths: tuple[Path, ...] = ()
    names: tuple[str, ...] | None = None
    share: tuple[int, int] = (0, 1)

    @property
    def place(self) -> Place:
        """The place of the data."""
        return "file" if self.paths else "url" if "data_files" in self.asked else "hub"

    def open(self, *, stream: bool, cache: Path | None = None) -> Any:
        """Return a `datasets.Dataset`, or an `IterableDataset` from the first row on.

        cache: folder for copies of local files (default: the library's own). DataError: `datasets` cannot load them.
        """
        import datasets

        if self.names is not None:
            found: Any = datasets.Dataset.from_dict({"document": range(len(self.names))})
            return found.to_iterable_dataset() if stream else found
        with library(self.shown, self.place):
            if not self.asked:
                found = datasets.load_from_disk(os.fspath(self.root))
                leave_encoded(found.info.features)
                return found.to_iterable_dataset() if stream else found
            if self.paths and cache is None:  # its own key is path and time alone: a replaced file would give old rows
                found = hashlib.sha256(json.dumps(self.versions()).encode()).hexdigest()[:16]
                cache = Path(datasets.config.HF_DATASETS_CACHE) / found  # pyright: ignore[reportAttributeAccessIssue]
            kept = None if cache is None or not self.paths else os.fspath(cache)
            found = datasets.load_dataset(**self.asked, split=self.split, streaming=stream, cache_dir=kept)
            leave_encoded(found.info.features)
            return found

    def identity(self) -> list[Any]:
        """Return values that differ if the rows may differ: sizes and digests of both ends, or a hub's versions.

        They are equal on all nodes. DataError if a file cannot be read.
        """
        if not self.paths:
            with library(self.shown, self.place):
                return [self.label, *versions_of(self.asked, self.split)]
        return [self.label, *(content_of(path, is_document=self.names is not None) for path in self.paths)]

    def versions(self) -> list[tuple[int, int, int]]:
        """Return inode, size and time of every file, which differ if it was changed or replaced."""
        return [version_of(path) for path in self.paths]

    def check_unchanged(self, versions: Sequence[tuple[int, int, int]], first: int, last: int) -> None:
        """Raise DataError if the files of rows [first, last) have changed. versions: versions of all files."""
        places = range(len(self.paths)) if self.names is None else range(first, last)
        for place in places:
            if version_of(path := self.paths[place]) != versions[place]:
                raise changed_file(printable_name(path))


def list_source(source: DataSource, report: Report, *, key: str = "", meanwhile: str = "") -> list[RowFile]:
    """Find the files of a source, sorted by path. meanwhile: `remote` or `streaming`, if read during training."""
    if meanwhile and source.path is not None and is_prepared(source.path):
        remedy = f"Take `{meanwhile}` out: it has ids, which are read from the disk as they are needed."
        report(DataError(key, expected=f"raw rows, for `{meanwhile}`", got="prepared data", remedy=remedy))
        return []
    try:
        return _found(source, report)
    except DataError as error:
        report(error)
        return []


def _found(source: DataSource, report: Report) -> list[RowFile]:
    if source.dataset is not None:
        asked = {"path": source.dataset, "name": source.subset, "revision": source.revision}
        if source.data_files:
            asked["data_files"] = source.data_files
        assert source.split is not None, "a DataSource of a dataset has a split"
        shown = printable_name(":".join(filter(None, (source.dataset, source.subset, source.split))))
        return [RowFile(form="columns", label=shown, shown=shown, asked=asked, split=source.split)]
    if source.url is not None:
        return [_of_url(source.url, source.split or "train")]
    if source.python_stdlib:
        root, label = Path(sysconfig.get_paths()["stdlib"]), "python_stdlib"
        names = [name for name in _walk(root, _STDLIB_LEFT_OUT, report) if name.endswith(".py")]
        return [_documents(root, label, names, form="python")]
    assert source.path is not None, "a DataSource has a path, a dataset or python_stdlib"
    root, label = source.path, printable_name(source.path.name)
    if not os.path.isdir(root):
        return [row_file(root, label)]
    if any(os.path.isfile(root / name) for name in _SAVED):
        return [_saved(root, label)]
    names = _walk(root, frozenset(), report)
    rows = sorted(name for name in names if _OF_ROWS.fullmatch(name))
    others = sorted(name for name in names if name not in rows and not _BESIDE_ROWS.fullmatch(name.rpartition("/")[2]))
    if rows and others:
        got = f"{counted(len(rows), 'file')} of rows ({rows[0]}) and {counted(len(others), 'other')} ({others[0]})"
        remedy = "{name_files|Name each file of rows as a source of its own, or move the others away}."
        raise DataError(printable_name(root), expected="a folder of rows or of texts", got=got, remedy=remedy)
    if rows:
        return [row_file(root / name, printable_name(f"{label}/{name}")) for name in rows]
    if not names:
        remedy = "Hidden files and links are left out; name a folder that has others."
        raise DataError(printable_name(root), expected="files", got="a folder without any", remedy=remedy)
    return [_documents(root, label, names)]


def _documents(root: Path, label: str, names: list[str], form: Literal["texts", "python"] = "texts") -> RowFile:
    ordered = tuple(sorted(names))
    paths, shown = tuple(root / name for name in ordered), printable_name(root)
    return RowFile(form=form, label=label, shown=shown, root=root, names=ordered, paths=paths)


def _saved(root: Path, label: str) -> RowFile:
    shown = printable_name(root)
    if not os.path.isfile(root / _SAVED[0]):
        remedy = "Name each as a source of its own, with its path: FOLDER/train."
        raise DataError(shown, expected="one split of a saved dataset", got="a folder of several", remedy=remedy)
    try:
        names = [each["filename"] for each in json.loads((root / _SAVED[0]).read_bytes())["_data_files"]]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        got = f"{_SAVED[0]} with {type(error).__name__}: {str(error)[:100]}"
        raise DataError(shown, expected="a saved dataset", got=got, remedy="Save it again.") from None
    if not names:
        raise empty_file(shown)
    if wrong := [name for name in names if Path(name).name != name]:
        expected = "a dataset with all its rows in its folder"
        raise DataError(shown, expected=expected, got=f"{wrong}", remedy="Save it again.")
    paths = (root / _SAVED[0], *(root / name for name in names))
    return RowFile(form="columns", label=label, shown=shown, root=root, paths=paths)


def _of_url(url: str, split: str) -> RowFile:
    shown = printable_name(url)
    ending = re.search(r"(\.\w+?)(\.gz|\.zst)?(\?|$)", url.lower())
    builder = _ENDINGS.get(ending[1] if ending else "")
    if builder is None:
        expected, remedy = f"a URL of {', '.join(_ENDINGS)}, perhaps with .gz or .zst", "Name such files."
        raise DataError(shown, expected=expected, got="another ending", remedy=remedy)
    form, options = ("lines", LINES) if builder == "text" else ("columns", {})
    return RowFile(
        form=form, label=shown, shown=shown, split=split, asked={"path": builder, "data_files": [url], **options}
    )


def row_file(path: Path, label: str) -> RowFile:
    """Return a local file by its first bytes and its ending; DataError for an unknown kind."""
    import glob

    shown, (head, is_packed) = printable_name(path), _head(path)
    name = os.path.abspath(path)
    if "::" in name or os.path.expandvars(name) != name:  # `datasets` would look for, or read, another file
        expected, remedy = "a path without :: and names of variables ($NAME)", "Rename it."
        raise DataError(shown, expected=expected, got=printable_name(name), remedy=remedy)
    builder = next((kind for magic, kind in _TABLES.items() if head.startswith(magic)), None)
    of_file: dict[str, Any] = {"label": label, "shown": shown, "root": path, "paths": (path,)}
    ending = path.name.lower().removesuffix(".gz").removesuffix(".zst").rpartition(".")[2]
    if not head or (builder == "parquet" and not _parquet_rows(path)):
        raise empty_file(shown)
    if builder is None and ending in ("csv", "tsv"):
        return RowFile(form="columns", **of_file, asked=_csv(path, "\t" if ending == "tsv" else ","))
    if builder is None and ending in ("txt", "md") and not is_packed:
        return RowFile(form="texts", **{**of_file, "root": path.parent}, names=(path.name,))
    if builder is None:
        _check_lines(head, path)
    asked = {"path": builder or "text", "data_files": [glob.escape(os.fspath(path))], **({} if builder else LINES)}
    return RowFile(form="columns" if builder else "lines", asked=asked, **of_file)


def _head(path: Path, size: int = HEAD) -> tuple[bytes, bool]:
    """Return (first bytes of a regular file, unpacked, True if it is packed)."""
    with readable(path), path.open("rb") as file:
        head = file.read(size)
        file.seek(0)
        try:
            if head.startswith(GZIP):
                with gzip.GzipFile(fileobj=file) as unpacked:
                    return unpacked.read(size), True
            if head.startswith(ZSTANDARD):
                return _whole_zstandard(file, size), True
        except (OSError, EOFError, zlib.error) as error:
            got = f"{type(error).__name__}: {error}"
            raise DataError(printable_name(path), expected="a whole file", got=got, remedy="Copy it again.") from None
    return head, False


def _parquet_rows(path: Path) -> int:
    import pyarrow as pa
    from pyarrow import parquet

    try:
        return parquet.read_metadata(path).num_rows
    except (pa.ArrowException, OSError) as error:
        got = " ".join(str(error).split())[:200]
        raise DataError(printable_name(path), expected="a whole file", got=got, remedy="Copy it again.") from None


def _whole_zstandard(file: BinaryIO, size: int) -> bytes:
    """Unpack a file to its end, and return the first bytes; OSError if it is cut, which `datasets` does not notice."""
    import pyarrow as pa

    with pa.CompressedInputStream(file, "zstd") as unpacked:
        head = unpacked.read(size)
        while unpacked.read(_UNPACKED_BYTES):
            pass
    return head


def _csv(path: Path, delimiter: str) -> dict[str, Any]:
    """Return arguments that read every column of a CSV file as text, without numbers and nulls."""
    import glob

    from datasets import Features, Value

    text = _head(path, _CSV_HEAD)[0].decode("utf-8-sig", "replace")
    records = csv.reader(io.StringIO(text, newline=None), delimiter=delimiter)
    columns, first = next(records, []), next(filter(None, records), [])
    if len(set(columns)) < len(columns) or len(first) > len(columns):  # columns would be lost, or shifted
        got = f"columns {columns} and a first row of {counted(len(first), 'field')}"
        expected, remedy = "names that differ, one for each field", "Correct the header or the row."
        raise DataError(printable_name(path), expected=expected, got=got[:300], remedy=remedy)
    features = Features({column: Value("string") for column in columns})
    plain: dict[str, Any] = {"keep_default_na": False, "na_filter": False, "skip_blank_lines": False}
    plain |= {"sep": delimiter, "features": features}
    return {"path": "csv", "data_files": [glob.escape(os.fspath(path))], **plain}


def _check_lines(head: bytes, path: Path) -> None:
    """Raise DataError for a file that is an array, or whose first lines have no object."""
    text = head.decode("utf-8", "replace").lstrip()
    has_objects = any(line.lstrip()[:1] in _BEGINS for line in text.split("\n"))
    if text and (text.startswith("[") or not has_objects):
        expected = "JSON lines (plain, gzip or Zstandard), Parquet, Arrow or .csv"
        got, remedy = f"a file that begins with {head[:16]!r}", "Write an object a line."
        raise DataError(printable_name(path), expected=expected, got=got, remedy=remedy)


def _walk(root: Path, left_out: frozenset[str], report: Report) -> list[str]:
    """Return paths of the regular files below `root`, with slashes, without hidden files and links.

    A link inside the folder would repeat a document; one that leads out of it could read anything.
    """

    def refuse(error: OSError) -> None:
        report(unreadable(Path(error.filename or root), error))

    names = []
    for folder, folders, files in os.walk(root, onerror=refuse):
        folders[:] = [name for name in folders if not name.startswith(".") and name not in left_out]
        for name in files:
            path = os.path.join(folder, name)
            if not name.startswith(".") and os.path.isfile(path) and not os.path.islink(path):
                names.append(Path(path).relative_to(root).as_posix())
    return names


def empty_file(shown: str) -> DataError:
    """Return the error for a file without rows."""
    remedy = "Take it out of {data|`data`}, or fill it."
    return DataError(shown, expected="rows", got="an empty file", remedy=remedy)


def changed_file(shown: str) -> DataError:
    """Return the error for a file that was changed or replaced while it is needed."""
    remedy = "Let whatever writes it finish, then start again."
    return DataError(shown, expected="a file that does not change", got="a change", remedy=remedy)
