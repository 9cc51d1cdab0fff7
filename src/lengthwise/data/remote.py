"""A `Dataset` of raw rows that others tokenize while it is trained on: its lengths become known as batches need them.

Rows, their numbers and an epoch's order are those of the same sources read at the start; rows that are left out are
dropped in passing, so the batches are the same. What is not known before is the longest row, so sources say it:
`max_tokens`. A rank asks shards (`shard`) for the lengths of the next rows, and for the slices that it computes.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from lengthwise.core.errors import DataError, LengthwiseError, Problems
from lengthwise.data.dataset import DatasetBuilder, StoredDataset
from lengthwise.data.numbered import Counted
from lengthwise.data.refusals import Refusals, at_line
from lengthwise.data.sampler import epoch_order
from lengthwise.data.served import Fetched, ServedDataset, ShardClient, settings_digest
from lengthwise.data.shard import ShardSpec, Span
from lengthwise.data.sources import PART_BYTES, Listing, parts_of, raw_listings

if TYPE_CHECKING:
    from lengthwise.config import DataSource


def shard_specs(
    sources: Sequence[DataSource],
    *,
    tokenizer_name: str,
    vocab_size: int | None,
    seed: int,
    part_bytes: int = PART_BYTES,
) -> list[ShardSpec]:
    """Divide sources into shards, as many each as its `remote` says and its files allow.

    Raises:
        DataError: what cannot be found or is tokens already; Problems for more.
    """
    refusals, specs = Refusals(), list[ShardSpec]()
    for index, source in enumerate(sources):
        key, parts = f"data.{index}", list[Listing]()
        for listing in raw_listings(source, key, "remote", refusals.add):
            try:
                parts += parts_of(listing, part_bytes)
            except DataError as error:
                refusals.add(error)
        wanted = max(1, min(int(source.remote), len(parts)))
        of_all = {"key": key, "source": source, "tokenizer_name": tokenizer_name, "vocab_size": vocab_size}
        cuts = [len(parts) * number // wanted for number in range(wanted + 1)]
        specs += [
            ShardSpec(
                name=f"{key}, actor {number + 1} of {wanted}", parts=tuple(parts[first:last]), seed=seed, **of_all
            )
            for number, (first, last) in enumerate(pairwise(cuts))
        ]
    refusals.raise_all("data")
    return specs


def longest_rows(sources: Sequence[DataSource]) -> StoredDataset:
    """Return a dataset of one row a source, of its `max_tokens`: what forecasts and limits know of rows that come."""
    builder = DatasetBuilder()
    for index, source in enumerate(sources):
        assert source.max_tokens is not None, "the run file's rules ask for it"
        builder.start_source(f"data.{index}", "", ("any row, as long as max_tokens allows",))
        builder.add(np.zeros(source.max_tokens, dtype=np.int32), None)
    return builder.finish()


class RemoteDataset(ServedDataset):
    """Rows of shards. It has none before `attach`; then lengths, at first 0, become known in the order of `batches`.

    tokenizer_digest: of what makes tokens of texts; "" where none loads. on_restart: gets a line where a shard was
    started again.
    """

    def __init__(self, specs: Sequence[ShardSpec], *, tokenizer_digest: str, seed: int) -> None:
        super().__init__()
        self.specs, self._seed, self._tokenizer_digest = tuple(specs), seed, tokenizer_digest
        self._parts = [(spec.key, part) for spec in specs for part in spec.parts]
        self._clients: Sequence[ShardClient] = ()
        self._starts, self._counted = list[set[str]](), list[list[Counted]]()
        self._left_out = set[int]()
        self.on_restart: Callable[[str], None] = lambda _line: None
        self._set_rows([])

    def attach(self, clients: Sequence[ShardClient]) -> None:
        """Count the rows of all shards, one client each. DataError, or Problems, for files that cannot be read."""
        self._clients, refusals = clients, Refusals()
        for waiting in [client.ask("describe") for client in clients]:
            born, counted = waiting()
            self._starts.append({born})
            self._counted.append([] if isinstance(counted, LengthwiseError) else counted)
            for error in _problems(counted):
                refusals.add(error)
        refusals.raise_all("data")
        self._set_rows([each for counted in self._counted for each in counted])
        if not self.num_rows:
            raise DataError("data", expected="at least one row", got="none", remedy="Add rows.")

    def _set_rows(self, counted: Sequence[Counted]) -> None:
        self._firsts = [0, *np.cumsum([each.rows for each in counted], dtype=np.int64).tolist()]
        places = np.cumsum([0, *(len(spec.parts) for spec in self.specs)]).tolist()
        self._shard_firsts = [self._firsts[place] for place in places] if counted else [0]
        rows = self._firsts[-1]
        self.ids, self.lengths, self.loss_tokens = np.arange(rows), np.zeros(rows, np.int64), np.zeros(rows, np.int64)
        self._weighed = any(each.weighed for each in counted)
        self.loss_weights: np.ndarray = np.zeros(rows) if self._weighed else self.loss_tokens

    def _is_weighed(self, row: int) -> bool:
        del row
        return self._weighed

    def _known(self, epoch: int, place: int, most: int) -> Iterator[tuple[int, int]]:
        order = epoch_order(self.ids, seed=self._seed, epoch=epoch)
        while place < len(order):
            rows = order[place : place + most]
            self._ask_lengths(epoch, rows)
            for row in rows.tolist():
                if self.lengths[row] or row in self._errors:
                    yield place, row
                place += 1

    def _ask_lengths(self, epoch: int, rows: np.ndarray) -> None:
        shards = np.searchsorted(self._shard_firsts, rows, side="right") - 1
        asked = [(shard, rows[shards == shard]) for shard in np.unique(shards).tolist()]
        waiting = [self._clients[shard].ask("lengths", self._shard_firsts[shard], epoch, own) for shard, own in asked]
        for (shard, own), answer in zip(asked, waiting, strict=True):
            found = self._checked(shard, answer())
            for row, (kind, error) in found.left_out.items():
                if error is not None:
                    part, place = self._place(row)
                    self._errors[row] = error if self._parts[part][1].names is not None else at_line(error, place + 1)
                elif row not in self._left_out:
                    self._left_out.add(row)
                    self.skipped[kind] += 1
            self.lengths[own], self.loss_tokens[own] = found.tokens, found.loss_tokens
            if self._weighed:
                self.loss_weights[own] = found.loss_weights

    def _checked(self, shard: int, answer: tuple[str, Any]) -> Any:
        """Return what a shard answers; say when it was started anew, and refuse one whose files changed meanwhile.

        Answers from before its end may be read after those of its new start.
        """
        born, found = answer
        if born not in self._starts[shard]:
            name = self._clients[shard].spec.name
            self.on_restart(f"{name} ended and was started again; it reads on from where it was")
            now = self._clients[shard].ask("describe")()[1]
            for error in _problems(now):
                raise error
            if now != self._counted[shard]:
                remedy = "Let whatever writes it finish, then start again."
                raise DataError(name, expected="files that stay as they are", got="a change", remedy=remedy)
            self._starts[shard].add(born)
        return found

    def _fetched(self, spans: Sequence[Span]) -> Fetched:
        by_shard: dict[int, list[Span]] = {}
        for span in spans:
            by_shard.setdefault(bisect.bisect_right(self._shard_firsts, span[0]) - 1, []).append(span)
        found = Fetched()
        for shard, own in by_shard.items():
            answer = self._clients[shard].ask("slices", self._shard_firsts[shard], own)
            found.add(own, lambda shard=shard, answer=answer: self._checked(shard, answer()))
        return found

    def digest(self) -> bytes:
        """Return 32 bytes that differ where files, settings or tokenizer do; before `attach`, by the files' sizes."""
        sources = {spec.key: spec.source for spec in self.specs}
        found = [each.digest for counted in self._counted for each in counted]
        sizes = [] if found else [path.stat().st_size for _, part in self._parts for path in part.paths]
        return settings_digest(self._tokenizer_digest, sources, self.specs[0].vocab_size, found, sizes)

    def name(self, row: int) -> str:
        """Return where a row is: `train.jsonl:3`, or the file's path inside its folder."""
        part, place = self._place(row)
        listing = self._parts[part][1]
        return listing.names[place] if listing.names is not None else f"{listing.label}:{place + 1}"

    def source_key(self, row: int) -> str:
        """Return the config path of a row's source: `data.0`."""
        return self._parts[self._place(row)[0]][0]

    def _place(self, row: int) -> tuple[int, int]:
        """Return the part that has a row, and the row's place in the part, of lines in the file."""
        self.check_row(row)
        part = first = bisect.bisect_right(self._firsts, row) - 1
        while (self._parts[first][1].part or (0,))[0]:
            first -= 1
        return part, row - self._firsts[first]


def _problems(found: object) -> Sequence[Any]:
    if isinstance(found, Problems):
        return found.problems
    return [found] if isinstance(found, LengthwiseError) else []
