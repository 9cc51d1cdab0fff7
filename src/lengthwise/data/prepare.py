"""Tokenize once: sources to a folder of Arrow files (`arrow`), in order, by `datasets.map` in some processes.

`OUT.unfinished` is renamed to `OUT` when all files are on the disk. After a kill, a second try with the same sources,
settings, tokenizer and number of processes keeps the finished files, and ends with the same rows.
"""

from __future__ import annotations

import bisect
import contextlib
import functools
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import accumulate, groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lengthwise.core import __version__
from lengthwise.core.errors import Collector, ConfigError, DataError, OutputError, RankError, raise_problems
from lengthwise.core.files import sync, try_lock
from lengthwise.core.processes import ctrl_c_between_forks
from lengthwise.data.arrow import KINDS, Columns, schema, table_of
from lengthwise.data.blocks import ROWS, block_of
from lengthwise.data.dataset import TOO_LONG
from lengthwise.data.digests import digest_of_rows
from lengthwise.data.files import printable_name, version_of
from lengthwise.data.prepared import (
    ENCODING,
    NAME,
    UNFINISHED,
    Prepared,
    UsedTokenizer,
    is_prepared,
    read_prepared,
    write_description,
)
from lengthwise.data.refusals import Refusals
from lengthwise.data.sources import RowFile, changed_file, empty_file, list_source
from lengthwise.data.tokenizer import Tokenizer, tokenizer_of_process
from lengthwise.data.tokens import BAD, EMPTY, REFUSED, Tokenizing

if TYPE_CHECKING:
    from lengthwise.config import DataSource

_WORK, _PLAN = "work", "plan.json"
_LOOK_SECONDS = 0.2
_LEFT_OUT = (EMPTY, BAD, TOO_LONG)
_OF_RUNS = {"weight", "remote", "streaming"}  # settings of a source that change no row


@dataclass(frozen=True, slots=True, kw_only=True)
class ToPrepare:
    """Sources with their config paths and files, and the tokenizer: everything that decides the prepared rows.

    files: (source number, file) pairs. versions: path, inode, size and time of every file.
    """

    sources: tuple[DataSource, ...]
    keys: tuple[str, ...]
    files: tuple[tuple[int, RowFile], ...]
    tokenizer: UsedTokenizer | None
    tokenizer_name: str
    vocab_size: int | None
    versions: tuple[tuple[str, int, int, int], ...]

    def fingerprint(self) -> str:
        """Return the SHA-256 of settings, tokenizer, and path, size, inode and time of each file."""
        settings = [source.model_dump(mode="json", exclude=_OF_RUNS) for source in self.sources]
        made = None if self.tokenizer is None else asdict(self.tokenizer)
        values = [ENCODING, made, settings, self.vocab_size, self.versions]
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
    problems, files = list[DataError](), list[tuple[int, RowFile]]()
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
            files += [(number, each) for each in list_source(source, problems.append, key=key)]
        if source.weight != 1:
            expected, remedy = (
                "no weight: it is of runs, not of rows",
                "Prepare this source alone, and weigh its folder.",
            )
            problems.append(DataError(f"{key}.weight", expected=expected, got=f"{source.weight}", remedy=remedy))
    raise_problems(problems)
    versions = tuple((str(path), *version_of(path)) for _, file in files for path in _paths(file))
    if sum(size for _, _, size, _ in versions) < least_bytes:
        return None
    try:
        loaded = tokenizer()
        made = UsedTokenizer(name=tokenizer_name, digest=loaded.digest(), template=loaded.template_digest())
    except ConfigError:
        made = None
    return ToPrepare(
        sources=tuple(sources),
        keys=tuple(keys),
        files=tuple(files),
        tokenizer=made,
        tokenizer_name=tokenizer_name,
        vocab_size=vocab_size,
        versions=versions,
    )


def prepare_folder(
    plan: ToPrepare,
    out: Path,
    *,
    processes: int = 1,
    overwrite: bool = False,
    wait_seconds: float | None = None,
    on_start: Callable[[], None] = lambda: None,
) -> tuple[Prepared, bool]:
    """Prepare sources into the folder `out`; return its description, and True if the same folder existed already.

    processes: number of processes that tokenize. wait_seconds: time to wait without progress of another process that
    prepares the folder; None refuses such a folder. All bad rows are reported together.
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
            return _prepare(plan, out, processes), False
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
    """Return sizes and times of the files in a folder, which show progress."""
    found = set[Any]()
    with contextlib.suppress(FileNotFoundError):  # the file was renamed
        for path in folder.rglob("*"):
            status = path.stat()
            found.add((path, status.st_size, status.st_mtime_ns))
    return found


def _unfinished(out: Path) -> Path:
    return out.with_name(out.name + UNFINISHED)


def _prepare(plan: ToPrepare, out: Path, processes: int) -> Prepared:
    folder = _unfinished(out)
    text, begun = f"{plan.fingerprint()} {processes}\n", folder / _WORK / _PLAN
    if not _is_whole(folder, plan):
        if not begun.is_file() or begun.read_text(encoding="utf-8") != text:
            shutil.rmtree(folder, ignore_errors=True)
            begun.parent.mkdir(parents=True)
            begun.with_suffix(".tmp").write_text(text, encoding="utf-8")
            begun.with_suffix(".tmp").replace(begun)
        rows, firsts = _tokenized(plan, folder / _WORK, processes)
        made = _checked(plan, Columns([Path(each["filename"]) for each in rows.cache_files]), firsts)
        rows.save_to_disk(os.fspath(folder))
        files = {each["filename"]: (folder / each["filename"]).stat().st_size for each in _saved_files(folder)}
        write_description(folder, replace(made, files=files))
    shutil.rmtree(folder / _WORK, ignore_errors=True)
    if out.exists():
        out.rename(folder / _WORK)  # processes that wait for `out` would refuse one without some of its files
        shutil.rmtree(folder / _WORK)
    sync(folder)
    folder.rename(out)
    sync(out.parent)
    return read_prepared(out)


def _saved_files(folder: Path) -> list[dict[str, str]]:
    return json.loads((folder / "state.json").read_bytes())["_data_files"]


def _is_whole(folder: Path, plan: ToPrepare) -> bool:
    """Return whether an earlier process has finished the folder without renaming it."""
    try:
        return (folder / NAME).is_file() and read_prepared(folder).fingerprint == plan.fingerprint()
    except DataError:
        return False


def _tokenized(plan: ToPrepare, work: Path, processes: int) -> tuple[Any, list[int]]:
    """Return (all rows as a dataset of the files in `work`, number of the first row of every file).

    Consecutive files of a source with the same columns are one call of `map`.
    """
    import datasets

    problems = Collector()
    attempts = [problems.attempt(functools.partial(_mapped, file, work / "raw")) for _, file in plan.files]
    problems.raise_all()
    raw = [rows for rows in attempts if rows is not None]
    firsts, parts = [*accumulate(map(len, raw), initial=0)], list[Any]()

    def alike(number: int) -> tuple[Any, ...]:
        return plan.files[number][0], plan.files[number][1].form, str(raw[number].features)

    for _, group in groupby(range(len(raw)), alike):
        numbers = [*group]
        together: Any = datasets.concatenate_datasets([raw[number] for number in numbers])
        source, files = plan.files[numbers[0]][0], [plan.files[number][1] for number in numbers]
        starts = [firsts[number] - firsts[numbers[0]] for number in numbers]
        try:
            with ctrl_c_between_forks():
                found = together.map(
                    _Tokens(plan.tokenizing, source, files, starts),
                    with_indices=True,
                    batched=True,
                    batch_size=ROWS,
                    writer_batch_size=ROWS,
                    num_proc=number if (number := min(processes, len(together))) > 1 else None,
                    remove_columns=together.column_names,
                    features=datasets.Features.from_arrow_schema(schema()),
                    cache_file_name=os.fspath(work / f"{len(parts)}.arrow"),
                    new_fingerprint=f"{plan.fingerprint()[:32]}{len(parts)}",
                    desc=plan.keys[source],
                )
        except RuntimeError as error:  # a process was killed
            remedy = "Take fewer with {workers}, or take the rows out; the same command goes on with what is there."
            got = " ".join(str(error).split())[:300]
            raise RankError("tokenizing", expected="processes that live", got=got, remedy=remedy) from None
        parts.append(found)
    return datasets.concatenate_datasets(parts), firsts


def _mapped(file: RowFile, cache: Path) -> Any:
    rows = file.open(stream=False, cache=cache)
    if not len(rows):
        raise empty_file(file.shown)
    return rows


@dataclass(frozen=True)
class _Tokens:
    """The function of `map` for some files of a source. starts: number of the first row of every file."""

    tokenizing: Tokenizing
    source: int
    files: Sequence[RowFile]
    starts: Sequence[int]

    def __call__(self, batch: Mapping[str, Sequence[Any]], rows: Sequence[int]) -> Any:
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        found = []
        for number, of_file in groupby(range(len(rows)), lambda at: bisect.bisect_right(self.starts, rows[at]) - 1):
            places = [*of_file]
            part = {name: values[places[0] : places[-1] + 1] for name, values in batch.items()}
            block = block_of(self.files[number], part, rows[places[0]] - self.starts[number])
            found += self.tokenizing.digested(replace(block, source=self.source))
        return table_of(found)


def _checked(plan: ToPrepare, columns: Columns, firsts: Sequence[int]) -> Prepared:
    """Return the description of the prepared rows; raise all bad rows together."""
    kinds, refusals = columns.numbers("kind"), Refusals()
    for row in np.flatnonzero(kinds == KINDS.index(REFUSED)).tolist():
        where, expected, got, remedy = json.loads(columns.text(row, "error") or "")
        refusals.add(DataError(where, expected=expected, got=got, remedy=remedy))
    refusals.raise_all(_together(plan))
    if any(version_of(Path(path)) != tuple(version) for path, *version in plan.versions):
        raise changed_file(_together(plan))
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
        sources=tuple(map(_described, plan.sources)),
        origins=tuple((first, file.label) for first, (_, file) in zip(firsts, plan.files, strict=False)),
        files={},
    )


def _described(source: DataSource) -> dict[str, object]:
    """Return the keys of a source; its path, which may be no UTF-8, as JSON can hold it."""
    keys = source.model_dump(mode="json", exclude=_OF_RUNS)
    return {**keys, "path": None if source.path is None else printable_name(source.path)}


def _together(plan: ToPrepare) -> str:
    """Return the config path of all sources, for messages: `data` for data.0 and data.1, the key of a single one."""
    return plan.keys[0] if len(plan.keys) == 1 else plan.keys[0].rpartition(".")[0]


def _paths(file: RowFile) -> Sequence[Path]:
    """Return the files that are read; of a hub's dataset the copies of `datasets`."""
    return file.paths or [Path(each["filename"]) for each in file.open(stream=False).cache_files]
