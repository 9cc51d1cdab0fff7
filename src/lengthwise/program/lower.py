"""Lower a plan: from pieces on ranks to rounds of transfers and block tasks.

All ranks lower the same record, so both sides of an empty transfer leave it out. Rounds are lowered for all ranks
(order checks, simulator) or for one, in O(degree). See `forwarding`, `blocks`, `heads`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from lengthwise.core.cut import position_chunks
from lengthwise.core.plan import Microbatch, Piece, Plan
from lengthwise.program.blocks import Queries, block_tasks, positions_ahead, positions_seeing
from lengthwise.program.branches import Prefix, branch_tasks, positions_continuing, prefixes_of
from lengthwise.program.forwarding import Forwarding, Move
from lengthwise.program.records import BlockTask, Content, HeadRange, MutualSpans, RankRound, Round, Segment, Transfer
from lengthwise.program.split_heads import exchange_transfers, heads_of, ring_bounds


@dataclass(frozen=True, kw_only=True)
class MicrobatchProgram:
    """One microbatch, lowered for all of its ranks and for layers with one sliding window, or none.

    parents, firsts: those of `Plan`, () if no sequence continues another. A position is a rank's place in a piece; its
    ring position is that of its group if the piece splits heads. mutual: spans of the plan's sequences.
    """

    index: int
    microbatch: Microbatch
    tokens: tuple[int, ...]
    parents: tuple[int | None, ...] = ()
    firsts: tuple[int, ...] = ()
    window: int | None = None
    mutual: MutualSpans | None = None

    def with_window(self, window: int | None) -> MicrobatchProgram:
        """Return the same microbatch for layers with another window."""
        firsts = self.firsts or (0,) * len(self.tokens)
        longest = max(firsts[i] + self.tokens[i] for piece in self.microbatch.pieces for i in piece.sequences)
        mutual = None if self.mutual is not None and self.mutual.in_windows and window is None else self.mutual
        return replace(self, window=None if window is None or window >= longest else window, mutual=mutual)

    def shard(self, piece: int, position: int) -> tuple[Segment, ...]:
        """List the segments of `position` of `piece`: for each sequence its low chunk, then its high chunk."""
        return self._shards[piece][position]

    def shard_tokens(self, piece: int, position: int) -> int:
        """Return the number of tokens that `position` of `piece` holds."""
        return self._shard_tokens[piece][position]

    def ring_tokens(self, piece: int, owner: int) -> int:
        """Return the number of tokens of ring position `owner`, over all ranks of its group."""
        return self._ring_tokens[piece][owner]

    def pieces_of(self, rank: int) -> tuple[tuple[int, Piece, int], ...]:
        """List (piece index, piece, position of `rank` in it) for the pieces of `rank`, in plan order."""
        return self._places.get(rank, ())

    def has_branches(self, piece: int) -> bool:
        """Return whether a sequence of a piece continues another one."""
        return bool(self._prefixes[piece])

    def shares(self, rank: int) -> bool:
        """Return whether `rank` shares a sequence with others, and so has transfers."""
        return any(piece.degree > 1 for _, piece, _ in self.pieces_of(rank))

    def segments(self, rank: int) -> tuple[Segment, ...]:
        """List the tokens that `rank` holds in this microbatch, in local order."""
        return tuple(segment for index, _, position in self.pieces_of(rank) for segment in self.shard(index, position))

    def shard_starts(self, rank: int) -> dict[int, int]:
        """Map each piece of `rank` to the local token at which its shard starts."""
        starts, start = {}, 0
        for index, _, position in self.pieces_of(rank):
            starts[index] = start
            start += self.shard_tokens(index, position)
        return starts

    def row_starts(self, rank: int) -> dict[HeadRange, dict[int, int]]:
        """Map each range of heads that `rank` attends to {piece: first row of its tokens}."""
        starts: dict[HeadRange, dict[int, int]] = {}
        stops: dict[HeadRange, int] = {}
        for index, piece, position in self.pieces_of(rank):
            heads = heads_of(piece, position)
            start = stops.get(heads, 0)
            starts.setdefault(heads, {})[index] = start
            stops[heads] = start + self.ring_tokens(index, position // piece.heads)
        return starts

    @cached_property
    def ring_steps(self) -> int:
        """The most ring steps with blocks to compute on any rank; 1 if nothing travels."""
        return max(forwarding.ring_steps for forwarding in self._forwardings)

    @cached_property
    def forward_rounds(self) -> tuple[Round, ...]:
        """Rounds of the ring in the forward pass, one for each ring step but the last."""
        return tuple(Round(transfers=tuple(self._key_transfers(ring_step))) for ring_step in range(self.ring_steps - 1))

    @cached_property
    def backward_rounds(self) -> tuple[Round, ...]:
        """Rounds of the ring in the backward pass: keys and values again, and their gradients."""
        return tuple(
            Round(transfers=(*self._key_transfers(ring_step), *self._gradient_transfers(ring_step)))
            for ring_step in range(self._backward_steps)
        )

    def exchange(self, content: Content) -> Round:
        """Return the round in which all groups that split heads exchange `content`."""
        pieces = enumerate(self.microbatch.pieces)
        return Round(
            transfers=tuple(
                transfer
                for index, piece in pieces
                for transfer in exchange_transfers(piece, index, self._shard_tokens[index], content)
            )
        )

    def forward_rounds_of(self, rank: int) -> tuple[RankRound, ...]:
        """Return one rank's part in `forward_rounds`, without lowering the others'."""
        return tuple(RankRound.of(rank, self._key_transfers(step, rank)) for step in range(self.ring_steps - 1))

    def backward_rounds_of(self, rank: int) -> tuple[RankRound, ...]:
        """Return one rank's part in `backward_rounds`, without lowering the others'."""
        return tuple(
            RankRound.of(rank, (*self._key_transfers(step, rank), *self._gradient_transfers(step, rank)))
            for step in range(self._backward_steps)
        )

    def exchange_of(self, rank: int, content: Content) -> RankRound:
        """Return one rank's part in `exchange`."""
        transfers = (
            transfer
            for index, piece, position in self.pieces_of(rank)
            for transfer in exchange_transfers(piece, index, self._shard_tokens[index], content, position)
        )
        return RankRound.of(rank, transfers)

    def tasks(self, rank: int, ring_step: int) -> tuple[BlockTask, ...]:
        """List the blocks that `rank` computes at `ring_step`; blocks without queries or keys are left out."""
        starts = self.row_starts(rank)
        found: list[BlockTask] = []
        for index, piece, position in self.pieces_of(rank):
            heads, group = heads_of(piece, position), position // piece.heads
            shard = self._ring_shard(index, group)
            queries = Queries(piece=index, position=group, shard=shard, row=starts[heads][index], heads=heads)
            for owner in self._forwardings[index].owners(group, ring_step):
                held = self._ring_shard(index, owner)
                found += block_tasks(queries, held, owner=owner, window=self.window, mutual=self.mutual)
                for prefix in self._prefixes[index]:
                    found += branch_tasks(queries, held, prefix, owner=owner, window=self.window)
        return tuple(found)

    @cached_property
    def _places(self) -> dict[int, tuple[tuple[int, Piece, int], ...]]:
        places: dict[int, list[tuple[int, Piece, int]]] = {}
        for index, piece in enumerate(self.microbatch.pieces):
            for position, rank in enumerate(piece.ranks):
                places.setdefault(rank, []).append((index, piece, position))
        return {rank: tuple(those) for rank, those in places.items()}

    @cached_property
    def _prefixes(self) -> tuple[tuple[Prefix, ...], ...]:
        if not self.parents:
            return ((),) * len(self.microbatch.pieces)
        return tuple(prefixes_of(piece, self.parents, self.firsts) for piece in self.microbatch.pieces)

    @cached_property
    def _shards(self) -> tuple[tuple[tuple[Segment, ...], ...], ...]:
        return tuple(
            tuple(
                tuple(
                    Segment(sequence=i, start=start, stop=stop)
                    for i in piece.sequences
                    for start, stop in position_chunks(self.tokens[i], piece.degree, position, piece.shares)
                )
                for position in range(piece.degree)
            )
            for piece in self.microbatch.pieces
        )

    @cached_property
    def _shard_tokens(self) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(sum(each.num_tokens for each in shard) for shard in shards) for shards in self._shards)

    @cached_property
    def _ring_tokens(self) -> tuple[tuple[int, ...], ...]:
        return tuple(
            tuple(sum(tokens[first : first + piece.heads]) for first in range(0, piece.degree, piece.heads))
            for piece, tokens in zip(self.microbatch.pieces, self._shard_tokens, strict=True)
        )

    def _ring_shard(self, index: int, group: int) -> tuple[Segment, ...]:
        piece = self.microbatch.pieces[index]
        if piece.heads == 1:
            return self._shards[index][group]
        first, last = (self._shards[index][each] for each in (group * piece.heads, (group + 1) * piece.heads - 1))
        return tuple(
            Segment(sequence=low.sequence, start=low.start, stop=high.stop)
            for place in range(len(piece.sequences))
            for low, high in ((first[2 * place], last[2 * place]), (last[2 * place + 1], first[2 * place + 1]))
        )

    @cached_property
    def _forwardings(self) -> tuple[Forwarding, ...]:
        return tuple(
            Forwarding(degree=piece.degree // piece.heads, goes_round=self.window is None, needed=self._needed(index))
            for index, piece in enumerate(self.microbatch.pieces)
        )

    def _needed(self, index: int) -> tuple[frozenset[int], ...]:
        """Return for each ring position the offsets of the positions with a block of its keys."""
        piece = self.microbatch.pieces[index]
        degree = piece.degree // piece.heads
        if self.window is None:
            every, none = frozenset(range(1, degree)), frozenset[int]()
            return tuple(every if self.ring_tokens(index, owner) else none for owner in range(degree))
        bounds, window = [ring_bounds(self.tokens[i], piece) for i in piece.sequences], self.window

        def seeing(owner: int) -> Iterator[int]:
            for sequence, bound in zip(piece.sequences, bounds, strict=True):
                yield from positions_seeing(bound, owner, window)
                if self.mutual is not None:
                    yield from positions_ahead(bound, owner, self.mutual.spans[sequence])
            for prefix in self._prefixes[index]:
                yield from positions_continuing(bounds, prefix, owner, window)

        return tuple(
            frozenset((position - owner) % degree for position in seeing(owner) if position != owner)
            for owner in range(degree)
        )

    @cached_property
    def _backward_steps(self) -> int:
        return max(forwarding.gradient_steps.stop for forwarding in self._forwardings)

    def _key_transfers(self, ring_step: int, rank: int | None = None) -> Iterator[Transfer]:
        for index, forwarding, group, places in self._rings(rank):
            yield from self._transfers(index, forwarding.key_moves(ring_step, group), places)

    def _gradient_transfers(self, ring_step: int, rank: int | None = None) -> Iterator[Transfer]:
        for index, forwarding, group, places in self._rings(rank):
            yield from self._transfers(index, forwarding.gradient_moves(ring_step, group), places)

    def _rings(self, rank: int | None) -> Iterator[tuple[int, Forwarding, int | None, range]]:
        """Yield (piece index, forwarding, ring position, places in a group) of a rank, or of all ranks."""
        if rank is None:
            for index, piece in enumerate(self.microbatch.pieces):
                yield index, self._forwardings[index], None, range(piece.heads)
            return
        for index, piece, position in self.pieces_of(rank):
            place = position % piece.heads
            yield index, self._forwardings[index], position // piece.heads, range(place, place + 1)

    def _transfers(self, index: int, moves: Iterator[Move], places: range) -> Iterator[Transfer]:
        piece, tokens = self.microbatch.pieces[index], self._ring_tokens[index]
        ranks, heads = piece.ranks, piece.heads
        for source, target, content, owner in moves:
            for place in places:
                yield Transfer(
                    source=ranks[source * heads + place],
                    target=ranks[target * heads + place],
                    piece=index,
                    content=content,
                    owner=owner,
                    tokens=tokens[owner],
                    heads=heads_of(piece, place),
                )


def lower_microbatch(plan: Plan, index: int, mutual: MutualSpans | None = None) -> MicrobatchProgram:
    """Lower microbatch `index` of `plan` for all of its ranks. mutual: spans of the plan's sequences."""
    how = {"parents": plan.parents, "firsts": plan.firsts} if plan.parents else {}
    microbatch = plan.microbatches[index]
    return MicrobatchProgram(index=index, microbatch=microbatch, tokens=plan.tokens, mutual=mutual, **how)


def lower_plan(
    plan: Plan, rank: int, *, ranks_in_step: int = 1, mutual: MutualSpans | None = None
) -> tuple[MicrobatchProgram, ...]:
    """Lower the microbatches of `rank`, in its order; ranks in one group of `ranks_in_step` run all of the group's.

    mutual: spans of the plan's sequences, the same on all ranks.
    """
    assert ranks_in_step == 1 or plan.schedule["kind"] == "waves", f"a plan in lock-step, got kind {plan.schedule}"
    node = rank // ranks_in_step
    return tuple(
        lower_microbatch(plan, index, mutual)
        for index, microbatch in enumerate(plan.microbatches)
        if node in _nodes(microbatch, ranks_in_step)
    )


def last_on_all_ranks(plan: Plan, *, ranks_in_step: int = 1) -> frozenset[int]:
    """List the microbatches that are the last of all their ranks. ranks_in_step: that of `lower_plan`."""
    nodes = [_nodes(microbatch, ranks_in_step) for microbatch in plan.microbatches]
    last = {node: index for index, those in enumerate(nodes) for node in those}
    return frozenset(index for index, those in enumerate(nodes) if all(last[node] == index for node in those))


def _nodes(microbatch: Microbatch, ranks: int) -> set[int]:
    return {rank // ranks for piece in microbatch.pieces for rank in piece.ranks}


def all_end_alone(plan: Plan, *, first: Collection[int] = (), ranks_in_step: int = 1) -> bool:
    """Return whether no node's last microbatch has transfers.

    first: microbatches that run before all others. ranks_in_step: ranks of a node, see `lower_plan`.
    """
    alone: dict[int, bool] = {}
    for index in sorted(range(len(plan.microbatches)), key=lambda index: index not in first):
        pieces = plan.microbatches[index].pieces
        alone |= {rank // ranks_in_step: True for piece in pieces for rank in piece.ranks}
        alone |= {rank // ranks_in_step: False for piece in pieces if piece.degree > 1 for rank in piece.ranks}
    return all(alone.values())
