"""Large sources that were not prepared: prepared by the first process of a node that needs them, opened by all others.

They are kept in `~/.cache/lengthwise`, or where LENGTHWISE_CACHE says, by their files (path, size, inode and times),
settings and tokenizer, so that a run that starts again does not tokenize again; LENGTHWISE_CACHE=off reads all into
memory, as is done with small ones anyway. One process prepares, with one worker a core, while the others wait for as
long as it gets on.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lengthwise.config import DataSource
from lengthwise.core.errors import Collector, ConfigError, DataError, OutputError, RankError, raise_problems
from lengthwise.core.files import try_lock
from lengthwise.data import Tokenizer
from lengthwise.data.load import is_mapped
from lengthwise.data.prepare import prepare_store
from lengthwise.data.shards import Runner
from lengthwise.data.sources import list_source
from lengthwise.data.store import ENCODING, UNFINISHED, check_store
from lengthwise.report.progress import LiveLine, progress_line
from lengthwise.run.workers import usable_cores, worker_processes

VARIABLE = "LENGTHWISE_CACHE"
_LOOK_SECONDS = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class DataCache:
    """Where sources are kept.

    `vocab_size`: the model's; None leaves ids unchecked. `timeout_seconds`: how long to wait for a process that does
    not get on. `small_bytes`: of the files of a source, below which it is read into memory.
    """

    folder: Path
    tokenizer_name: str
    tokenizer: Callable[[], Tokenizer]
    vocab_size: int | None
    timeout_seconds: float
    small_bytes: int = 64 << 20

    def prepared(self, sources: Sequence[DataSource], key: str) -> tuple[DataSource, ...]:
        """Return sources with the large ones prepared; `key` is their config path.

        Raises:
            LengthwiseError: what cannot be read or prepared, of all sources together.
        """
        problems = Collector()
        found = [
            problems.attempt(lambda source=source, number=number: self._source(source, f"{key}.{number}"))
            for number, source in enumerate(sources)
        ]
        problems.raise_all()
        return tuple(each for each in found if each is not None)

    def _source(self, source: DataSource, key: str) -> DataSource:
        if source.path is not None and is_mapped(source.path):
            return source
        files = _files(source)
        if sum(size for _, size, *_ in files) < self.small_bytes:
            return source
        unweighted = source.model_copy(update={"weight": 1.0})
        store = self.folder / self._name(unweighted, files)
        self._make(unweighted, store, key)
        return DataSource(path=store, weight=source.weight)

    def _name(self, source: DataSource, files: Sequence[tuple[Any, ...]]) -> str:
        made: list[str] | None = None
        with contextlib.suppress(ConfigError):  # whether rows need it, they tell
            made = [self.tokenizer().digest(), self.tokenizer().template_digest()]
        values = [ENCODING, source.model_dump(mode="json"), made, self._most_ids(source), files]
        return hashlib.sha256(json.dumps(values).encode()).hexdigest()[:32]

    def _most_ids(self, source: DataSource) -> int | None:
        """Return below what ids must be for rows to be taken; None: a bad row stops the run, and opening finds it."""
        return self.vocab_size if source.bad_rows == "skip" else None

    def _make(self, source: DataSource, store: Path, key: str) -> None:
        """Prepare a source, or wait until another process has."""
        lock, seen, still = self.folder / f"{store.name}.lock", set[tuple[Any, ...]](), 0.0
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            while not _is_whole(store):
                held = try_lock(lock)
                if isinstance(held, str):
                    before, seen = seen, _written(store, lock)
                    still = still + _LOOK_SECONDS if seen == before else 0.0
                    if still > self.timeout_seconds:
                        raise self._no_progress(key, held)
                    time.sleep(_LOOK_SECONDS)
                    continue
                try:
                    if not _is_whole(store):
                        self._prepare(source, store, key, lock)
                finally:
                    lock.unlink(missing_ok=True)
                    held.close()
        except OSError as error:
            got = f"{error.strerror or error} at {error.filename or self.folder}"
            raise _unwritable(self.folder, got) from None

    def _no_progress(self, key: str, owner: str) -> RankError:
        expected = f"{key} to be prepared, which {owner} is doing, with progress in {self.timeout_seconds:g} s"
        remedy = "Raise {timeout_seconds}, or prepare the data first: lengthwise prepare."
        return RankError("start, preparing data", expected=expected, got="none", remedy=remedy)

    def _prepare(self, source: DataSource, store: Path, key: str, lock: Path) -> None:
        line = LiveLine(sys.stderr)
        line.write(f"{key} is prepared once, into {store} (another folder, or off: {VARIABLE})")
        try:
            with worker_processes(usable_cores(), timeout_seconds=self.timeout_seconds) as run:
                prepare_store(
                    [source],
                    store,
                    tokenizer_name=self.tokenizer_name,
                    tokenizer=self.tokenizer,
                    keys=[key],
                    run=_telling(run, lock),
                    on_progress=progress_line(line),
                    overwrite=True,  # of one that is damaged
                    vocab_size=self._most_ids(source),
                )
        except OutputError as error:
            raise _unwritable(self.folder, error.got) from None
        finally:
            line.close()


def data_cache(
    tokenizer_name: str, tokenizer: Callable[[], Tokenizer], vocab_size: int | None, timeout_seconds: float
) -> DataCache | None:
    """Return where this user's data are kept; None: nowhere."""
    asked = os.environ.get(VARIABLE, "")
    if asked == "off":
        return None
    usual = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "lengthwise"
    folder = Path(os.path.abspath(os.path.expanduser(asked or usual)))
    return DataCache(
        folder=folder,
        tokenizer_name=tokenizer_name,
        tokenizer=tokenizer,
        vocab_size=vocab_size,
        timeout_seconds=timeout_seconds,
    )


def _files(source: DataSource) -> list[tuple[Any, ...]]:
    """Return path, size, inode and times of each file of a source; none where something is wrong, told when read."""
    wrong = list[DataError]()
    listings = list_source(source, wrong.append)
    if source.dataset is not None:
        raise_problems(wrong)  # to ask a hub that is not there once more takes as long again
    paths = [
        path
        for each in listings
        for path in ([each.root] if each.names is None else [each.root / name for name in each.names])
    ]
    try:
        found = [(str(path), path.stat()) for path in paths]
    except OSError:
        return []
    if wrong:
        return []
    return [(path, each.st_size, each.st_ino, each.st_mtime_ns, each.st_ctime_ns) for path, each in found]


def _is_whole(store: Path) -> bool:
    try:
        check_store(store)
    except DataError:
        return False
    return True


def _written(store: Path, lock: Path) -> set[tuple[Any, ...]]:
    """Return what differs whenever the one who prepares a store has written anything: sizes and times of its files. A
    file that is not cut into shards grows for a long time before it is one.
    """
    found = set[tuple[Any, ...]]()
    with contextlib.suppress(FileNotFoundError):  # it is at its end
        for path in (lock, *store.with_name(store.name + UNFINISHED).rglob("*")):
            status = path.stat()
            found.add((path, status.st_size, status.st_mtime_ns))
    return found


def _telling(run: Runner, lock: Path) -> Runner:
    """Run tasks, and let those who wait see by the lock's time that there is progress."""

    def telling(function: Callable[[Any], Any], tasks: Sequence[Any]) -> Iterable[Any]:
        for each in run(function, tasks):
            os.utime(lock)
            yield each

    return telling


def _unwritable(folder: Path, got: str) -> OutputError:
    remedy = f"Make room, name another folder with {VARIABLE}, or set it to off: data is then read into memory."
    return OutputError(str(folder), expected="a folder for prepared data", got=got, remedy=remedy)
