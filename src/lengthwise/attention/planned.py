"""Attention as a lowered microbatch prescribes it: packed documents apart, cut ones over their rings.

One autograd function does a layer of a microbatch on one rank. A pass is a list of ring steps from `program`, each one
grouped call and the blocks that it hides behind. Partial results merge in fp32 (fp64 under fp64) and are cast once.
Backward sends the keys again, and their gradients to their owners. Ring attention (arXiv 2310.01889), zigzag cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lengthwise.attention.kernels import Block, BlockKernel, BlockMask, Gradients, Saved, merge_block
from lengthwise.attention.packs import Pack, PackKernel, pack_of
from lengthwise.attention.recompute import Recomputation
from lengthwise.comm import Done, Pending, Transport
from lengthwise.program import BlockTask, MicrobatchProgram, Round, Transfer

Shard = tuple[int, int]
"""(piece, owner): the tokens of one position of one piece."""
Held = dict[Shard, Tensor | tuple[Tensor, Tensor]]
"""Keys and values of shards: one tensor (2, tokens, kv_heads, head_dim) where they travel, else the two themselves."""
Arriving = list[tuple[str, Shard, Tensor]]
"""Messages on their way: content ("kv", "dkv"), of which shard, and where they will be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RingStep:
    """One ring step on one rank. `last_used` are shards whose keys no later one wants.

    `pack` joins the diagonal blocks of the first ring step, where the kernel takes packs; `tasks` are then the others.
    """

    sends: tuple[Transfer, ...]
    receives: tuple[Transfer, ...]
    tasks: tuple[BlockTask, ...]
    last_used: tuple[Shard, ...]
    pack: Pack | None = None


class PlannedAttention:
    """One rank's part in the attention of one microbatch; the same object serves all layers, and both passes."""

    def __init__(self, program: MicrobatchProgram, transport: Transport, kernel: BlockKernel) -> None:
        self._program, self._transport, self._kernel = program, transport, kernel
        segments = program.segments(transport.rank)
        self.spans = [(segment.num_tokens, program.tokens[segment.sequence]) for segment in segments]
        """(tokens here, tokens of the whole sequence) of each segment, in local order."""
        self.num_tokens = sum(tokens for tokens, _ in self.spans)
        multiple = kernel.token_multiple
        self.num_rows = max(1, -(-self.num_tokens // multiple)) * multiple  # with the padding that the model runs
        self.layers_run = 0
        self.recomputation: Recomputation | None = None  # the checkpointed layer that is running, if one is
        starts = program.shard_starts(transport.rank)
        self._own = {
            (index, position): (starts[index], starts[index] + program.shard_tokens(index, position), piece.degree)
            for index, piece, position in program.pieces_of(transport.rank)
        }
        self._steps: dict[int | None, tuple[list[RingStep], list[RingStep]]] = {}
        self._masks: dict[tuple[int, int, int, bool, int | None], BlockMask] = {}

    def forward(self, layer: Block, window: int | None = None, sinks: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return (out (tokens, heads, head_dim) in q's dtype, lse (heads, tokens) in the accumulation dtype).

        `layer` holds the queries, keys and values of all tokens of this rank.
        """
        q, k = layer.q, layer.k
        wide = _wide(q.dtype)
        ring_steps, _ = self._steps_of(window, q.device)
        merges = any(not task.causal for ring_step in ring_steps for task in ring_step.tasks)
        # Every query is in one diagonal block, which is its first: nothing is read before it is written.
        rows = 0 if any(each.pack for each in ring_steps) else len(q)  # a pack brings the memory for its results
        out = q.new_empty(rows, *q.shape[1:], dtype=wide if merges else q.dtype)
        lse = q.new_empty(q.shape[1], rows, dtype=wide)
        held = self._own_keys(k, layer.v)
        for ring_step in ring_steps:
            pending, arriving = self._post(ring_step, held, {}, k)
            if ring_step.pack is not None:
                assert isinstance(self._kernel, PackKernel), f"{self._kernel.name} takes no packs"
                pack_out, lse = self._kernel.forward_pack(layer, ring_step.pack)
                out = pack_out.to(out.dtype)
            for task in ring_step.tasks:
                rows = slice(task.q_start, task.q_stop)
                block_out, block_lse = self._kernel.forward(self._block(layer, task, held))
                if task.causal:
                    out[rows], lse[:, rows] = block_out, block_lse
                else:
                    merge_block(out[rows], lse[:, rows], block_out, block_lse)
            pending.wait()
            _take_over(held, arriving, ring_step)
        if sinks is not None:  # exact after the fact, and for backward, too: docs/decisions/attention-sinks.md
            with_sink = torch.logaddexp(lse, sinks.to(wide)[:, None])
            out, lse = out * torch.exp(lse - with_sink).t()[..., None], with_sink
        return out.to(q.dtype), lse

    def backward(self, grad_out: Tensor, layer: Block, saved: Saved, window: int | None = None) -> Gradients:
        """Return (dq, dk, dv) of this rank's tokens, in the dtype of q, k and v."""
        q, k = layer.q, layer.k
        wide = _wide(q.dtype)
        dq = torch.empty_like(q, dtype=wide)
        # Without a window every key, like every query, is in one diagonal block, which is its first.
        first_writes = window is None
        make = torch.empty if first_writes else torch.zeros
        dkv = make(2, *k.shape, dtype=wide, device=k.device)
        gradients = {shard: dkv[:, start:stop] for shard, (start, stop, _) in self._own.items()}
        held = self._own_keys(k, layer.v)
        _, ring_steps = self._steps_of(window, q.device)
        for ring_step in ring_steps:
            pending, arriving = self._post(ring_step, held, gradients, k)
            if ring_step.pack is not None:
                assert isinstance(self._kernel, PackKernel), f"{self._kernel.name} takes no packs"
                grads = self._kernel.backward_pack(grad_out, layer, saved, ring_step.pack)
                for total, part in zip((dq, *dkv), grads, strict=True):
                    total.copy_(part)
            for task in ring_step.tasks:
                rows, cols = slice(task.q_start, task.q_stop), slice(task.kv_start, task.kv_stop)
                saved_rows = Saved(out=saved.out[rows], lse=saved.lse[:, rows])
                block = self._block(layer, task, held)
                block_dq, *block_dkv = self._kernel.backward(grad_out[rows], block, saved_rows)
                if task.causal:
                    dq[rows] = block_dq
                else:
                    dq[rows] += block_dq
                into = gradients.get((task.piece, task.owner))
                if into is None:
                    into = gradients[task.piece, task.owner] = self._buffer(task.piece, task.owner, k, wide).zero_()
                for total, part in zip(into, block_dkv, strict=True):
                    if task.causal and first_writes:
                        total[cols] = part
                    else:
                        total[cols] += part
            pending.wait()
            for content, shard, message in arriving:
                if content == "dkv":
                    gradients[shard] = gradients[shard].add_(message) if shard in gradients else message
            _take_over(held, arriving, ring_step)
        return dq.to(q.dtype), dkv[0].to(k.dtype), dkv[1].to(layer.v.dtype)

    def _steps_of(self, window: int | None, device: torch.device) -> tuple[list[RingStep], list[RingStep]]:
        """Return this rank's (forward, backward) ring steps for layers with `window`; lowered once a microbatch."""
        if window not in self._steps:
            program = self._program.with_window(window)
            rank = self._transport.rank
            rounds = (program.forward_rounds, program.backward_rounds)
            ring_steps = [_rank_steps(program, rank, each) for each in rounds]
            if isinstance(self._kernel, PackKernel):
                pack = pack_of(ring_steps[0][0].tasks, window=program.window, device=device)
                ring_steps = [_with_pack(each, pack) for each in ring_steps]
            self._steps[window] = (ring_steps[0], ring_steps[1])
        return self._steps[window]

    def _own_keys(self, k: Tensor, v: Tensor) -> Held:
        """Copy each ring shard into what will travel; local keys are not copied."""
        return {
            shard: torch.stack((k[start:stop], v[start:stop])) if degree > 1 else (k[start:stop], v[start:stop])
            for shard, (start, stop, degree) in self._own.items()
        }

    def _block(self, layer: Block, task: BlockTask, held: Held) -> Block:
        keys, values = held[task.piece, task.owner]
        return Block(
            q=layer.q[task.q_start : task.q_stop],
            k=keys[task.kv_start : task.kv_stop],
            v=values[task.kv_start : task.kv_stop],
            scale=layer.scale,
            causal=task.causal,
            mask=self._mask(task),
        )

    def _mask(self, task: BlockTask) -> BlockMask | None:
        """Return which keys each query of the block sees, or None where the shape says it all."""
        if task.window is None and (task.distance == 0 or not task.causal):
            return None
        queries, keys = task.q_stop - task.q_start, task.kv_stop - task.kv_start
        distance, causal, window = task.distance, task.causal, task.window
        mask = BlockMask(queries=queries, keys=keys, distance=distance, causal=causal, window=window)
        return self._masks.setdefault((queries, keys, distance, causal, window), mask)

    def _post(
        self, ring_step: RingStep, held: Held, gradients: dict[Shard, Tensor], like: Tensor
    ) -> tuple[Pending, Arriving]:
        """Post the ring step's grouped call; return what to wait for, and the messages that will then have arrived.

        `like` has the dtype and the trailing sizes of keys.
        """
        if not ring_step.sends and not ring_step.receives:
            return Done(), []
        wide, sends = _wide(like.dtype), []
        for each in ring_step.sends:
            shard = (each.piece, each.owner)
            message = held[shard] if each.content == "kv" else gradients.pop(shard, None)
            if message is None:  # nothing of ours to add: the sum so far is zero
                message = self._buffer(*shard, like, wide).zero_()
            assert isinstance(message, Tensor), f"shard {shard} of an uncut piece cannot be sent"
            sends.append((message, each.target))
        arriving, receives = [], []
        for each in ring_step.receives:
            shard = (each.piece, each.owner)
            message = self._buffer(*shard, like, wide if each.content == "dkv" else like.dtype)
            arriving.append((each.content, shard, message))
            receives.append((message, each.source))
        return self._transport.exchange(sends, receives), arriving

    def _buffer(self, piece: int, owner: int, like: Tensor, dtype: torch.dtype) -> Tensor:
        return like.new_empty(2, self._program.shard_tokens(piece, owner), *like.shape[1:], dtype=dtype)


def _rank_steps(program: MicrobatchProgram, rank: int, rounds: Sequence[Round]) -> list[RingStep]:
    """Cut the global rounds down to one rank, with its blocks; steps in which it does nothing stay, for the order."""
    numbers = range(max(program.ring_steps, len(rounds)))
    transfers = [rounds[number].transfers if number < len(rounds) else () for number in numbers]
    sends = [tuple(each for each in transfers[number] if each.source == rank) for number in numbers]
    tasks = [program.tasks(rank, number) for number in numbers]
    last_use: dict[Shard, int] = {}
    for number in numbers:
        used = (each for each in (*tasks[number], *(send for send in sends[number] if send.content == "kv")))
        last_use.update({(each.piece, each.owner): number for each in used})
    return [
        RingStep(
            sends=sends[number],
            receives=tuple(each for each in transfers[number] if each.target == rank),
            tasks=tasks[number],
            last_used=tuple(shard for shard, last in last_use.items() if last == number),
        )
        for number in numbers
    ]


def _with_pack(ring_steps: list[RingStep], pack: Pack | None) -> list[RingStep]:
    """Put the diagonal blocks, which are all in the first ring step, into one pack."""
    first, *others = ring_steps
    assert not any(task.causal for ring_step in others for task in ring_step.tasks), "a rank's own keys come first"
    return [replace(first, tasks=tuple(task for task in first.tasks if not task.causal), pack=pack), *others]


def _take_over(held: Held, arriving: Arriving, ring_step: RingStep) -> None:
    """Take in the keys that arrived and let go of those that no later ring step wants."""
    held.update({shard: message for content, shard, message in arriving if content == "kv"})
    for shard in ring_step.last_used:
        del held[shard]


def _wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which partial results are merged and summed: fp32, or fp64 under fp64."""
    return torch.promote_types(dtype, torch.float32)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        planned: PlannedAttention,
        scale: float,
        window: int | None,
    ) -> Tensor:
        def run() -> tuple[Tensor, Tensor]:
            return planned.forward(Block(q=q, k=k, v=v, scale=scale), window, sinks)

        out, lse = run() if planned.recomputation is None else planned.recomputation.attend(run)
        ctx.save_for_backward(q, k, v, out, lse, sinks)
        ctx.planned, ctx.scale, ctx.window = planned, scale, window
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] - the decorator hides its parameters
        ctx: Any, *grad_outputs: Tensor
    ) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, sinks = ctx.saved_tensors
        saved = Saved(out=out, lse=lse)
        grads = ctx.planned.backward(grad_outputs[0], Block(q=q, k=k, v=v, scale=ctx.scale), saved, ctx.window)
        return *grads, _sink_gradient(sinks, grad_outputs[0], saved), None, None, None


def _sink_gradient(sinks: Tensor | None, grad_out: Tensor, saved: Saved) -> Tensor | None:
    """Return -exp(sink - lse) x (grad_out . out) of each head, summed over tokens; `saved` is that with the sinks."""
    if sinks is None:
        return None
    weight = torch.exp(sinks.to(saved.lse.dtype)[:, None] - saved.lse)
    received = (grad_out.to(weight.dtype) * saved.out.to(weight.dtype)).sum(-1).t()
    return -(weight * received).sum(1).to(sinks.dtype)


def planned_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    planned: PlannedAttention,
    *,
    scale: float,
    window: int | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attend within each sequence of a microbatch, causally, wherever its tokens are.

    q is (tokens, heads, head_dim), k and v (tokens, kv_heads, head_dim): this rank's tokens in the order of
    `MicrobatchProgram.segments`. `window`: a query sees itself and the window - 1 tokens before it. `sinks` (heads,)
    are logits that take weight and give no value. Returns (tokens, heads, head_dim).
    """
    planned.layers_run += 1
    return _Attention.apply(q, k, v, sinks, planned, scale, window)
