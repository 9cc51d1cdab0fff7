"""What is to be prepared, cut into shards of about equal size: files are read once for their digests and lines.

Files of lines are cut at line ends, folders between documents; tables and packed files are whole. Where a cut is
follows from the files alone, so that a second run cuts the same.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from lengthwise.core.errors import DataError, raise_problems
from lengthwise.data.indexed import indexed_prefix
from lengthwise.data.manifest import UsedTokenizer
from lengthwise.data.sources import Lines, Listing, is_lines, list_source, printable_name
from lengthwise.data.store import ENCODING, is_store

if TYPE_CHECKING:
    from lengthwise.config import DataSource

Task = TypeVar("Task")
Result = TypeVar("Result")
Runner = Callable[[Callable[[Any], Any], Sequence[Any]], Iterable[Any]]
"""Calls a function with each of some tasks, in any order, perhaps in other processes; yields what it returns."""

_LEAST_BYTES = 8 << 20  # of source files in a shard
_MOST_SHARDS = 200  # about; each is a file that training keeps open
_BLOCK = 4 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceFile:
    """A file as it was found: `cuts` are places where lines start, with how many lines are before each."""

    path: Path
    num_bytes: int
    modified_ns: int
    sha256: str
    cuts: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexTask:
    """Files to be read once: part of a listing, `place` is its number and that of the first of these files in it."""

    place: tuple[int, int]
    paths: Sequence[Path]
    cut_bytes: int

    def __str__(self) -> str:
        """Say in words what is done, and with which files."""
        return f"reading {shown_files(self.paths)}, to cut it into shards"


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Rows of one listing: number `listing` of all, of the source of this number, from `files`."""

    source: int
    listing: int
    rows: Listing
    files: tuple[SourceFile, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ToPrepare:
    """All that decides what a store is: settings, files, and the shards that follow from them."""

    keys: tuple[str, ...]
    sources: tuple[DataSource, ...]
    tokenizer: UsedTokenizer | None
    tokenizer_name: str
    vocab_size: int | None
    listings: tuple[tuple[int, Listing], ...]
    files: tuple[tuple[SourceFile, ...], ...]
    shards: tuple[tuple[Piece, ...], ...]

    def settings(self) -> list[dict[str, object]]:
        """Return the settings of each source as plain values."""
        return [each.model_dump(mode="json") for each in self.sources]

    def to_json(self) -> str:
        """Return the text of all of it: what was prepared of another text is of no use for this."""
        files = [[(str(f.path), f.num_bytes, f.sha256, f.cuts) for f in group] for group in self.files]
        shards = [[(each.listing, len(each.files), each.rows.part) for each in shard] for shard in self.shards]
        made = None if self.tokenizer is None else asdict(self.tokenizer)
        values = {"encoding": ENCODING, "tokenizer": made, "sources": self.settings(), "files": files, "shards": shards}
        if self.vocab_size is not None:
            values["vocab_size"] = self.vocab_size
        return json.dumps(values, default=asdict) + "\n"

    def digest(self) -> str:
        """Return the SHA-256 of that text."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()


def plan_shards(
    sources: Sequence[DataSource],
    *,
    keys: Sequence[str],
    tokenizer: UsedTokenizer | None,
    tokenizer_name: str,
    run: Runner,
    vocab_size: int | None = None,
    least_bytes: int = _LEAST_BYTES,
) -> ToPrepare:
    """Find all files of all sources, read them once through `run`, and cut them into shards of `least_bytes` or more.

    `keys`: the config path of each source. `tokenizer` is None where it could not be loaded, which is an error once a
    text is met. `vocab_size` None: ids of any size. Raises DataError, or Problems, for what is not there or cannot be
    read.
    """
    problems, listings = list[DataError](), list[tuple[int, Listing]]()
    for number, (key, source) in enumerate(zip(keys, sources, strict=True)):
        if source.weight != 1:
            expected, remedy = (
                "no weight: it is of runs, not of rows",
                "Prepare this source alone, and weigh its folder.",
            )
            where = f"{key}.weight"
            problems.append(DataError(where, expected=expected, got=f"{source.weight}", remedy=remedy))
        if source.path is not None and (is_store(source.path) or indexed_prefix(source.path) is not None):
            got = "a store" if is_store(source.path) else "an indexed dataset, of tokens"
            remedy = "Name it in a run file as it is."
            problems.append(DataError(key, expected="data to prepare", got=got, remedy=remedy))
        else:
            listings += [(number, each) for each in list_source(source, problems.append)]
    raise_problems(problems)
    paths = [_paths(listing) for _, listing in listings]
    total = sum(map(_size, (path for group in paths for path in group)))
    cut_bytes = max(least_bytes, total // _MOST_SHARDS)
    tasks = [
        IndexTask(place=(number, first), paths=group[first:last], cut_bytes=cut_bytes if listing.names is None else 0)
        for number, ((_, listing), group) in enumerate(zip(listings, paths, strict=True))
        for first, last in _spans([_size(path) for path in group], cut_bytes)
    ]
    found = dict(run(_index_files, tasks))
    problems = [each for result in found.values() for each in result if isinstance(each, DataError)]
    raise_problems(problems)
    files = tuple(
        tuple(each for place in sorted(found) if place[0] == number for each in found[place])
        for number in range(len(listings))
    )
    return ToPrepare(
        keys=tuple(keys),
        sources=tuple(sources),
        tokenizer=tokenizer,
        tokenizer_name=tokenizer_name,
        vocab_size=vocab_size,
        listings=tuple(listings),
        files=files,
        shards=tuple(_shards(listings, files, cut_bytes)),
    )


def shown_files(paths: Sequence[Path]) -> str:
    """Return the name of the first of some files, and how many more there are."""
    more = f" and {len(paths) - 1} more" if len(paths) > 1 else ""
    return f"{printable_name(paths[0])}{more}" if paths else "no file"


def _paths(listing: Listing) -> list[Path]:
    return [listing.root] if listing.names is None else [listing.root / name for name in listing.names]


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:  # told when it is read
        return 0


def _spans(sizes: Sequence[int], most: int) -> Iterator[tuple[int, int]]:
    """Cut a list of files into runs of about so many bytes."""
    first = held = 0
    for number, size in enumerate(sizes):
        held += size
        if held >= most or number == len(sizes) - 1:
            yield first, number + 1
            first, held = number + 1, 0


def _index_files(task: IndexTask) -> tuple[tuple[int, int], list[Any]]:
    return task.place, [_index_file(path, task.cut_bytes) for path in task.paths]


def _index_file(path: Path, cut_bytes: int) -> SourceFile | DataError:
    """Read a file whole: its digest, and where it is cut, the first line ends `cut_bytes` apart; 0: nowhere."""
    where, digest, cuts = printable_name(path), hashlib.sha256(), list[tuple[int, int]]()
    try:
        if not path.is_file():
            return DataError(where, expected="a regular file", got="something else", remedy="Correct the path.")
        cut_bytes = cut_bytes if cut_bytes and is_lines(path) else 0
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            offset, lines, next_cut = 0, 0, cut_bytes
            while block := file.read(_BLOCK):
                digest.update(block)
                begin = 0
                while cut_bytes and (place := block.find(b"\n", max(begin, next_cut - offset))) >= 0:
                    lines += block.count(b"\n", begin, place + 1)
                    begin = place + 1
                    cuts.append((offset + begin, lines))
                    next_cut = offset + begin + cut_bytes
                lines += block.count(b"\n", begin) if cut_bytes else 0
                offset += len(block)
    except OSError as error:
        got, remedy = error.strerror or str(error), "Correct the path or its permissions."
        return DataError(where, expected="a file that can be read", got=got, remedy=remedy)
    if offset != status.st_size:
        got, remedy = f"{offset} bytes of {status.st_size}", "Let whatever writes it finish, then start again."
        return DataError(where, expected="a file that stays as it is", got=got, remedy=remedy)
    return SourceFile(
        path=path,
        num_bytes=offset,
        modified_ns=status.st_mtime_ns,
        sha256=digest.hexdigest(),
        cuts=tuple(cut for cut in cuts if cut[0] < offset),
    )


def _shards(
    listings: Sequence[tuple[int, Listing]], files: Sequence[Sequence[SourceFile]], cut_bytes: int
) -> Iterator[tuple[Piece, ...]]:
    held, pieces = 0, list[Piece]()
    for number, ((source, listing), group) in enumerate(zip(listings, files, strict=True)):
        for rows, some, num_bytes in _units(listing, group, cut_bytes):
            pieces.append(Piece(source=source, listing=number, rows=rows, files=tuple(some)))
            held += num_bytes
            if held >= cut_bytes:
                yield tuple(pieces)
                held, pieces = 0, []
    if pieces:
        yield tuple(pieces)


def _units(
    listing: Listing, files: Sequence[SourceFile], cut_bytes: int
) -> Iterator[tuple[Listing, Sequence[SourceFile], int]]:
    """Yield parts of a listing, with their files and bytes."""
    if listing.names is not None:
        sizes = [each.num_bytes for each in files]
        for first, last in _spans(sizes, cut_bytes):
            yield replace(listing, names=listing.names[first:last]), files[first:last], sum(sizes[first:last])
        return
    (file,) = files
    if not file.cuts:
        yield listing, files, file.num_bytes
        return
    for (start, before), (stop, _) in zip([(0, 0), *file.cuts], [*file.cuts, (file.num_bytes, 0)], strict=True):
        yield replace(listing, part=Lines(start=start, stop=stop, lines_before=before)), files, stop - start
