"""Rows to rows of tokens: tokenized, cut off from what their source leaves out, and counted.

Everything that reads data makes its rows here, whether they stay in memory, are written to a folder, or are sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from lengthwise.core.errors import DataError
from lengthwise.data.dataset import NO_LOSS, TOO_LONG, Held, sum_of_weights, too_long
from lengthwise.data.rows import RawRow
from lengthwise.data.sources import Listing, read_rows
from lengthwise.data.tokenizer import Tokenizer

if TYPE_CHECKING:
    from lengthwise.config import DataSource

BAD, EMPTY, REFUSED = "bad", "empty", "refused"


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRow:
    """A row as it is trained on, or why it is not.

    `kind`: ids, text, pair or chat; of a row without tokens `empty`, `bad` or TOO_LONG where its source leaves such
    rows out, REFUSED where the row stops the run. `error`: what is wrong with it. `labels` None: they are the tokens,
    `weights` None: 1 where there is a loss. `is_row` False: the error is of the file.
    """

    kind: str
    tokens: np.ndarray | None = None
    labels: np.ndarray | None = None
    weights: np.ndarray | None = None
    error: DataError | None = None
    is_row: bool = True

    @property
    def held(self) -> Held:
        """What is kept of a row with tokens."""
        assert self.tokens is not None, self
        return self.tokens, self.labels, self.weights

    @property
    def losses(self) -> tuple[int, float]:
        """How many tokens of a row with tokens have a loss, and what these weigh together."""
        ids, labels, weights = self.held
        losses = len(ids) - 1 if labels is None else int(np.count_nonzero(labels[1:] != NO_LOSS))
        return losses, float(losses) if weights is None else sum_of_weights(weights)


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
    row: RawRow | DataError,
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
    labels = None if labels is None or np.array_equal(labels, tokens) else labels
    return TokenRow(kind=kind, tokens=tokens, labels=labels, weights=row.weights)


def _encode(
    row: RawRow, tokenizer: Callable[[], Tokenizer], vocab_size: int | None
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
