"""Sources to a dataset: read, check, tokenize and count every row once, and report bad rows together.

Rows of a file that are refused for the same reason are one line with a count. Prepared data is mapped, and its tokens
stay on the disk.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from lengthwise.core.errors import DataError
from lengthwise.data.arrow import ArrowRows
from lengthwise.data.blocks import read_blocks
from lengthwise.data.dataset import TOO_LONG, DatasetBuilder, StoredDataset, StoredRows
from lengthwise.data.in_order import StreamOrder
from lengthwise.data.prepared import ENCODING, Prepared, UsedTokenizer, is_prepared, read_prepared, refuse
from lengthwise.data.refusals import Refusals, too_long
from lengthwise.data.sources import list_source
from lengthwise.data.tokenizer import Tokenizer
from lengthwise.data.tokens import BAD, REFUSED, Tokenizing, TokenRow

if TYPE_CHECKING:
    from lengthwise.config import DataSource


def load_dataset(
    sources: Sequence[DataSource],
    *,
    tokenizer: Callable[[], Tokenizer],
    vocab_size: int | None,
    key: str = "data",
    check_tokenizer: bool = True,
    on_bad_row: Callable[[DataError], None] = lambda _error: None,
) -> StoredDataset:
    """Read all rows of all sources, in order.

    tokenizer: function that is called once, for the first text. vocab_size: vocabulary of the model; None skips the
    check of ids. key: config path of the sources, for messages. check_tokenizer: False allows prepared sources of any
    tokenizer. on_bad_row: function that is called with the error of each row that `bad_rows: skip` leaves out.

    Raises DataError for a bad row (Problems for several: the first 20 kinds and a count), or for no row to train on.
    """
    refusals, parts, bad = Refusals(), list[StoredRows](), list[DataError]()
    builder, loaded, keys = DatasetBuilder(), functools.cache(tokenizer), [f"{key}.{n}" for n in range(len(sources))]
    tokenizing = Tokenizing(sources=sources, keys=keys, tokenizer=loaded, vocab_size=vocab_size)

    def note(error: DataError) -> None:
        bad[:] = bad or [error]
        on_bad_row(error)

    for index, (source, where) in enumerate(zip(sources, keys, strict=True)):
        if source.path is not None and is_prepared(source.path):
            judge = loaded if check_tokenizer else None
            mapped = open_prepared(source, key=where, tokenizer=judge, vocab_size=vocab_size, report=refusals.add)
            if mapped is not None:
                parts += [builder.rows(), mapped] if builder.num_rows else [mapped]
                builder = DatasetBuilder()
            continue
        for file in list_source(source, refusals.add, key=where):
            builder.start_source(where, file.label, file.names, source.weight)
            blocks = (replace(block, source=index) for block in read_blocks(file, stream=bool(file.paths)))
            for row in (row for block in blocks for row in tokenizing.rows(block)):
                if row.kind == REFUSED:
                    assert row.error is not None, row
                    refusals.add(row.error)
                else:
                    _take(row, builder, note)
    refusals.raise_all(key)
    dataset = StoredDataset([*parts, builder.rows()] if builder.num_rows or not parts else parts)
    if not len(dataset.ids):
        left_out = ", ".join(f"{count} {reason}" for reason, count in dataset.skipped.items())
        first = f"; the first, {bad[0].where}: expected {bad[0].expected}; got {bad[0].got}" if bad else ""
        got = f"none (left out: {left_out or 'nothing'}{first})"
        remedy = bad[0].remedy if bad else "Add rows, or raise max_tokens."
        where = ", ".join(str(each.path or each.dataset or key) for each in sources)
        raise DataError(where, expected="at least one sequence to train on", got=got, remedy=remedy)
    return dataset


def first_rows(
    sources: Sequence[DataSource],
    *,
    tokenizer: Callable[[], Tokenizer],
    vocab_size: int | None,
    sequences: int | None,
    tokens: int | None = None,
    on_bad_row: Callable[[DataError], None] = lambda _error: None,
) -> StoredDataset:
    """Read the first `sequences` rows or `tokens` tokens of a stream."""
    builder, loaded, read, num_tokens = DatasetBuilder(), functools.cache(tokenizer), 0, 0
    keys = [f"data.{number}" for number in range(len(sources))]
    tokenizing = Tokenizing(sources=sources, keys=keys, tokenizer=loaded, vocab_size=vocab_size)
    for row in (row for block in StreamOrder(sources).blocks() for row in tokenizing.rows(block)):
        if row.kind == REFUSED:
            assert row.error is not None, row
            raise row.error
        builder.start_source(keys[row.source], row.name, (row.name,))
        _take(row, builder, on_bad_row)
        if row.tokens is None:
            continue
        read, num_tokens = read + 1, num_tokens + len(row.tokens)
        if read == sequences or (tokens is not None and num_tokens >= tokens):
            break
    if not read:
        where, expected = "data", "at least one sequence to train on"
        raise DataError(where, expected=expected, got="none", remedy="Add rows, or raise max_tokens.")
    return builder.finish()


def _take(row: TokenRow, builder: DatasetBuilder, on_bad_row: Callable[[DataError], None]) -> None:
    if row.tokens is None:
        builder.skip(row.kind)
    else:
        builder.add(*row.arrays, row.images)
    if row.kind == BAD and row.error is not None:
        on_bad_row(row.error)


def open_prepared(
    source: DataSource,
    *,
    key: str,
    tokenizer: Callable[[], Tokenizer] | None,
    vocab_size: int | None,
    report: Callable[[DataError], None],
) -> ArrowRows | None:
    """Open the prepared folder of a source; report the reasons and return None if the run cannot use it.

    tokenizer: function that is called if some rows were texts; None allows any tokenizer. vocab_size: None skips the
    check of ids.
    """
    assert source.path is not None, "prepared data has a path"
    folder, refused = source.path, list[DataError]()
    try:
        made = read_prepared(folder)
        dataset = ArrowRows(folder, made, key=key, max_tokens=source.max_tokens, weight=source.weight)
    except DataError as error:
        report(error)
        return None
    except OSError as error:  # the folder is being replaced
        report(refuse(Path(error.filename or folder), "a file that stays there", error.strerror or str(error)))
        return None
    if tokenizer is not None and made.tokenizer is not None:
        refused += _other_tokenizer(folder, made, made.tokenizer, tokenizer())
    if made.encoding != ENCODING:
        refused.append(refuse(folder, f"encoding {ENCODING}", f"{made.encoding}, of lengthwise {made.version}"))
    if vocab_size is not None and made.largest_id >= vocab_size:
        row = made.largest_id_row
        got = f"id {made.largest_id} in row {row} ({dataset.name(row)})"
        remedy = "Take the model that this was prepared for, or prepare it with its tokenizer."
        refused.append(DataError(str(folder), expected=f"ids below the model's {vocab_size}", got=got, remedy=remedy))
    refused += _other_limits(folder, made, source, dataset, key)
    for error in refused:
        report(error)
    return None if refused else dataset


def _other_tokenizer(folder: Path, made: Prepared, its: UsedTokenizer, tokenizer: Tokenizer) -> list[DataError]:
    found = []
    for what, is_used, ours, theirs in (
        ("tokenizer", True, tokenizer.digest(), its.digest),
        ("chat template", made.kinds.get("chat", 0) > 0, tokenizer.template_digest(), its.template),
    ):
        if is_used and ours != theirs:
            expected = f"the {what} of {tokenizer.name} (digest {ours[:16]})"
            remedy = f"Prepare it again with that one, or set {{tokenizer|`tokenizer`}} to {its.name} as it was."
            got = f"one prepared with that of {its.name} (digest {theirs[:16]})"
            found.append(DataError(str(folder), expected=expected, got=got, remedy=remedy))
    return found


def _other_limits(folder: Path, made: Prepared, source: DataSource, dataset: ArrowRows, key: str) -> list[DataError]:
    """Return errors for rows that preparing left out and the source allows, and for rows that the source refuses."""
    limits = [each.get("max_tokens") for each in made.sources]
    least = min((limit for limit in limits if isinstance(limit, int)), default=None)
    left_out = made.skipped.get(TOO_LONG, 0)
    if source.max_tokens is not None and left_out and least is not None and source.max_tokens > least:
        remedy = f"Set {key}.max_tokens: {least}, take it out, or prepare the data again without that limit."
        got = f"prepared data that left out {left_out} rows of more than {least}"
        return [refuse(folder, f"rows of up to max_tokens {source.max_tokens}", got, remedy)]
    if source.too_long == "skip" or source.max_tokens is None:
        return []
    rows = [int(row) for row in dataset.too_long]
    return [too_long(dataset.name(row), dataset.stored_length(row), source.max_tokens, key) for row in rows]
