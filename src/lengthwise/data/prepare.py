"""Tokenize once: sources to a folder of Arrow files (`arrow`), in order, in the processes of the caller.

`OUT.unfinished` is renamed to `OUT` when all files are on the disk. After a kill, a second try with the same sources,
settings and tokenizer keeps the finished files, reads on from the mark of the last, and ends with the same bytes.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate, chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lengthwise.core import __version__
from lengthwise.core.errors import ConfigError, DataError, OutputError, RankError, raise_problems
from lengthwise.core.files import sync, try_lock
from lengthwise.data.arrow import KINDS, UNREADABLE, Columns, schema, table_of
from lengthwise.data.dataset import TOO_LONG
from lengthwise.data.digests import digest_of_rows
from lengthwise.data.in_order import listed_blocks
from lengthwise.data.prepared import (
    ENCODING,
    NAME,
    UNFINISHED,
    Prepared,
    Progress,
    UsedTokenizer,
    is_prepared,
    read_prepared,
    write_description,
)
from lengthwise.data.refusals import Refusals
from lengthwise.data.sources import PART_BYTES, Listing, list_source
from lengthwise.data.tokenizer import Tokenizer, tokenizer_of_process
from lengthwise.data.tokens import BAD, EMPTY, REFUSED, Runner, Tokenizing, TokenRow

if TYPE_CHECKING:
    from lengthwise.config import DataSource

_FILES = 50  # after so many files they are twice as large: training keeps all of them open
_TASK_BYTES = 1 << 20  # bytes of source files per Arrow batch
_WORK, _PLAN = "work", "plan.json"
_LOOK_SECONDS = 0.2
_LEFT_OUT = (EMPTY, BAD, TOO_LONG)
_OF_RUNS = {"weight", "remote", "streaming"}  # settings of a source that change no row


@dataclass(frozen=True, slots=True, kw_only=True)
class ToPrepare:
    """Sources with their config paths and listings, and the tokenizer: everything that decides the prepared rows."""

    sources: tuple[DataSource, ...]
    keys: tuple[str, ...]
    listings: tuple[tuple[int, Listing], ...]
    tokenizer: UsedTokenizer | None
    tokenizer_name: str
    vocab_size: int | None
    files: tuple[tuple[str, int, int, int], ...]

    def fingerprint(self) -> str:
        """Return the SHA-256 of settings, tokenizer, and path, size, inode and time of each file."""
        settings = [source.model_dump(mode="json", exclude=_OF_RUNS) for source in self.sources]
        made = None if self.tokenizer is None else asdict(self.tokenizer)
        values = [ENCODING, made, settings, self.vocab_size, self.files]
        return hashlib.sha256(json.dumps(values).encode()).hexdigest()

    @property
    def tokenizing(self) -> Tokenizing:
        """The tokenization of the rows."""
        tokenizer = functools.partial(tokenizer_of_process, self.tokenizer_name)
        return Tokenizing(sources=self.sources, keys=self.keys, tokenizer=tokenizer, vocab_size=self.vocab_size)


def to_prepare(
    sources: Sequence[DataSource],
    *,
    tokenizer_name: str,
    tokenizer: Callable[[], Tokenizer],
    keys: Sequence[str] | None = None,
    vocab_size: int | None = None,
    least_bytes: int = 0,
) -> ToPrepare | None:
    """Find all files of all sources; return None if they have fewer than `least_bytes` in all.

    tokenizer: function that loads the tokenizer of that name; if it raises ConfigError, a row of text is an error.
    keys: config paths of the sources (default: data.0 and so on). vocab_size: rows with larger ids are bad; None skips
    the check. Raises DataError, or Problems, for missing files, prepared data, streams and weights.
    """
    keys = [f"data.{number}" for number in range(len(sources))] if keys is None else keys
    problems, listings = list[DataError](), list[tuple[int, Listing]]()
    for number, (key, source) in enumerate(zip(keys, sources, strict=True)):
        if source.path is not None and is_prepared(source.path):
            remedy = "Name it in a run file as it is."
            problems.append(DataError(key, expected="data to prepare", got="prepared data", remedy=remedy))
        elif source.streaming:
            remedy = "Take streaming out to have all of it read, or train on the stream as it is."
            problems.append(
                DataError(key, expected="data to prepare", got="a stream, which may not end", remedy=remedy)
            )
        else:
            listings += [(number, each) for each in list_source(source, problems.append)]
        if source.weight != 1:
            expected, remedy = (
                "no weight: it is of runs, not of rows",
                "Prepare this source alone, and weigh its folder.",
            )
            problems.append(DataError(f"{key}.weight", expected=expected, got=f"{source.weight}", remedy=remedy))
    raise_problems(problems)
    files = tuple(_found(path) for _, listing in listings for path in listing.paths)
    if sum(size for _, size, *_ in files) < least_bytes:
        return None
    try:
        loaded = tokenizer()
        made = UsedTokenizer(name=tokenizer_name, digest=loaded.digest(), template=loaded.template_digest())
    except ConfigError:
        made = None
    return ToPrepare(
        sources=tuple(sources),
        keys=tuple(keys),
        listings=tuple(listings),
        tokenizer=made,
        tokenizer_name=tokenizer_name,
        vocab_size=vocab_size,
        files=files,
    )


def prepare_folder(
    plan: ToPrepare,
    out: Path,
    *,
    run: Runner = map,
    overwrite: bool = False,
    wait_seconds: float | None = None,
    on_start: Callable[[], None] = lambda: None,
    on_progress: Callable[[Progress], None] = lambda _progress: None,
    part_bytes: int = PART_BYTES,
) -> tuple[Prepared, bool]:
    """Prepare sources into the folder `out`; return its description, and True if the same folder existed already.

    run: runner that tokenizes, here or in other processes. wait_seconds: time to wait without progress of another
    process that prepares the folder; None refuses such a folder. All bad rows are reported together.
    """
    out = Path(os.path.abspath(out))
    try:
        if _is_there(out, plan, overwrite=overwrite):
            return read_prepared(out), True
        out.parent.mkdir(parents=True, exist_ok=True)
        lock = out.parent / f".{out.name}.lock"
        locked = _hold(lock, out, plan, wait_seconds)
        if locked is None:
            return read_prepared(out), True
        try:
            if _is_there(out, plan, overwrite=overwrite):  # the process that held the lock has prepared it
                return read_prepared(out), True
            on_start()
            return _prepare(plan, out, run, on_progress, part_bytes), False
        finally:
            lock.unlink(missing_ok=True)
            locked.close()
    except OSError as error:
        got = f"{error.strerror or error} at {error.filename or out}"
        remedy = "Make room or choose another folder; the same command then continues with what is prepared."
        raise OutputError(str(out), expected="a folder to write into", got=got, remedy=remedy) from None


def _hold(lock: Path, out: Path, plan: ToPrepare, wait_seconds: float | None) -> Any:
    """Return the lock once this process holds it; None if another process has prepared the folder meanwhile."""
    seen, still = set[Any](), 0.0
    while isinstance(locked := try_lock(lock), str):
        if wait_seconds is None:
            expected, got = "a folder that nobody else prepares", f"one that {locked} is writing"
            raise OutputError(str(out), expected=expected, got=got, remedy="Wait for its end, or choose another.")
        before, seen = seen, files_in(_unfinished(out))
        still = still + _LOOK_SECONDS if seen == before else 0.0
        if still > wait_seconds:
            expected = f"{_together(plan)} to be prepared, which {locked} is doing, with progress in {wait_seconds:g} s"
            remedy = "Raise {timeout_seconds}, or prepare the data first: lengthwise prepare."
            raise RankError("start, preparing data", expected=expected, got="none", remedy=remedy)
        time.sleep(_LOOK_SECONDS)
        if _is_there(out, plan, overwrite=True):
            return None
    return locked


def _is_there(out: Path, plan: ToPrepare, *, overwrite: bool) -> bool:
    """Return whether the folder has the same data, whole; refuse anything else, unless it may be overwritten."""
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return False
    if not is_prepared(out):
        got, remedy = "another folder or file", "Choose a folder that is not there."
        raise OutputError(str(out), expected="a new folder, or prepared data", got=got, remedy=remedy)
    try:
        if read_prepared(out).fingerprint == plan.fingerprint():
            return True
        got = "prepared data of other sources, settings or tokenizer"
    except DataError as error:
        got = f"damaged prepared data ({error.where}: {error.got})"
    if not overwrite:
        remedy = "Choose another folder, or give {overwrite} to replace it."
        raise OutputError(str(out), expected="a new folder, or the same data", got=got, remedy=remedy)
    return False


def files_in(folder: Path) -> set[Any]:
    """Return names, sizes and times of the files in a folder, which show progress."""
    found = set[Any]()
    with contextlib.suppress(FileNotFoundError):  # the file was renamed
        for path in folder.rglob("*"):
            status = path.stat()
            found.add((path, status.st_size, status.st_mtime_ns))
    return found


def _unfinished(out: Path) -> Path:
    return out.with_name(out.name + UNFINISHED)


def _prepare(
    plan: ToPrepare, out: Path, run: Runner, on_progress: Callable[[Progress], None], part_bytes: int
) -> Prepared:
    folder = _unfinished(out)
    text = f"in order, {plan.fingerprint()} {part_bytes}\n"
    begun = folder / _WORK / _PLAN
    if not _is_whole(folder, plan):
        if not begun.is_file() or begun.read_text(encoding="utf-8") != text:
            shutil.rmtree(folder, ignore_errors=True)
            begun.parent.mkdir(parents=True)
            begun.with_suffix(".tmp").write_text(text, encoding="utf-8")
            begun.with_suffix(".tmp").replace(begun)
        paths = _write(folder, plan, run, on_progress, part_bytes)
        for path in folder.iterdir():
            if path.is_file() and path not in paths:  # a killed process left it
                path.unlink()
        write_description(folder, _checked(plan, Columns(paths)), schema(), work=folder / _WORK)
    shutil.rmtree(folder / _WORK, ignore_errors=True)
    if out.exists():
        out.rename(folder / _WORK)  # processes that wait for `out` would refuse one without some of its files
        shutil.rmtree(folder / _WORK)
    sync(folder)
    folder.rename(out)
    sync(out.parent)
    return read_prepared(out)


def _is_whole(folder: Path, plan: ToPrepare) -> bool:
    """Return whether an earlier process has finished the folder without renaming it."""
    try:
        return (folder / NAME).is_file() and read_prepared(folder).fingerprint == plan.fingerprint()
    except DataError:
        return False


def _write(
    folder: Path, plan: ToPrepare, run: Runner, on_progress: Callable[[Progress], None], part_bytes: int
) -> list[Path]:
    """Write all rows in order, after those of finished files; return all files."""
    import pyarrow as pa

    paths, mark, found = list[Path](), None, 0.0
    sizes = iter([size for _, size, *_ in plan.files])
    ends = [*accumulate((sum(islice(sizes, len(listing.paths))) for _, listing in plan.listings), initial=0)]

    def progress(last: TokenRow) -> Progress:
        first, end = ends[last.origin : last.origin + 2]
        return Progress(done=(first + last.share * (end - first)) / max(1, ends[-1]), found=found)

    while (noted := _noted(path := folder / f"rows-{len(paths):06d}.arrow")).is_file():
        mark, found = json.loads(noted.read_text(encoding="utf-8"))
        paths.append(path)
    now = Progress(done=found, found=found)
    on_progress(now)
    with contextlib.closing(
        plan.tokenizing.run(run, listed_blocks(plan.listings, mark), _packed, _TASK_BYTES)
    ) as tables:
        while (first := next(tables, None)) is not None:
            path, num_bytes, most = folder / f"rows-{len(paths):06d}.arrow", 0, part_bytes << len(paths) // _FILES
            now = progress(first[1])
            with path.open("wb") as file, pa.ipc.new_stream(file, schema()) as out:
                for table, last in chain([first], tables):
                    out.write_table(table)
                    mark, now = last.mark, progress(last)
                    on_progress(now)
                    num_bytes += table.nbytes
                    if num_bytes >= most:
                        break
            sync(path)
            noted = _noted(path)
            noted.with_suffix(".tmp").write_text(json.dumps([mark, now.done]), encoding="utf-8")
            noted.with_suffix(".tmp").replace(noted)
            sync(noted.parent)
            paths.append(path)
    return paths


def _packed(rows: list[TokenRow]) -> tuple[Any, TokenRow]:
    """Return (table of the rows, the last row without its tokens)."""
    last = rows[-1]
    return table_of(rows), TokenRow(kind=last.kind, origin=last.origin, share=last.share, mark=last.mark)


def _noted(path: Path) -> Path:
    """Return the path of the note that says that `path` is whole and has the mark of the following rows."""
    return path.parent / _WORK / f"{path.name}.whole"


def _checked(plan: ToPrepare, columns: Columns) -> Prepared:
    """Return the description of the prepared rows; raise all bad rows together."""
    kinds, origins = columns.numbers("kind"), columns.numbers("origin")
    is_row = kinds != KINDS.index(UNREADABLE)
    refusals, firsts = Refusals(), np.searchsorted(origins[is_row], np.arange(len(plan.listings)))
    for row in np.flatnonzero(np.isin(kinds, (KINDS.index(REFUSED), KINDS.index(UNREADABLE)))).tolist():
        where, expected, got, remedy = json.loads(columns.text(row, "error") or "")
        refusals.add(DataError(where, expected=expected, got=got, remedy=remedy))
    refusals.raise_all(_together(plan))
    if tuple(_found(path) for _, listing in plan.listings for path in listing.paths) != plan.files:
        remedy = "Let whatever writes it finish, then start again."
        raise DataError(_together(plan), expected="files that do not change", got="a change", remedy=remedy)
    counts = {name: int(number) for name, number in zip(KINDS, np.bincount(kinds, minlength=len(KINDS)), strict=True)}
    skipped = {name: counts[name] for name in _LEFT_OUT if counts[name]}
    if len(kinds) == sum(skipped.values()):
        left_out = ", ".join(f"{count} {reason}" for reason, count in skipped.items())
        got, remedy = f"none (left out: {left_out or 'nothing'})", "Add rows, or raise max_tokens."
        raise DataError(_together(plan), expected="at least one sequence", got=got, remedy=remedy)
    largest = columns.numbers("largest_id")
    return Prepared(
        version=__version__,
        encoding=ENCODING,
        fingerprint=plan.fingerprint(),
        data=digest_of_rows(map(columns.batch_digests, range(len(columns.batches)))).hex(),
        tables=columns.tables,
        rows=len(kinds),
        tokens=int(columns.lengths.sum()),
        loss_tokens=int(columns.numbers("loss_tokens").sum()),
        largest_id=int(largest.max()),
        largest_id_row=int(largest.argmax()),
        kinds={name: counts[name] for name in KINDS if counts[name] and name not in _LEFT_OUT},
        skipped=skipped,
        tokenizer=plan.tokenizer if any(counts[name] for name in ("text", "pair", "chat")) else None,
        sources=tuple(source.model_dump(mode="json", exclude=_OF_RUNS) for source in plan.sources),
        origins=tuple((int(first), listing.label) for first, (_, listing) in zip(firsts, plan.listings, strict=True)),
        files={path.name: path.stat().st_size for path in columns.files},
    )


def _together(plan: ToPrepare) -> str:
    """Return the config path of all sources, for messages: `data` for data.0 and data.1, the key of a single one."""
    return plan.keys[0] if len(plan.keys) == 1 else plan.keys[0].rpartition(".")[0]


def _found(path: Path) -> tuple[str, int, int, int]:
    """Return (path, size, inode, time) of a file; a missing file is reported when it is read."""
    try:
        status = path.stat()
    except OSError:
        return str(path), 0, 0, 0
    return str(path), status.st_size, status.st_ino, status.st_mtime_ns
