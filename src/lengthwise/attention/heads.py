"""Heads split inside groups of ranks: the all-to-all before and after attention, on one rank of one microbatch.

Messages arrive in one buffer, member by member; a gather of rows puts them in the order of the group's tokens. If a
group has more ranks than KV heads, several ranks take the same KV head, whose gradients its owner sums
(`program.split_heads`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, reduce
from math import gcd

import torch
from torch import Tensor

from lengthwise.attention.packs import to_device
from lengthwise.comm import Done, Pending, Transport
from lengthwise.core.errors import PlanError
from lengthwise.program import ALL_HEADS, Content, HeadRange, MicrobatchProgram, RankRound, Transfer
from lengthwise.program.split_heads import group_of, group_runs, heads_of

Rows = Mapping[HeadRange, Sequence[Tensor]]
"""Tensors (rows, heads of the range, head_dim) by the range of heads that a rank attends."""


@lru_cache(maxsize=256)
def heads_taken(heads: HeadRange, num_heads: int, num_kv_heads: int) -> tuple[int, ...]:
    """Return the KV heads, of `num_kv_heads`, that the query heads of a range use; parts must divide the heads."""
    if num_heads % heads.parts:
        expected = f"a divisor of the model's {num_heads} attention heads"
        raise PlanError("plan: heads", expected=expected, got=str(heads.parts), remedy="Plan with heads off.")
    size, ratio = num_heads // heads.parts, num_heads // num_kv_heads
    first = heads.part * size
    return tuple((first + query) // ratio for query in range(0, size, gcd(size, ratio)))


def query_heads(heads: HeadRange, num_heads: int) -> slice:
    """Return the query heads of a range."""
    size = num_heads // heads.parts
    return slice(heads.part * size, (heads.part + 1) * size)


def shares_keys(heads: HeadRange, num_heads: int, num_kv_heads: int) -> bool:
    """Return whether several ranks use the same KV head, so that its gradients must be summed."""
    return heads.parts * len(heads_taken(heads, num_heads, num_kv_heads)) > num_kv_heads


@dataclass(frozen=True, slots=True, kw_only=True)
class _SplitPiece:
    """A piece that splits heads, on one rank: its own tokens, and the exchanged rows by member."""

    own: slice
    position: int
    heads: HeadRange
    members: Mapping[int, slice]


class HeadExchange:
    """One rank's exchange for the pieces of a microbatch that split heads; other pieces pass through."""

    def __init__(self, program: MicrobatchProgram, transport: Transport) -> None:
        self._program, self._transport = program, transport
        starts = program.row_starts(transport.rank)
        self.ranges = tuple(starts) or (ALL_HEADS,)  # a rank without a piece has padding only
        """Ranges of heads that this rank attends, in plan order."""
        self._splits = self.ranges != (ALL_HEADS,)
        self._pieces: dict[int, _SplitPiece] = {}
        self._whole: list[slice] = []  # own tokens of pieces that split nothing, in order
        self._runs: dict[HeadRange, list[range]] = {heads: [] for heads in self.ranges if heads != ALL_HEADS}
        own = program.shard_starts(transport.rank)
        for index, piece, position in program.pieces_of(transport.rank) if self._splits else ():
            tokens = slice(own[index], own[index] + program.shard_tokens(index, position))
            heads = heads_of(piece, position)
            if piece.heads == 1:
                self._whole.append(tokens)
                continue
            members, start = {}, starts[heads][index]
            for member in group_of(piece, position):
                members[member] = slice(start, start + program.shard_tokens(index, member))
                start = members[member].stop
            self._pieces[index] = _SplitPiece(own=tokens, position=position, heads=heads, members=members)
            lengths = [program.tokens[i] for i in piece.sequences]
            for run in group_runs(piece, lengths, position):
                first = members[run.position].start
                self._runs[heads].append(range(first + run.start, first + run.stop))
        self._orders: dict[HeadRange, Tensor] = {}
        self._rounds: dict[Content, RankRound] = {}

    def split(self, content: Content, own: Sequence[Tensor]) -> Rows:
        """Return the rows by range of heads. own: tensors (tokens, heads or kv_heads, head_dim), queries first."""
        if not self._splits:
            return {ALL_HEADS: own}
        num_heads = [x.shape[1] for x in own]
        widths = {heads: [len(heads_taken(heads, num_heads[0], head)) for head in num_heads] for heads in self._runs}
        buffers = {
            heads: own[0].new_empty(sum(map(len, self._runs[heads])), sum(width), own[0].shape[2])
            for heads, width in widths.items()
        }
        mine = self._round(content)
        pending = self._post(
            [(_part(own, self._pieces[send.piece].own, send.heads), send.target) for send in mine.sends],
            [(self._rows_of(buffers, receive), receive.source) for receive in mine.receives],
        )
        for piece in self._pieces.values():
            buffers[piece.heads][piece.members[piece.position]] = _part(own, piece.own, piece.heads)
        pending.wait()
        return {
            heads: [torch.cat([x[tokens] for tokens in self._whole]) for x in own]
            if heads == ALL_HEADS
            else [
                part.index_select(0, self._order(heads, part.device))
                for part in buffers[heads].split(widths[heads], dim=1)
            ]
            for heads in self.ranges
        }

    def join(self, content: Content, rows: Rows, num_heads: Sequence[int], *, rows_of_all: int) -> Sequence[Tensor]:
        """Return this rank's own tokens, the first of `rows_of_all` rows, with all heads; sum shared heads."""
        if not self._splits:
            return rows[ALL_HEADS]
        kinds = {heads: each[0].dtype for heads, each in rows.items()}
        like = next(iter(rows.values()))[0]
        dtype = reduce(torch.promote_types, kinds.values())
        own = [like.new_zeros(rows_of_all, each, like.shape[2], dtype=dtype) for each in num_heads]
        buffers = {heads: self._by_member(heads, rows[heads]) for heads in self._runs}
        mine = self._round(content)
        arriving = [
            like.new_empty(
                each.tokens, _width(each.heads, num_heads), like.shape[2], dtype=kinds[self._pieces[each.piece].heads]
            )
            for each in mine.receives
        ]
        pending = self._post(
            [(self._rows_of(buffers, each), each.target) for each in mine.sends],
            [(message, each.source) for message, each in zip(arriving, mine.receives, strict=True)],
        )
        for piece in self._pieces.values():
            _add(own, piece.own, piece.heads, buffers[piece.heads][piece.members[piece.position]])
        for into, x in zip(own, rows.get(ALL_HEADS, ()), strict=False):
            parts = x.split([each.stop - each.start for each in self._whole])
            for tokens, part in zip(self._whole, parts, strict=True):
                into[tokens] = part
        pending.wait()
        for message, each in zip(arriving, mine.receives, strict=True):
            _add(own, self._pieces[each.piece].own, each.heads, message)
        return own

    def _round(self, content: Content) -> RankRound:
        if content not in self._rounds:
            self._rounds[content] = self._program.exchange_of(self._transport.rank, content)
        return self._rounds[content]

    def _post(self, sends: list[tuple[Tensor, int]], receives: list[tuple[Tensor, int]]) -> Pending:
        return self._transport.exchange(sends, receives) if sends or receives else Done()

    def _rows_of(self, buffers: Mapping[HeadRange, Tensor], transfer: Transfer) -> Tensor:
        piece = self._pieces[transfer.piece]
        return buffers[piece.heads][piece.members[transfer.owner]]

    def _order(self, heads: HeadRange, device: torch.device) -> Tensor:
        if heads not in self._orders:
            rows = [torch.arange(run.start, run.stop) for run in self._runs[heads]]
            self._orders[heads] = to_device(torch.cat(rows), device)
        return self._orders[heads]

    def _by_member(self, heads: HeadRange, rows: Sequence[Tensor]) -> Tensor:
        """Concatenate the tensors of a range, with rows in the order of the exchange."""
        together = torch.cat(tuple(rows), dim=1)
        return torch.empty_like(together).index_copy_(0, self._order(heads, together.device), together)


def _part(own: Sequence[Tensor], tokens: slice, heads: HeadRange) -> Tensor:
    num_heads = own[0].shape[1]
    taken = [_columns(heads_taken(heads, num_heads, x.shape[1]), x.device) for x in own]
    return torch.cat([x[tokens, columns] for x, columns in zip(own, taken, strict=True)], dim=1)


def _add(own: Sequence[Tensor], tokens: slice, heads: HeadRange, message: Tensor) -> None:
    taken = [heads_taken(heads, own[0].shape[1], x.shape[1]) for x in own]
    for into, columns, part in zip(own, taken, message.split([len(each) for each in taken], dim=1), strict=True):
        where = _columns(columns, part.device)
        if isinstance(where, slice):
            into[tokens, where] += part
        else:
            into[tokens].index_add_(1, where, part.to(into.dtype))


@lru_cache(maxsize=256)
def _columns(taken: tuple[int, ...], device: torch.device) -> slice | Tensor:
    first, last = taken[0], taken[-1]
    return slice(first, last + 1) if len(taken) == last - first + 1 else to_device(torch.tensor(taken), device)


def _width(heads: HeadRange, num_heads: Sequence[int]) -> int:
    return sum(len(heads_taken(heads, num_heads[0], head)) for head in num_heads)
