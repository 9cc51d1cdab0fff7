"""Sources to a dataset: read, check, tokenize and count every row once, and report the bad ones together.

Rows of one file that are refused for the same reason are one line with a count. Cost: one pass over the files. What
`lengthwise prepare` wrote is opened as it is, and its tokens stay on the disk.
"""

from __future__ import annotations

import bisect
import functools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from lengthwise.core.errors import DataError
from lengthwise.data.arrow import open_prepared
from lengthwise.data.dataset import (
    TOO_LONG,
    Dataset,
    DatasetBuilder,
    NumberedRows,
    digest_of_parts,
    plain_weights,
    too_long,
    write_protect,
)
from lengthwise.data.prepared import is_prepared
from lengthwise.data.refusals import Refusals
from lengthwise.data.rows import Row
from lengthwise.data.sources import Listing, list_source, read_rows
from lengthwise.data.tokenizer import Tokenizer

if TYPE_CHECKING:
    from lengthwise.config import DataSource

BAD, EMPTY, REFUSED = "bad", "empty", "refused"


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRow:
    """A row as it is trained on, or why it is not.

    `kind`: ids, text, pair or chat; of a row without tokens `empty`, `bad` or TOO_LONG where its source leaves such
    rows out, REFUSED where the row stops the run. `error`: what is wrong with it. `labels` None: the tokens, `weights`
    None: 1 where there is a loss. `is_row` False: the error is of the file.
    """

    kind: str
    tokens: np.ndarray | None = None
    labels: np.ndarray | None = None
    weights: np.ndarray | None = None
    error: DataError | None = None
    is_row: bool = True


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
    sources of whatever tokenizer, for who asks for lengths alone. `on_bad_row` gets why a row is left out of a source
    with `bad_rows: skip`. Raises DataError for one bad row of others, Problems for more (the first 20 and a count),
    DataError where nothing is left to train on.
    """
    refusals, parts, bad = Refusals(), list[Dataset](), list[DataError]()
    builder, loaded = DatasetBuilder(), functools.cache(tokenizer)
    for index, source in enumerate(sources):
        where = f"{key}.{index}"
        if source.path is not None and is_prepared(source.path):
            judge = loaded if check_tokenizer else None
            mapped = open_prepared(source, key=where, tokenizer=judge, vocab_size=vocab_size, report=refusals.add)
            if mapped is not None:
                parts += [builder.finish(), mapped] if builder.num_rows else [mapped]
                builder = DatasetBuilder()
            continue
        for listing in list_source(source, refusals.add):
            builder.start_source(where, listing.label, listing.names, source.weight)
            for row in token_rows(listing, source, where, tokenizer=loaded, vocab_size=vocab_size):
                if row.kind == REFUSED:
                    assert row.error is not None, row
                    refusals.add(row.error)
                elif row.tokens is None:
                    builder.skip(row.kind)
                else:
                    builder.add(row.tokens, row.labels, row.weights)
                if row.kind == BAD and row.error is not None:
                    bad[1:] = [row.error]  # the first and the last
                    on_bad_row(row.error)
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


def token_rows(
    listing: Listing,
    source: DataSource,
    key: str,
    *,
    tokenizer: Callable[[], Tokenizer],
    vocab_size: int | None,
) -> Iterator[TokenRow]:
    """Read the rows of a listing and tokenize them, in order; one for each row, and one for each error of a file.

    `tokenizer` is called for every text.
    """
    of_files = list[DataError]()
    for row in read_rows(listing, vocab_size, of_files.append):
        yield token_row(row, source, key, tokenizer=tokenizer, vocab_size=vocab_size)
    for error in of_files:
        yield TokenRow(kind=REFUSED, error=error, is_row=False)


def token_row(
    row: Row | DataError,
    source: DataSource,
    key: str,
    *,
    tokenizer: Callable[[], Tokenizer],
    vocab_size: int | None,
) -> TokenRow:
    """Tokenize a row of a source, whose config path is `key`."""
    try:
        if isinstance(row, DataError):
            raise row
        has_ids = row.ids is not None or row.empty
        tokens, labels = (row.ids, row.labels) if has_ids else _encode(row, tokenizer, vocab_size)
    except DataError as error:
        return TokenRow(kind=BAD if source.bad_rows == "skip" else REFUSED, error=error)
    if tokens is None or not len(tokens):
        if source.empty == "skip":
            return TokenRow(kind=EMPTY)
        got = row.empty or "text without a single token"
        remedy = f"Take it out, or {{skip_empty|set {key}.empty: skip}} to leave such rows out."
        error = DataError(row.where, expected="a row with tokens", got=got, remedy=remedy)
        return TokenRow(kind=REFUSED, error=error)
    if source.max_tokens is not None and len(tokens) > source.max_tokens:
        error = too_long(row.where, len(tokens), source.max_tokens, key)
        return TokenRow(kind=TOO_LONG if source.too_long == "skip" else REFUSED, error=error)
    kind = "ids" if row.ids is not None else "chat" if row.chat is not None else "pair" if row.pair else "text"
    return TokenRow(kind=kind, tokens=tokens, labels=labels, weights=row.weights)


def _encode(
    row: Row, tokenizer: Callable[[], Tokenizer], vocab_size: int | None
) -> tuple[np.ndarray, np.ndarray | None]:
    loaded, labels = tokenizer(), None
    try:
        if row.python is not None:
            tokens = loaded.encode_python(row.python)
        elif row.chat is not None:
            tokens, labels = loaded.encode_chat(row.chat)
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


def join_datasets(parts: Sequence[Dataset]) -> Dataset:
    """Return one dataset of all rows of all parts, in order; one part is returned as it is."""
    return parts[0] if len(parts) == 1 else JoinedDataset(parts)


class JoinedDataset(NumberedRows):
    """A `Dataset` of several; 24 bytes a row, for lengths, tokens with a loss and ids."""

    def __init__(self, parts: Sequence[Dataset]) -> None:
        self._parts = tuple(parts)
        self._firsts = [0, *np.cumsum([len(each.lengths) for each in parts]).tolist()]
        self.lengths: np.ndarray = np.concatenate([each.lengths for each in parts])
        self.loss_tokens: np.ndarray = np.concatenate([each.loss_tokens for each in parts])
        weighed = any(each.loss_weights is not each.loss_tokens for each in parts)
        self._loss_weights = np.concatenate([each.loss_weights for each in parts]) if weighed else None
        self.ids: np.ndarray = np.concatenate(
            [each.ids + first for first, each in zip(self._firsts, parts, strict=False)]
        )
        self.weights = tuple(
            (first + row, weight)
            for first, each in zip(self._firsts, parts, strict=False)
            for row, weight in each.weights
        )
        self.skipped: Mapping[str, int] = sum((Counter(each.skipped) for each in parts), Counter())
        write_protect(self.lengths, self.loss_tokens, self._loss_weights, self.ids)

    @property
    def loss_weights(self) -> np.ndarray:
        """What the losses of each row's tokens weigh together."""
        return self.loss_tokens if self._loss_weights is None else self._loss_weights

    def read(self, row: int, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """Return views of ids and labels of tokens [start, stop) of a row, int32 [stop - start] each."""
        part, within = self._place(row)
        return part.read(within, start, stop)

    def read_weights(self, row: int, start: int, stop: int) -> np.ndarray | None:
        """Return the weights of tokens [start, stop) of a row, float32 [stop - start], where a part has any."""
        if self._loss_weights is None:
            return None
        part, within = self._place(row)
        found = part.read_weights(within, start, stop)
        return plain_weights(part.read(within, start, stop)[1]) if found is None else found

    def read_ahead(self, spans: Sequence[tuple[int, int, int]]) -> None:
        """Begin to read tokens [start, stop) of rows."""
        for row, start, stop in spans:
            part, within = self._place(row)
            part.read_ahead([(within, start, stop)])

    def row_digests(self, first: int, last: int) -> np.ndarray:
        """Return what tells rows [first, last) from others, uint8 [last - first, 16]."""
        found = [np.empty((0, 16), dtype=np.uint8)]
        for start, part in zip(self._firsts, self._parts, strict=False):
            begin, end = max(first - start, 0), min(last - start, len(part.lengths))
            if begin < end:
                found.append(part.row_digests(begin, end))
        return np.concatenate(found)

    def digest(self) -> bytes:
        """Return the digest of all rows, the same wherever they lie."""
        return digest_of_parts(self)

    def name(self, row: int) -> str:
        """Return where a row is."""
        part, within = self._place(row)
        return part.name(within)

    def source_key(self, row: int) -> str:
        """Return the config path of a row's source: `data.0`."""
        part, within = self._place(row)
        return part.source_key(within)

    def _place(self, row: int) -> tuple[Dataset, int]:
        self.check_row(row)
        number = bisect.bisect_right(self._firsts, row) - 1
        return self._parts[number], row - self._firsts[number]
