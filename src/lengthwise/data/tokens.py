"""Rows to rows of tokens: tokenized, checked against the settings of their source, and counted.

All readers of data make their rows here: to keep them in memory, to write them to a folder, or to feed them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lengthwise.core.errors import DataError
from lengthwise.data.blocks import RowBlock
from lengthwise.data.dataset import NO_LOSS, TOO_LONG, RowArrays, sum_of_weights
from lengthwise.data.digests import ROW_DIGEST_BYTES, row_digest
from lengthwise.data.image_files import ImageFile
from lengthwise.data.image_store import is_kept
from lengthwise.data.refusals import too_long
from lengthwise.data.rows import RawRow, RowParser
from lengthwise.data.tokenizer import Tokenizer

if TYPE_CHECKING:
    from lengthwise.config import DataSource

FIRST_ROWS = 64  # of a stream: they say whether its rows have images
BAD, EMPTY, REFUSED, END = "bad", "empty", "refused", "end"

Runner = Callable[[Callable[[Any], Any], Iterable[Any]], Iterator[Any]]
"""Function like `map`, perhaps in other processes: calls a function with every task, and yields results in order."""


@dataclass(slots=True, kw_only=True)
class TokenRow:
    """A row of tokens, or the reason for its absence.

    kind: ids, text, pair or chat; EMPTY, BAD or TOO_LONG if its source leaves it out; REFUSED if it stops the run.
    labels: None if they are the tokens. weights: None if all are 0 or 1. error: error of a bad row. is_row: False for
    an error of a file, and for the END of an epoch. name: place of the row. digest: digest of ids, labels, weights and
    images. mark: mark of its block, on the block's last row.
    """

    kind: str
    tokens: np.ndarray | None = None
    labels: np.ndarray | None = None
    weights: np.ndarray | None = None
    images: Sequence[ImageFile] = ()
    error: DataError | None = None
    is_row: bool = True
    is_document: bool = False
    name: str = ""
    digest: bytes = bytes(ROW_DIGEST_BYTES)
    source: int = 0
    mark: Any = None

    @property
    def arrays(self) -> RowArrays:
        """Ids, labels and weights of a row with tokens."""
        assert self.tokens is not None, self
        return self.tokens, self.labels, self.weights

    @property
    def losses(self) -> tuple[int, float]:
        """(number of loss tokens, sum of their weights) of a row with tokens."""
        ids, labels, weights = self.arrays
        losses = len(ids) - 1 if labels is None else int(np.count_nonzero(labels[1:] != NO_LOSS))
        return losses, float(losses) if weights is None else sum_of_weights(weights)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokenizing:
    """The way from rows to tokens.

    keys: config paths of the sources. tokenizer: function that is called for every text. vocab_size: vocabulary of the
    model; None skips the check of ids. sees: False refuses rows with images.
    """

    sources: Sequence[DataSource]
    keys: Sequence[str]
    tokenizer: Callable[[], Tokenizer]
    vocab_size: int | None
    sees: bool = True

    def run(self, run: Runner, blocks: Iterator[RowBlock]) -> Generator[list[TokenRow]]:
        """Tokenize blocks in order by a runner, a block per task; yield the rows of every block, with digests."""
        yield from run(self.digested, blocks)

    def digested(self, block: RowBlock) -> list[TokenRow]:
        """Return the rows of a block in order, with digests."""
        rows = [*self.rows(block)]
        for row in rows:
            if row.tokens is not None:
                row.digest = row_digest(*row.arrays, (each.identity for each in row.images))
        return rows

    def rows(self, block: RowBlock) -> Iterator[TokenRow]:
        """Yield the rows of a block in order, without digests; an error of a file, or an end, is no row."""
        if block.form in ("error", "end"):
            kind = END if block.error is None else REFUSED
            yield TokenRow(kind=kind, error=block.error, is_row=False, name=block.shown, source=block.source)
            return
        source, key = self.sources[block.source], self.keys[block.source]
        last = len(block.rows) - 1
        for number, (name, row) in enumerate(block.parsed(RowParser(self.vocab_size))):
            found = self._row(row, source, key, block.folder)
            found.source, found.name, found.is_document = block.source, name, block.has_documents
            found.mark = block.mark if number == last else None
            yield found

    def _row(self, row: RawRow | DataError, source: DataSource, key: str, folder: Path | None) -> TokenRow:
        images: Sequence[ImageFile] = ()
        try:
            if isinstance(row, DataError):
                raise row
            has_ids = row.ids is not None or row.empty
            images = self._images(row, folder)
            tokens, labels = (row.ids, row.labels) if has_ids else self._encode(row, images)
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
        return TokenRow(kind=kind, tokens=tokens, labels=labels, weights=row.weights, images=images)

    def _images(self, row: RawRow, folder: Path | None) -> Sequence[ImageFile]:
        """Return the images of a row, whose paths begin at `folder`, which is None for rows of a hub or a URL."""
        if row.chat is None or not row.chat.images or row.empty:
            return ()
        is_beside = folder is not None or all(map(is_kept, row.chat.images))
        if not self.sees:
            expected = f"rows of text, as with `remote`, or in a stream without an image in its first {FIRST_ROWS} rows"
            got, remedy = "an image", "Take `remote` out, or begin the stream of a model for images with such a row."
            raise DataError(row.where, expected=expected, got=got, remedy=remedy)
        if not is_beside:
            got, remedy = "a path in other rows", "Give a dataset with images in itself."
            raise DataError(row.where, expected="images in rows, or in files beside them", got=got, remedy=remedy)
        try:
            reader = self.tokenizer().images
        except ValueError as error:
            expected, got = "a row of text, for this tokenizer", f"an image, and {error}"
            remedy = "Train a model that reads images, with its own tokenizer, or take such rows out."
            raise DataError(row.where, expected=expected, got=got, remedy=remedy) from None
        return [reader.find(os.path.join(folder or "", each), row.where) for each in row.chat.images]

    def _encode(self, row: RawRow, images: Sequence[ImageFile]) -> tuple[np.ndarray, np.ndarray | None]:
        loaded, labels = self.tokenizer(), None
        try:
            if row.python is not None:
                tokens = loaded.encode_python(row.python)
            elif row.chat is not None:
                tokens, labels = loaded.encode_chat(row.chat, images)
            elif row.pair is not None:
                tokens, labels = loaded.encode_pair(*row.pair)
            else:
                assert row.text is not None, row
                tokens = loaded.encode(row.text)
        except ValueError as error:  # a lone surrogate, which JSON can spell, or a Python file of another encoding
            remedy = "Correct the text."
            if row.chat is not None:
                remedy = "Set {tokenizer|`tokenizer`} to one with a chat template for such chats, or correct the row."
            got = f"{error}"
            raise DataError(row.where, expected="text that can be encoded", got=got, remedy=remedy) from None
        if self.vocab_size is not None and len(tokens) and int(tokens.max()) >= self.vocab_size:
            got = f"id {int(tokens.max())} from tokenizer {loaded.name}"
            remedy = "Set {tokenizer|`tokenizer`} to the one this model was made with."
            raise DataError(row.where, expected=f"ids below the model's {self.vocab_size}", got=got, remedy=remedy)
        return tokens, labels
