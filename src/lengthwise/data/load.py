"""Sources to a dataset: read, check, tokenize and count every row once, and report the bad ones together.

Rows of one file that are refused for the same reason are one line with a count. Cost: one pass over the files. What
`lengthwise prepare` wrote, and an indexed dataset, are opened as they are, and their tokens stay on the disk.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np

from lengthwise.core.errors import DataError
from lengthwise.data.dataset import TOO_LONG, Dataset, DatasetBuilder, too_long
from lengthwise.data.indexed import indexed_prefix, open_indexed
from lengthwise.data.join import join_datasets
from lengthwise.data.refusals import Refusals
from lengthwise.data.rows import Row, RowParser
from lengthwise.data.sources import Listing, list_source, read_rows
from lengthwise.data.store import is_store, open_store
from lengthwise.data.tokenizer import Tokenizer

if TYPE_CHECKING:
    from lengthwise.config import DataSource


BAD = "bad"


class Rows(Protocol):
    """Where checked rows go, in order."""

    def add(self, tokens: np.ndarray, labels: np.ndarray | None, weights: np.ndarray | None = None) -> None:
        """Take one sequence, int32 [length] each; labels None means the tokens.

        weights: float32 [length]; None means 1 where there is a loss.
        """
        ...

    def skip(self, reason: str) -> None:
        """Take note of a row that is left out."""
        ...


def load_dataset(
    sources: Sequence[DataSource],
    *,
    tokenizer: Callable[[], Tokenizer],
    vocab_size: int | None,
    key: str = "data",
    check_tokenizer: bool = True,
    on_bad_row: Callable[[DataError], None] = lambda _error: None,
) -> Dataset:
    """Read all rows of all sources, in order.

    `tokenizer` is called once, when the first text is met: rows of ids need none. `vocab_size` is the model's; None
    leaves ids unchecked. `key` is the config path of the sources, for messages. `check_tokenizer` False takes prepared
    sources of whatever tokenizer, for who asks for lengths alone. `on_bad_row` hears why a row is left out of a source
    with `bad_rows: skip`. Raises DataError for one bad row of others, Problems for more (the first 20 and a count),
    DataError where nothing is left to train on.
    """
    refusals, parts, bad = Refusals(), list[Dataset](), list[DataError]()

    def note_bad(error: DataError) -> None:
        bad[1:] = [error]  # the first and the last
        on_bad_row(error)

    builder, loaded = DatasetBuilder(), functools.cache(tokenizer)
    for index, source in enumerate(sources):
        where = f"{key}.{index}"
        if source.path is not None and is_mapped(source.path):
            judge = loaded if check_tokenizer else None
            mapped = _open_mapped(source, where, judge, vocab_size, refusals.add)
            if mapped is not None:
                parts += [builder.finish(), mapped] if builder.num_rows else [mapped]
                builder = DatasetBuilder()
            continue
        for listing in list_source(source, refusals.add):
            builder.start_source(where, listing.label, listing.names, source.weight)
            add_rows(
                builder,
                listing,
                source,
                where,
                refusals,
                tokenizer=loaded,
                vocab_size=vocab_size,
                on_bad_row=note_bad,
            )
    refusals.raise_all(key)
    dataset = join_datasets([*parts, builder.finish()] if builder.num_rows or not parts else parts)
    if not len(dataset.ids):
        left_out = ", ".join(f"{count} {reason}" for reason, count in dataset.skipped.items())
        first = f"; the first, {bad[0].where}: expected {bad[0].expected}; got {bad[0].got}" if bad else ""
        got = f"none (left out: {left_out or 'nothing'}{first})"
        remedy = bad[0].remedy if bad else "Add rows, or raise max_tokens."
        where = ", ".join(str(each.path or each.dataset or key) for each in sources)
        raise DataError(where, expected="at least one sequence to train on", got=got, remedy=remedy)
    return dataset


def is_mapped(path: Path) -> bool:
    """Return whether a path names data whose tokens stay on the disk: prepared, or an indexed dataset."""
    return is_store(path) or indexed_prefix(path) is not None


def _open_mapped(
    source: DataSource,
    key: str,
    tokenizer: Callable[[], Tokenizer] | None,
    vocab_size: int | None,
    report: Callable[[DataError], None],
) -> Dataset | None:
    assert source.path is not None, "what is mapped has a path"
    if is_store(source.path):
        return open_store(source, key=key, tokenizer=tokenizer, vocab_size=vocab_size, report=report)
    return open_indexed(source, key=key, vocab_size=vocab_size, report=report)


def add_rows(
    rows: Rows,
    listing: Listing,
    source: DataSource,
    key: str,
    refusals: Refusals,
    *,
    tokenizer: Callable[[], Tokenizer],
    vocab_size: int | None,
    on_row: Callable[[Row], None] = lambda _row: None,
    on_bad_row: Callable[[DataError], None] = lambda _error: None,
) -> None:
    """Read the rows of a listing, tokenize them and hand each to `rows`; what is refused goes to `refusals`.

    `tokenizer` is called for every text. `on_row` hears of each row that could be read, `on_bad_row` why one is left
    out where the source skips those.
    """
    for row in read_rows(listing, RowParser(vocab_size), refusals.add):
        try:
            if isinstance(row, DataError):
                raise row
            on_row(row)
            has_ids = row.ids is not None or row.empty
            tokens, labels = (row.ids, row.labels) if has_ids else _encode(row, tokenizer, vocab_size)
        except DataError as error:
            if source.bad_rows == "skip":
                rows.skip(BAD)
                on_bad_row(error)
            else:
                refusals.add(error)
            continue
        try:
            _add_row(rows, row, tokens, labels, source, key)
        except DataError as error:
            refusals.add(error)


def _add_row(
    rows: Rows, row: Row, tokens: np.ndarray | None, labels: np.ndarray | None, source: DataSource, key: str
) -> None:
    if tokens is None or not len(tokens):
        if source.empty == "skip":
            return rows.skip("empty")
        got = row.empty or "text without a single token"
        remedy = f"Take it out, or {{skip_empty|set {key}.empty: skip}} to leave such rows out."
        raise DataError(row.where, expected="a row with tokens", got=got, remedy=remedy)
    if source.max_tokens is not None and len(tokens) > source.max_tokens:
        if source.too_long == "skip":
            return rows.skip(TOO_LONG)
        raise too_long(row.where, len(tokens), source.max_tokens, key)
    return rows.add(tokens, labels, row.weights)


def _encode(
    row: Row, tokenizer: Callable[[], Tokenizer], vocab_size: int | None
) -> tuple[np.ndarray, np.ndarray | None]:
    loaded, labels = tokenizer(), None
    try:
        if row.python is not None:
            tokens = loaded.encode_python(row.python)
        elif row.chat is not None:
            tokens, labels = loaded.encode_chat(row.chat, row.tools, row.context)
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
