"""Lower a plan: from pieces on ranks to rounds of transfers and block tasks.

Everything is derived from one record that is the same on all ranks, so that leaving out an empty transfer is decided
for both sides at once and never by a rank on its own. Layers repeat the same rounds, so a round is named by
(microbatch, layer, pass, hop) and lowered once for all layers.

Ring of d positions, hop t: position j holds the keys of position (j - t) mod d. With two chunks a position (j and
2d-1-j) and common chunk borders no mask is ever needed:
    own keys             one causal block over both chunks (the high chunk sees the whole low one);
    keys of a lower one  both query chunks see all of its low chunk and nothing of its high chunk;
    keys of a higher one only the high query chunk sees anything, and sees both chunks in full.
Forward: d-1 rounds, round t sends on what is held at hop t. Backward: keys go round again in rounds 0..d-2; gradients
of keys follow one hop behind in rounds 1..d, the last of which brings them home.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from lengthwise.core.cut import position_chunks
from lengthwise.core.errors import PlanError, raise_problems
from lengthwise.core.plan import Microbatch, Piece, Plan
from lengthwise.program.records import BlockTask, Round, Segment, Transfer


@dataclass(frozen=True, kw_only=True)
class MicrobatchProgram:
    """One microbatch, lowered for all of its ranks."""

    index: int
    microbatch: Microbatch
    tokens: tuple[int, ...]

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
    def hops(self) -> int:
        """Hops of the longest ring: 1 where nothing is cut."""
        return max(piece.degree for piece in self.microbatch.pieces)

    @cached_property
    def forward_rounds(self) -> tuple[Round, ...]:
        """Rounds of the forward pass, one for each hop but the last."""
        return tuple(Round(transfers=tuple(self._kv_transfers(hop))) for hop in range(self.hops - 1))

    @cached_property
    def backward_rounds(self) -> tuple[Round, ...]:
        """Rounds of the backward pass: keys and values again, their gradients one hop behind; none without a ring."""
        if self.hops == 1:
            return ()
        return tuple(
            Round(transfers=(*self._kv_transfers(hop), *self._dkv_transfers(hop))) for hop in range(self.hops + 1)
        )

    def tasks(self, rank: int, hop: int) -> tuple[BlockTask, ...]:
        """List the blocks that `rank` computes at `hop`; blocks without queries or keys are left out."""
        starts = self.shard_starts(rank)
        return tuple(
            task
            for index, piece, position in self.pieces_of(rank)
            if hop < piece.degree
            for task in self._piece_tasks(index, position, (position - hop) % piece.degree, starts[index])
            if task.q_stop > task.q_start and task.kv_stop > task.kv_start
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

    def _piece_tasks(self, piece: int, position: int, home: int, q_base: int) -> Iterator[BlockTask]:
        own, held = self.shard(piece, position), self.shard(piece, home)
        q_start, kv_start = q_base, 0
        for low, high, held_low, held_high in zip(own[::2], own[1::2], held[::2], held[1::2], strict=True):
            q_middle, q_stop = q_start + low.num_tokens, q_start + low.num_tokens + high.num_tokens
            kv_middle = kv_start + held_low.num_tokens
            kv_stop = kv_middle + held_high.num_tokens
            yield BlockTask(
                piece=piece,
                sequence=low.sequence,
                q_start=q_middle if home > position else q_start,
                q_stop=q_stop,
                kv_start=kv_start,
                kv_stop=kv_middle if home < position else kv_stop,
                causal=home == position,
            )
            q_start, kv_start = q_stop, kv_stop

    def _kv_transfers(self, hop: int) -> Iterator[Transfer]:
        for index, piece in enumerate(self.microbatch.pieces):
            if hop < piece.degree - 1:
                yield from self._pass_on(index, piece, hop, "kv")

    def _dkv_transfers(self, hop: int) -> Iterator[Transfer]:
        for index, piece in enumerate(self.microbatch.pieces):
            if piece.degree > 1 and 1 <= hop <= piece.degree:
                yield from self._pass_on(index, piece, hop - 1, "dkv")

    def _pass_on(self, index: int, piece: Piece, hop: int, content: str) -> Iterator[Transfer]:
        """Let every position hand what it held at `hop` to the next one; nothing is sent where nothing is held."""
        for position, source in enumerate(piece.ranks):
            home = (position - hop) % piece.degree
            tokens = self.shard_tokens(index, home)
            if tokens:
                target = piece.ranks[(position + 1) % piece.degree]
                yield Transfer(source=source, target=target, piece=index, content=content, home=home, tokens=tokens)


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


def refuse_unsupported(plan: Plan) -> None:
    """Refuse what the plan file can say but this version cannot run.

    Raises:
        PlanError: a schedule other than free, or a microbatch with offload, recomputation or split heads.
    """
    problems = []

    def refuse(where: str, expected: str, got: str) -> None:
        problems.append(PlanError(where, expected=expected, got=got, remedy="Plan again without it."))

    if plan.schedule.get("kind") != "free":
        refuse("plan: schedule", "kind free (all this version runs)", str(plan.schedule.get("kind")))
    for index, microbatch in enumerate(plan.microbatches):
        where = f"plan: microbatch {index}"
        if microbatch.offload:
            refuse(f"{where}: offload", "0 (this version keeps activations on the device)", str(microbatch.offload))
        if microbatch.recompute != "none":
            refuse(f"{where}: recompute", "none (all this version runs)", microbatch.recompute)
        if any(piece.heads != 1 for piece in microbatch.pieces):
            refuse(f"{where}: heads", "1 (this version rotates keys, it does not split heads)", "more")
    raise_problems(problems[:10])
