"""Sources to a dataset: read, check, tokenize and count every row once, and report the bad ones together.

Rows of one file that are refused for the same reason are one line with a count. Cost: one pass over the files.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from lengthwise.core.errors import DataError, raise_problems
from lengthwise.data.dataset import DatasetBuilder, MemoryDataset
from lengthwise.data.rows import Row, RowParser
from lengthwise.data.sources import list_source, read_rows
from lengthwise.data.tokenizer import Tokenizer

if TYPE_CHECKING:
    from lengthwise.config import DataSource

Encoder = Callable[[Row], tuple[np.ndarray, np.ndarray | None]]
"""Makes ids, and labels where they are not the ids."""

_SHOWN = 20
_LINE = re.compile(r":\d+$")  # of a row's place in its file


def load_dataset(
    sources: Sequence[DataSource], *, tokenizer: Callable[[], Tokenizer], vocab_size: int | None, key: str = "data"
) -> MemoryDataset:
    """Read all rows of all sources, in order.

    `tokenizer` is called once, when the first text is met: rows of ids need none. `vocab_size` is the model's; None
    leaves ids unchecked. `key` is the config path of the sources, for messages. Raises DataError for one bad row,
    Problems for more (the first 20 and a count), DataError where nothing is left to train on.
    """
    refusals = _Refusals()
    builder = DatasetBuilder()
    parser = RowParser(vocab_size)
    encode = functools.partial(_encode, tokenizer=functools.cache(tokenizer), vocab_size=vocab_size)
    for index, source in enumerate(sources):
        listing = list_source(source, refusals.add)
        builder.start_source(f"{key}.{index}", listing.label, listing.names)
        for row in read_rows(listing, parser, refusals.add):
            try:
                _add_row(builder, row, source, f"{key}.{index}", encode)
            except DataError as error:
                refusals.add(error)
    refusals.raise_all(key)
    dataset = builder.finish()
    if not len(dataset.ids):
        left_out = ", ".join(f"{count} {reason}" for reason, count in dataset.skipped.items())
        got, remedy = f"none (left out: {left_out or 'nothing'})", "Add rows, or raise max_tokens."
        raise DataError(key, expected="at least one sequence to train on", got=got, remedy=remedy)
    return dataset


class _Refusals:
    """Collect errors: one of each kind with how many there are, the first few kinds, and a count of all others."""

    def __init__(self) -> None:
        self._kept: dict[tuple[str, ...], tuple[DataError, int]] = {}
        self._count = 0

    def add(self, error: DataError) -> None:
        self._count += 1
        kind = (_LINE.sub("", error.where), error.expected, error.got)
        first, count = self._kept.get(kind, (error, 0))
        if count or len(self._kept) < _SHOWN:
            self._kept[kind] = (first, count + 1)

    def raise_all(self, key: str) -> None:
        problems = []
        for first, count in self._kept.values():
            got = first.got + (f" (and in {count - 1} more rows)" if count > 1 else "")
            problems.append(DataError(first.where, expected=first.expected, got=got, remedy=first.remedy))
        if self._count > sum(count for _, count in self._kept.values()):
            got, remedy = f"{self._count}, the first {_SHOWN} above", "Correct these; the same causes may repeat."
            problems.append(DataError(key, expected="no bad rows", got=got, remedy=remedy))
        raise_problems(problems)


def _add_row(builder: DatasetBuilder, row: Row, source: DataSource, key: str, encode: Encoder) -> None:
    tokens, labels = (row.ids, row.labels) if row.ids is not None or row.empty else encode(row)
    if tokens is None or not len(tokens):
        if source.empty == "skip":
            return builder.skip("empty")
        got = row.empty or "text without a single token"
        remedy = f"Take it out, or {{skip_empty|set {key}.empty: skip}} to leave such rows out."
        raise DataError(row.where, expected="a row with tokens", got=got, remedy=remedy)
    if source.max_tokens is not None and len(tokens) > source.max_tokens:
        if source.too_long == "skip":
            return builder.skip("too long")
        expected, got = f"at most max_tokens {source.max_tokens}", f"{len(tokens)} tokens"
        remedy = f"Raise {key}.max_tokens, or set {key}.too_long: skip to leave such rows out."
        raise DataError(row.where, expected=expected, got=got, remedy=remedy)
    return builder.add(tokens, labels)


def _encode(
    row: Row, *, tokenizer: Callable[[], Tokenizer], vocab_size: int | None
) -> tuple[np.ndarray, np.ndarray | None]:
    loaded, labels = tokenizer(), None
    try:
        if row.python is not None:
            tokens = loaded.encode_python(row.python)
        elif row.chat is not None:
            tokens, labels = loaded.encode_chat(row.chat, row.tools)
        elif row.pair is not None:
            tokens, labels = loaded.encode_pair(*row.pair)
        else:
            assert row.text is not None, row
            tokens = loaded.encode(row.text)
    except ValueError as error:  # a lone surrogate, which JSON can spell, or a Python file that lies about its encoding
        remedy = "Correct the text."
        if row.chat is not None:
            remedy = "Set {tokenizer|`tokenizer`} to one with a chat template for such chats, or correct the row."
        got = f"{error}"
        raise DataError(row.where, expected="text that can be encoded", got=got, remedy=remedy) from None
    if vocab_size is not None and len(tokens) and int(tokens.max()) >= vocab_size:
        got = f"id {int(tokens.max())} from tokenizer {loaded.name}"
        remedy = "Set {tokenizer|`tokenizer`} to the one this model was made with."
        raise DataError(row.where, expected=f"ids below the model's {vocab_size}", got=got, remedy=remedy)
    return tokens, labels
