"""The cache of large sources: the first process of a node that needs one prepares it, all others open it.

Entries are folders of `~/.cache/lengthwise`, or of LENGTHWISE_CACHE, named by files (path, size, inode, time), settings
and tokenizer; `images` there are those of `data.image_store`. Small sources, and all with LENGTHWISE_CACHE=off, are
read into memory. One process prepares, by `datasets.map` with a process a core; the others wait while it progresses.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from lengthwise.config import DataSource
from lengthwise.core.errors import Collector, DataError, OutputError
from lengthwise.data import Tokenizer
from lengthwise.data.image_store import VARIABLE, cache_folder
from lengthwise.data.prepare import prepare_folder, to_prepare
from lengthwise.data.prepared import is_prepared
from lengthwise.run.workers import usable_cores


@dataclass(frozen=True, slots=True, kw_only=True)
class DataCache:
    """A folder of prepared sources.

    vocab_size: vocabulary of the model; None skips the check of ids. timeout_seconds: longest wait for a process
    without progress. small_bytes: sources with smaller files are not prepared (default 64 MiB).
    """

    folder: Path
    tokenizer_name: str
    tokenizer: Callable[[], Tokenizer]
    vocab_size: int | None
    timeout_seconds: float
    small_bytes: int = 64 << 20

    def prepared(self, sources: Sequence[DataSource], key: str) -> tuple[DataSource, ...]:
        """Prepare large sources; return all sources, the large ones as prepared folders. key: their config path."""
        problems = Collector()
        found = [
            problems.attempt(lambda source=source, number=number: self._source(source, f"{key}.{number}"))
            for number, source in enumerate(sources)
        ]
        problems.raise_all()
        return tuple(each for each in found if each is not None)

    def _source(self, source: DataSource, key: str) -> DataSource:
        if source.path is not None and is_prepared(source.path):
            return source
        # Opening finds all bad rows that stop the run, for any model.
        vocab_size = self.vocab_size if source.bad_rows == "skip" else None
        try:
            plan = to_prepare(
                [source.model_copy(update={"weight": 1.0})],
                tokenizer_name=self.tokenizer_name,
                tokenizer=self.tokenizer,
                keys=[key],
                vocab_size=vocab_size,
                least_bytes=self.small_bytes,
            )
        except DataError:
            if source.dataset is not None:
                raise  # another request to an absent hub takes as long
            return source  # its reader reports the problem
        if plan is None:
            return source
        folder = self.folder / plan.fingerprint()[:32]
        begin = f"{key} is prepared once, into {folder} (another folder, or off: {VARIABLE})"
        try:
            prepare_folder(
                plan,
                folder,
                processes=usable_cores(),
                overwrite=True,  # of a damaged folder
                wait_seconds=self.timeout_seconds,
                on_start=lambda: print(begin, file=sys.stderr, flush=True),
            )
        except OutputError as error:
            remedy = f"Make room, name another folder with {VARIABLE}, or set it to off: data is then read into memory."
            expected = "a folder for prepared data"
            raise OutputError(str(self.folder), expected=expected, got=error.got, remedy=remedy) from None
        return DataSource(path=folder, weight=source.weight)


def data_cache(
    tokenizer_name: str, tokenizer: Callable[[], Tokenizer], vocab_size: int | None, timeout_seconds: float
) -> DataCache | None:
    """Return the cache of this user; None if it is off."""
    folder = cache_folder()
    return folder and DataCache(
        folder=folder,
        tokenizer_name=tokenizer_name,
        tokenizer=tokenizer,
        vocab_size=vocab_size,
        timeout_seconds=timeout_seconds,
    )
