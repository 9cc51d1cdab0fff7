"""Lower a plan: from pieces on ranks to rounds of transfers and block tasks.

Everything follows from one record that is the same on all ranks, so that an empty transfer is left out for both sides
at once, never by a rank on its own. Layers with the same sliding window (or none) repeat the same rounds, which are
lowered once for all of them. How shards travel is said in `forwarding`, which blocks there are in `blocks`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from lengthwise.core.cut import position_chunks
from lengthwise.core.plan import Microbatch, Piece, Plan
from lengthwise.program.blocks import block_tasks
from lengthwise.program.forwarding import Forwarding, Move
from lengthwise.program.records import BlockTask, Round, Segment, Transfer


@dataclass(frozen=True, kw_only=True)
class MicrobatchProgram:
    """One microbatch, lowered for all of its ranks and for layers with one sliding window (None: no window)."""

    index: int
    microbatch: Microbatch
    tokens: tuple[int, ...]
    window: int | None = None

    def with_window(self, window: int | None) -> MicrobatchProgram:
        """Return the same microbatch for layers with another window."""
        longest = max(self.tokens[i] for piece in self.microbatch.pieces for i in piece.sequences)
        return replace(self, window=None if window is None or window >= longest else window)

    def shard(self, piece: int, position: int) -> tuple[Segment, ...]:
        """List what `position` of `piece` holds: for each sequence its low chunk, then its high chunk."""
        return self._shards[piece][position]

    def shard_tokens(self, piece: int, position: int) -> int:
        """Count the tokens that `position` of `piece` holds."""
        return sum(segment.num_tokens for segment in self._shards[piece][position])

    def pieces_of(self, rank: int) -> Iterator[tuple[int, Piece, int]]:
        """Yield (piece index, piece, position of `rank` in it) for the pieces that name `rank`, in plan order."""
        for index, piece in enumerate(self.microbatch.pieces):
            if rank in piece.ranks:
                yield index, piece, piece.ranks.index(rank)

    def segments(self, rank: int) -> tuple[Segment, ...]:
        """List the tokens that `rank` holds in this microbatch, in local order."""
        return tuple(segment for index, _, position in self.pieces_of(rank) for segment in self.shard(index, position))

    def shard_starts(self, rank: int) -> dict[int, int]:
        """Map each piece that names `rank` to the local token at which its shard starts."""
        starts, start = {}, 0
        for index, _, position in self.pieces_of(rank):
            starts[index] = start
            start += self.shard_tokens(index, position)
        return starts

    @cached_property
    def ring_steps(self) -> int:
        """Ring steps at which any rank has blocks to compute: 1 where nothing has to travel."""
        return max(forwarding.ring_steps for forwarding in self._forwardings)

    @cached_property
    def forward_rounds(self) -> tuple[Round, ...]:
        """Rounds of the forward pass, one for each ring step but the last."""
        return tuple(Round(transfers=tuple(self._key_transfers(ring_step))) for ring_step in range(self.ring_steps - 1))

    @cached_property
    def backward_rounds(self) -> tuple[Round, ...]:
        """Rounds of the backward pass: keys and values again, and their gradients on the way to their owners."""
        stops = [forwarding.gradient_steps.stop for forwarding in self._forwardings]
        return tuple(
            Round(transfers=(*self._key_transfers(ring_step), *self._gradient_transfers(ring_step)))
            for ring_step in range(max(stops))
        )

    def tasks(self, rank: int, ring_step: int) -> tuple[BlockTask, ...]:
        """List the blocks that `rank` computes at `ring_step`; blocks without queries or keys are left out."""
        starts = self.shard_starts(rank)
        return tuple(
            replace(task, q_start=task.q_start + starts[index], q_stop=task.q_stop + starts[index])
            for index, _, position in self.pieces_of(rank)
            for owner in self._forwardings[index].owners(position, ring_step)
            for task in self._blocks(index, position, owner)
        )

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
    def _forwardings(self) -> tuple[Forwarding, ...]:
        return tuple(
            Forwarding(
                degree=piece.degree,
                goes_round=self.window is None,
                needed=tuple(self._offsets_needing(index, piece.degree, owner) for owner in range(piece.degree)),
            )
            for index, piece in enumerate(self.microbatch.pieces)
        )

    def _offsets_needing(self, piece: int, degree: int, owner: int) -> frozenset[int]:
        if not self.shard_tokens(piece, owner):
            return frozenset()
        offsets = range(1, degree)
        if self.window is None:
            return frozenset(offsets)
        return frozenset(o for o in offsets if any(True for _ in self._blocks(piece, (owner + o) % degree, owner)))

    def _blocks(self, piece: int, position: int, owner: int) -> Iterator[BlockTask]:
        own, held = self.shard(piece, position), self.shard(piece, owner)
        return block_tasks(own, held, piece=piece, owner=owner, position=position, window=self.window)

    def _key_transfers(self, ring_step: int) -> Iterator[Transfer]:
        for index, forwarding in enumerate(self._forwardings):
            yield from (self._transfer(index, move) for move in forwarding.key_moves(ring_step))

    def _gradient_transfers(self, ring_step: int) -> Iterator[Transfer]:
        for index, forwarding in enumerate(self._forwardings):
            yield from (self._transfer(index, move) for move in forwarding.gradient_moves(ring_step))

    def _transfer(self, piece: int, move: Move) -> Transfer:
        ranks = self.microbatch.pieces[piece].ranks
        return Transfer(
            source=ranks[move.source],
            target=ranks[move.target],
            piece=piece,
            content=move.content,
            owner=move.owner,
            tokens=self.shard_tokens(piece, move.owner),
        )


def lower_microbatch(plan: Plan, index: int) -> MicrobatchProgram:
    """Lower microbatch `index` of `plan` for all of its ranks."""
    return MicrobatchProgram(index=index, microbatch=plan.microbatches[index], tokens=plan.tokens)


def lower_plan(plan: Plan, rank: int) -> tuple[MicrobatchProgram, ...]:
    """Lower the microbatches that name `rank`, in the order in which it runs them."""
    return tuple(
        lower_microbatch(plan, index)
        for index, microbatch in enumerate(plan.microbatches)
        if any(rank in piece.ranks for piece in microbatch.pieces)
    )


def last_on_all_ranks(plan: Plan) -> frozenset[int]:
    """List the microbatches after which none of their ranks has another one."""
    ranks = [{rank for piece in each.pieces for rank in piece.ranks} for each in plan.microbatches]
    last = {rank: index for index, those in enumerate(ranks) for rank in those}
    return frozenset(index for index, those in enumerate(ranks) if all(last[rank] == index for rank in those))
