"""Attention of a lowered microbatch: packed documents by themselves, cut ones over their rings.

One autograd function computes a layer of a microbatch on one rank. A pass is a list of ring steps from `program`: a
grouped call, and blocks that are computed meanwhile. Partial results merge in fp32 (fp64 under fp64). Backward sends
keys again, and gradients to their owners. Ring attention (arXiv 2310.01889), zigzag cut.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from lengthwise.attention.halos import Halo
from lengthwise.attention.heads import HeadExchange, Rows, query_heads, shares_keys
from lengthwise.attention.kernels import Block, BlockKernel, BlockMask, Saved
from lengthwise.attention.mixing import LocalSpans
from lengthwise.attention.packs import PackKernel, pack_documents
from lengthwise.attention.partials import Attended, PartialGradients, PartialOut, picked, wide
from lengthwise.attention.recompute import Recomputation
from lengthwise.attention.ring_steps import JoinedBlocks, RingPass, RingStep, Shard, join_blocks, ring_steps_of
from lengthwise.comm import Pending, Transport
from lengthwise.program import BlockTask, Content, HeadRange, MicrobatchProgram
from lengthwise.program.split_heads import heads_of

Held = dict[Shard, Tensor | tuple[Tensor, Tensor]]
"""Keys and values of shards: one tensor (2, tokens, kv_heads, head_dim) if they travel, else two tensors."""
Arriving = list[tuple[Content, Shard, Tensor]]
"""Arriving messages: content (keys, or their gradients), shard, and buffer."""


class PlannedAttention:
    """One rank's part in a microbatch's attention, for all layers and passes.

    rows_beyond: least number of padding rows. layers_passed: number of layers that mix tokens, of other stages or
    chunks.
    """

    def __init__(
        self,
        program: MicrobatchProgram,
        transport: Transport,
        kernel: BlockKernel,
        *,
        rows_beyond: int = 0,
        layers_passed: int = 0,
    ) -> None:
        self._program, self._transport, self._kernel = program, transport, kernel
        self._packs = kernel if isinstance(kernel, PackKernel) else None
        segments = program.segments(transport.rank)
        self.spans = [(segment.num_tokens, program.tokens[segment.sequence]) for segment in segments]
        """(tokens here, tokens of the whole sequence) of each segment, in local order."""
        self.num_tokens = sum(tokens for tokens, _ in self.spans)
        multiple = kernel.token_multiple
        rows = self.num_tokens + rows_beyond
        self.num_rows = max(1, -(-rows // multiple)) * multiple  # with padding
        self.layers_run = 0  # layers that mix tokens: attention, scans, convolutions
        self.layers_kept = 0  # those of them with gradients
        self.layers_checkpointed = 0  # those of them in a wrapped layer's first run
        self.layers_passed = layers_passed
        self.recomputation: Recomputation | None = None  # the running checkpointed layer, if any
        self.mixers: Mapping[Any, Any] = {}  # chosen kernels of layers without attention
        self._halos: dict[int, Halo] = {}
        self._heads = HeadExchange(program, transport)
        starts = program.row_starts(transport.rank)
        pieces = [(*each, heads_of(*each[1:])) for each in program.pieces_of(transport.rank)]
        self._ranges = {index: heads for index, _, _, heads in pieces}
        groups = [(index, position // piece.heads, starts[heads][index]) for index, piece, position, heads in pieces]
        self._own = {
            (index, group): slice(start, start + program.ring_tokens(index, group)) for index, group, start in groups
        }
        self._travels = {index: piece.degree > piece.heads for index, piece, *_ in pieces}
        self._tokens = dict.fromkeys(self._heads.ranges, 0)
        for (index, _), own in self._own.items():
            self._tokens[self._ranges[index]] += own.stop - own.start
        self._steps: dict[tuple[int | None, int], tuple[RingPass, RingPass]] = {}
        self._masks: dict[tuple[int, int, int, bool, int | None], BlockMask] = {}

    @cached_property
    def local_spans(self) -> LocalSpans:
        """This rank's spans in layers without attention."""
        return LocalSpans(self._program, self._transport, self.num_rows, self)

    def halo(self, width: int) -> Halo:
        """Return the halo of this rank's spans for convolutions over `width` tokens."""
        if width not in self._halos:
            self._halos[width] = Halo(self.local_spans, width)
        return self._halos[width]

    def count_layer(self) -> None:
        """Count a layer that mixes tokens by the plan."""
        self.layers_run += 1
        self.layers_kept += torch.is_grad_enabled()
        self.layers_checkpointed += self.recomputation is not None and not self.recomputation.is_second_run

    @property
    def windows(self) -> frozenset[int | None]:
        """Windows of the layers that have run, None for layers without one."""
        return frozenset(window for window, _ in self._steps)

    @property
    def no_cap(self) -> str | None:
        """Why scores cannot be capped here, or None."""
        return None if self._kernel.caps_scores else f"the kernel, {self._kernel.name}, cannot cap scores"

    @property
    def _packed(self) -> PackKernel:
        assert self._packs is not None, f"{self._kernel.name} takes no packs"
        return self._packs

    def lower(self, windows: Collection[int | None], device: torch.device) -> None:
        """Lower the ring steps of layers with these windows in advance."""
        for window in windows:
            self._steps_of(window, device, self.num_rows)

    def forward(self, layer: Block, window: int | None = None, sinks: Tensor | None = None) -> tuple[Tensor, Attended]:
        """Return (out (tokens, heads, head_dim) in q's dtype, results for backward by range of heads)."""
        rows = layer.q.shape[0]
        ring, _ = self._steps_of(window, layer.q.device, rows)
        blocks, parts = dict[HeadRange, Block](), dict[HeadRange, PartialOut]()
        for heads, (q, k, v) in self._heads.split(Content.QKV, (layer.q, layer.k, layer.v)).items():
            blocks[heads] = block = layer if q is layer.q else replace(layer, q=q, k=k, v=v)
            parts[heads] = PartialOut(block, heads, ring, tokens=self._tokens[heads])
        held = self._own_keys(blocks, ring)
        for ring_step in ring.steps:
            posted = self._post(ring_step, held, {}, blocks) if ring_step.sends or ring_step.receives else None
            for heads, packs in ring_step.packs.items():
                for pack in packs:
                    parts[heads].take_pack(pack, *self._packed.forward_pack(blocks[heads].at(pack.rows), pack))
            for task in ring_step.tasks:
                block = self._block(blocks[task.heads], task, held)
                queries = slice(task.q_start, task.q_stop)
                parts[task.heads].take(queries, *self._kernel.forward(block), is_first=task.causal)
            for joined in ring_step.joined:
                block = _joined_block(blocks[joined.heads], joined, held)
                if joined.pack is None:
                    found = self._kernel.forward(block)
                else:
                    found = self._packed.forward_pack(block, joined.pack)
                parts[joined.heads].take(joined.rows, *found)
            if posted is not None:
                _take_over(posted, held, {})
            for shard in ring_step.last_used:
                del held[shard]
        attended, outs = Attended(), dict[HeadRange, Sequence[Tensor]]()
        for heads, part in parts.items():
            own_sinks = None if sinks is None else sinks[query_heads(heads, len(sinks))]
            attended[heads] = blocks[heads], part.done(own_sinks)
            outs[heads] = (attended[heads][1].out,)
        (out,) = self._heads.join(Content.OUT, outs, layer.q.shape[1:2], rows_of_all=rows)
        return out, attended

    def read_again(self, layer: Block, out: Tensor, lses: Mapping[HeadRange, Tensor]) -> Attended:
        """Return the results of `forward` for the same layer, from its kept (out, lse) and a recomputed `layer`."""
        split = self._heads.split(Content.QKV_OUT, (layer.q, layer.k, layer.v, out))
        return {
            heads: (replace(layer, q=q, k=k, v=v), Saved(out=part, lse=lses[heads]))
            for heads, (q, k, v, part) in split.items()
        }

    def backward(
        self,
        grad_out: Tensor,
        attended: Attended,
        num_heads: Sequence[int],
        window: int | None = None,
        sinks: Tensor | None = None,
    ) -> tuple[Tensor | None, ...]:
        """Return (dq, dk, dv, gradient of sinks) of this rank's tokens. attended: results of `forward`."""
        rows, windowed = grad_out.shape[0], window is not None
        _, ring = self._steps_of(window, grad_out.device, rows)
        split = self._heads.split(Content.GRAD_OUT, (grad_out,))
        blocks, sums = dict[HeadRange, Block](), dict[HeadRange, PartialGradients]()
        for heads, (block, _) in attended.items():
            blocks[heads] = block
            sums[heads] = PartialGradients(block, heads, ring, windowed=windowed, tokens=self._tokens[heads])
        gradients = self._own_gradients(sums)
        held = self._own_keys(blocks, ring)
        for ring_step in ring.steps:
            posted = self._post(ring_step, held, gradients, blocks) if ring_step.sends or ring_step.receives else None
            for heads, packs in ring_step.packs.items():
                for pack in packs:
                    block, saved = blocks[heads].at(pack.rows), attended[heads][1].at(pack.rows)
                    grad = split[heads][0][pack.rows]
                    sums[heads].take_pack(pack, self._packed.backward_pack(grad, block, saved, pack))
            for task in ring_step.tasks:
                into = self._gradients_of(task, gradients, blocks, sums)
                (grad,), (block, saved) = split[task.heads], attended[task.heads]
                queries, keys = slice(task.q_start, task.q_stop), slice(task.kv_start, task.kv_stop)
                grads = self._kernel.backward(grad[queries], self._block(block, task, held), saved.at(queries))
                sums[task.heads].take(queries, keys, grads, into, is_first=task.causal)
                del grads  # before others are made
            for joined in ring_step.joined:
                into = self._gradients_of(joined, gradients, blocks, sums)
                (grad,), (block, saved) = split[joined.heads], attended[joined.heads]
                saved = Saved(out=picked(saved.out, joined.rows), lse=picked(saved.lse, joined.rows, dim=1))
                block = _joined_block(block, joined, held)
                of_those = picked(grad, joined.rows), block, saved
                if joined.pack is None:
                    grads = self._kernel.backward(*of_those)
                else:
                    grads = self._packed.backward_pack(*of_those, joined.pack)
                sums[joined.heads].take(joined.rows, joined.cols, grads, into)
                del grads
            if posted is not None:
                _take_over(posted, held, gradients)
            for shard in ring_step.last_used:
                del held[shard]
        done = {heads: each.done(widely=shares_keys(heads, *num_heads[:2])) for heads, each in sums.items()}
        dq, dk, dv = self._heads.join(Content.DQKV, done, num_heads, rows_of_all=rows)
        of_sinks = None if sinks is None else _sink_gradient(sinks, split, attended)
        return dq.to(grad_out.dtype), dk.to(grad_out.dtype), dv.to(grad_out.dtype), of_sinks

    def _gradients_of(
        self,
        each: BlockTask | JoinedBlocks,
        gradients: dict[Shard, Tensor],
        blocks: Mapping[HeadRange, Block],
        sums: Mapping[HeadRange, PartialGradients],
    ) -> Tensor:
        shard = (each.piece, each.owner)
        if shard not in gradients:
            gradients[shard] = self._buffer(*shard, blocks[each.heads].k, sums[each.heads].dq.dtype).zero_()
        return gradients[shard]

    def _steps_of(self, window: int | None, device: torch.device, rows: int) -> tuple[RingPass, RingPass]:
        """Return this rank's (forward, backward) ring steps for layers with `window`, lowered once."""
        if (window, rows) not in self._steps:
            program, padding = self._program.with_window(window), rows - self.num_tokens
            packing, joining = None, partial(join_blocks, device=device, kernel=self._packs)
            if self._packs is not None:
                packing = partial(pack_documents, device=device, alone_from=self._packs.alone_from)
            self._steps[window, rows] = ring_steps_of(program, self._transport.rank, packing, joining, padding=padding)
        return self._steps[window, rows]

    def _own_gradients(self, sums: Mapping[HeadRange, PartialGradients]) -> dict[Shard, Tensor]:
        """Return the sums of gradients of this rank's own keys and values, by shard."""
        found = dict[Shard, Tensor]()
        for shard, rows in self._own.items():
            of_range = sums[self._ranges[shard[0]]]
            if not of_range.is_of_packs:
                found[shard] = of_range.dkv[:, rows]
        return found

    def _own_keys(self, blocks: Mapping[HeadRange, Block], ring: RingPass) -> Held:
        held: Held = {}
        for shard, rows in self._own.items():
            if shard in ring.used:  # packs use their rows
                block = blocks[self._ranges[shard[0]]]
                keys = (block.k[rows], block.v[rows])
                held[shard] = torch.stack(keys) if self._travels[shard[0]] else keys
        return held

    def _block(self, layer: Block, task: BlockTask, held: Held) -> Block:
        keys, values = held[task.piece, task.owner]
        return Block(
            q=layer.q[task.q_start : task.q_stop],
            k=keys[task.kv_start : task.kv_stop],
            v=values[task.kv_start : task.kv_stop],
            scale=layer.scale,
            causal=task.causal,
            mask=self._mask(task),
            softcap=layer.softcap,
        )

    def _mask(self, task: BlockTask) -> BlockMask | None:
        """Return a block's mask, or None if causality and shape suffice."""
        if task.window is None and (task.distance == 0 or not task.causal):
            return None
        queries, keys = task.q_stop - task.q_start, task.kv_stop - task.kv_start
        distance, causal, window = task.distance, task.causal, task.window
        mask = BlockMask(queries=queries, keys=keys, distance=distance, causal=causal, window=window)
        return self._masks.setdefault((queries, keys, distance, causal, window), mask)

    def _post(
        self, ring_step: RingStep, held: Held, gradients: dict[Shard, Tensor], blocks: Mapping[HeadRange, Block]
    ) -> tuple[Pending, Arriving]:
        """Post the ring step's grouped call; return it with its arriving messages."""
        sends = []
        for send in ring_step.sends:
            shard, like = (send.piece, send.owner), blocks[send.heads].k
            message = held[shard] if send.content == Content.KV else gradients.pop(shard, None)
            if message is None:  # the sum so far is zero
                message = self._buffer(*shard, like, wide(like.dtype)).zero_()
            assert isinstance(message, Tensor), f"shard {shard} of an uncut piece cannot be sent"
            sends.append((message, send.target))
        arriving, receives = [], []
        for receive in ring_step.receives:
            shard, like = (receive.piece, receive.owner), blocks[receive.heads].k
            message = self._buffer(*shard, like, like.dtype if receive.content == Content.KV else wide(like.dtype))
            arriving.append((receive.content, shard, message))
            receives.append((message, receive.source))
        return self._transport.exchange(sends, receives), arriving

    def _buffer(self, piece: int, owner: int, like: Tensor, dtype: torch.dtype) -> Tensor:
        return like.new_empty(2, self._program.ring_tokens(piece, owner), *like.shape[1:], dtype=dtype)


def _joined_block(layer: Block, joined: JoinedBlocks, held: Held) -> Block:
    k, v = (picked(each, joined.cols) for each in held[joined.piece, joined.owner])
    return replace(layer, q=picked(layer.q, joined.rows), k=k, v=v, causal=joined.causal)


def _take_over(posted: tuple[Pending, Arriving], held: Held, gradients: dict[Shard, Tensor]) -> None:
    """Wait for a grouped call; keep arrived keys, and add arrived gradients."""
    pending, arriving = posted
    pending.wait()
    for content, shard, message in arriving:
        if content == Content.KV:
            held[shard] = message
        else:
            gradients[shard] = gradients[shard].add_(message) if shard in gradients else message


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        how: tuple[PlannedAttention, float, int | None, float | None],
    ) -> Tensor:
        planned, scale, window, softcap = how
        layer = Block(q=q, k=k, v=v, scale=scale, softcap=softcap)
        if planned.recomputation is None:
            out, attended = planned.forward(layer, window, sinks)
        else:
            run, read_again = partial(planned.forward, layer, window, sinks), partial(planned.read_again, layer)
            out, attended = planned.recomputation.attend(run, read_again)
        kept = [sinks]
        for block, saved in attended.values():
            kept += (block.q, block.k, block.v, saved.out, saved.lse)
        ctx.save_for_backward(*kept)
        ctx.how, ctx.ranges, ctx.num_heads = how, tuple(attended), (q.shape[1], k.shape[1], v.shape[1])
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] - the decorator hides its parameters
        ctx: Any, *grad_outputs: Tensor
    ) -> tuple[Tensor | None, ...]:
        sinks, *kept = ctx.saved_tensors
        planned, scale, window, softcap = ctx.how
        attended = Attended()
        for heads, (q, k, v, out, lse) in zip(ctx.ranges, zip(*[iter(kept)] * 5, strict=True), strict=True):
            attended[heads] = Block(q=q, k=k, v=v, scale=scale, softcap=softcap), Saved(out=out, lse=lse)
        return *planned.backward(grad_outputs[0], attended, ctx.num_heads, window, sinks), None


def _sink_gradient(sinks: Tensor, grad_out: Rows, attended: Attended) -> Tensor:
    """Return -exp(sink - lse) x (grad_out . out) by head, summed over this rank's rows."""
    total = torch.zeros_like(sinks)
    for heads, (_, saved) in attended.items():
        out, lse, (grad,) = saved.out, saved.lse, grad_out[heads]
        mine = query_heads(heads, len(sinks))
        weight = torch.exp(sinks[mine].to(lse.dtype)[:, None] - lse)
        received = (grad.to(weight.dtype) * out.to(weight.dtype)).sum(-1).t()
        total[mine] -= (weight * received).sum(1).to(sinks.dtype)
    return total


def planned_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    planned: PlannedAttention,
    *,
    scale: float,
    window: int | None = None,
    sinks: Tensor | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Attend causally within each sequence of a microbatch, across ranks; return (tokens, heads, head_dim).

    q is (tokens, heads, head_dim), k and v (tokens, kv_heads, head_dim): this rank's tokens in the order of
    `MicrobatchProgram.segments`, then padding. window: tokens that a query sees, itself included. sinks: logits
    (heads,) with weight but no value. softcap: cap of scores, which become softcap x tanh(s / softcap); the kernel must
    support it.
    """
    planned.count_layer()
    return _Attention.apply(q, k, v, sinks, (planned, scale, window, softcap))  # a tuple, because arguments cost calls
