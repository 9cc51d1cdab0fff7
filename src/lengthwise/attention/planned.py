"""Attention as a lowered microbatch prescribes it: packed documents apart, cut ones over their rings.

One autograd function does a layer of a microbatch on one rank. A pass is a list of ring steps from `program`, each a
grouped call and the blocks that it hides behind. Partial results merge in fp32 (fp64 under fp64). Backward sends keys
again, and gradients to their owners. Ring attention (arXiv 2310.01889), zigzag cut.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from lengthwise.attention.halos import Halo
from lengthwise.attention.heads import HeadExchange, Rows, query_heads, shares_keys
from lengthwise.attention.kernels import Block, BlockKernel, BlockMask, Gradients, Saved
from lengthwise.attention.mixing import LocalSpans
from lengthwise.attention.packs import Pack, PackKernel, pack_documents
from lengthwise.attention.partials import PartialGradients, PartialOut, wide
from lengthwise.attention.recompute import Recomputation
from lengthwise.attention.ring_steps import RingStep, Shard, ring_steps_of
from lengthwise.comm import Done, Pending, Transport
from lengthwise.program import BlockTask, Content, HeadRange, MicrobatchProgram
from lengthwise.program.heads import heads_of

Held = dict[Shard, Tensor | tuple[Tensor, Tensor]]
"""Keys and values of shards: one tensor (2, tokens, kv_heads, head_dim) where they travel, else the two themselves."""
Arriving = list[tuple[Content, Shard, Tensor]]
"""Messages on their way: content (keys, or their gradients), of which shard, and where they will be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attended:
    """The rows of one range of heads: queries, keys and values, and what they gave."""

    block: Block
    saved: Saved


class PlannedAttention:
    """One rank's part in a microbatch's attention, for all layers and passes; `rows_beyond`: least padding rows."""

    def __init__(
        self, program: MicrobatchProgram, transport: Transport, kernel: BlockKernel, *, rows_beyond: int = 0
    ) -> None:
        self._program, self._transport, self._kernel = program, transport, kernel
        segments = program.segments(transport.rank)
        self.spans = [(segment.num_tokens, program.tokens[segment.sequence]) for segment in segments]
        """(tokens here, tokens of the whole sequence) of each segment, in local order."""
        self.num_tokens = sum(tokens for tokens, _ in self.spans)
        multiple = kernel.token_multiple
        rows = self.num_tokens + rows_beyond
        self.num_rows = max(1, -(-rows // multiple)) * multiple  # with the padding that the model runs
        self.layers_run = 0  # layers that mix tokens: attention, scans, convolutions
        self.layers_kept = 0  # of these, those that backward will run through
        self.layers_passed = 0  # of those of the model, what others run, where it is cut into stages
        self.recomputation: Recomputation | None = None  # the checkpointed layer that is running, if one is
        self.mixers: Mapping[Any, Any] = {}  # what computes layers that are no attention, where models choose it
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
        self._steps: dict[tuple[int | None, int], tuple[list[RingStep], list[RingStep]]] = {}
        self._masks: dict[tuple[int, int, int, bool, int | None], BlockMask] = {}

    @cached_property
    def local_spans(self) -> LocalSpans:
        """What this rank computes in one go in layers that are no attention."""
        return LocalSpans(self._program, self._transport, self.num_rows, self)

    def halo(self, width: int) -> Halo:
        """Return what goes before the spans of this rank for convolutions over `width` tokens."""
        if width not in self._halos:
            self._halos[width] = Halo(self.local_spans, width)
        return self._halos[width]

    def count_layer(self) -> None:
        """Count a layer that mixes tokens and runs by the plan."""
        self.layers_run += 1
        self.layers_kept += torch.is_grad_enabled()
        if self.recomputation is not None:
            self.recomputation.count()

    @property
    def windows(self) -> frozenset[int | None]:
        """The windows of the layers that have run; None: a layer sees everything."""
        return frozenset(window for window, _ in self._steps)

    @property
    def no_cap(self) -> str | None:
        """Why scores cannot be capped here; None: they can."""
        return None if self._kernel.caps_scores else f"the kernel, {self._kernel.name}, caps no scores"

    def lower(self, windows: Collection[int | None], device: torch.device) -> None:
        """Lower the ring steps of layers with these windows before one of them runs."""
        for window in windows:
            self._steps_of(window, device, self.num_rows)

    def forward(
        self, layer: Block, window: int | None = None, sinks: Tensor | None = None
    ) -> tuple[Tensor, dict[HeadRange, Attended]]:
        """Return (out (tokens, heads, head_dim) in q's dtype, and by range of heads what backward needs)."""
        rows = len(layer.q)
        ring_steps, _ = self._steps_of(window, layer.q.device, rows)
        split = self._heads.split(Content.QKV, (layer.q, layer.k, layer.v))
        blocks = {heads: replace(layer, q=q, k=k, v=v) for heads, (q, k, v) in split.items()}
        parts = {
            heads: PartialOut(block, heads, ring_steps, tokens=self._tokens(heads)) for heads, block in blocks.items()
        }
        held = self._own_keys(blocks)
        for ring_step in ring_steps:
            pending, arriving = self._post(ring_step, held, {}, blocks)
            for heads, pack, kernel in self._packs(ring_step):
                parts[heads].take_pack(pack, *kernel.forward_pack(blocks[heads].at(pack.rows), pack))
            for task in ring_step.tasks:
                block = self._block(blocks[task.heads], task, held)
                parts[task.heads].take(task, *self._kernel.forward(block))
            pending.wait()
            _take_over(held, arriving, ring_step)
        attended = {
            heads: Attended(block=blocks[heads], saved=part.done(_sinks_of(heads, sinks)))
            for heads, part in parts.items()
        }
        outs = {heads: (each.saved.out,) for heads, each in attended.items()}
        (out,) = self._heads.join(Content.OUT, outs, layer.q.shape[1:2], rows_of_all=rows)
        return out, attended

    def read_again(self, layer: Block, out: Tensor, lses: Mapping[HeadRange, Tensor]) -> dict[HeadRange, Attended]:
        """Return what `forward` did of the same layer, from its results, where they were kept and `layer` was not."""
        split = self._heads.split(Content.QKV_OUT, (layer.q, layer.k, layer.v, out))
        return {
            heads: Attended(block=replace(layer, q=q, k=k, v=v), saved=Saved(out=part, lse=lses[heads]))
            for heads, (q, k, v, part) in split.items()
        }

    def backward(
        self,
        grad_out: Tensor,
        attended: Mapping[HeadRange, Attended],
        num_heads: Sequence[int],
        window: int | None = None,
        sinks: Tensor | None = None,
    ) -> tuple[Tensor | None, ...]:
        """Return (dq, dk, dv, gradient of the sinks) of this rank's tokens; `attended`: what `forward` returned."""
        rows = len(grad_out)
        _, ring_steps = self._steps_of(window, grad_out.device, rows)
        split = self._heads.split(Content.GRAD_OUT, (grad_out,))
        blocks = {heads: each.block for heads, each in attended.items()}
        sums = {
            heads: PartialGradients(block, heads, ring_steps, windowed=window is not None, tokens=self._tokens(heads))
            for heads, block in blocks.items()
        }
        gradients = self._own_gradients(sums)
        held = self._own_keys(blocks)
        for ring_step in ring_steps:
            pending, arriving = self._post(ring_step, held, gradients, blocks)
            for heads, pack, kernel in self._packs(ring_step):
                grad, saved = split[heads][0][pack.rows], attended[heads].saved.at(pack.rows)
                sums[heads].take_pack(pack, kernel.backward_pack(grad, blocks[heads].at(pack.rows), saved, pack))
            for task in ring_step.tasks:
                grads = self._block_gradients(task, split[task.heads][0], attended[task.heads], held)
                shard = (task.piece, task.owner)
                if shard not in gradients:
                    gradients[shard] = self._buffer(*shard, blocks[task.heads].k, sums[task.heads].dq.dtype).zero_()
                sums[task.heads].take(task, grads, gradients[shard])
            pending.wait()
            for content, shard, message in arriving:
                if content == Content.DKV:
                    gradients[shard] = gradients[shard].add_(message) if shard in gradients else message
            _take_over(held, arriving, ring_step)
        done = {heads: each.done(widely=shares_keys(heads, *num_heads[:2])) for heads, each in sums.items()}
        joined = self._heads.join(Content.DQKV, done, num_heads, rows_of_all=rows)
        dq, dk, dv = (grad.to(grad_out.dtype) for grad in joined)
        return dq, dk, dv, _sink_gradient(sinks, split, attended)

    def _block_gradients(self, task: BlockTask, grad_out: Tensor, attended: Attended, held: Held) -> Gradients:
        rows = slice(task.q_start, task.q_stop)
        return self._kernel.backward(grad_out[rows], self._block(attended.block, task, held), attended.saved.at(rows))

    def _packs(self, ring_step: RingStep) -> Iterator[tuple[HeadRange, Pack, PackKernel]]:
        for heads, packs in ring_step.packs.items():
            assert isinstance(self._kernel, PackKernel), f"{self._kernel.name} takes no packs"
            yield from ((heads, pack, self._kernel) for pack in packs)

    def _steps_of(self, window: int | None, device: torch.device, rows: int) -> tuple[list[RingStep], list[RingStep]]:
        """Return this rank's (forward, backward) ring steps for layers with `window`; lowered once a microbatch."""
        if (window, rows) not in self._steps:
            program, padding = self._program.with_window(window), rows - self.num_tokens
            kernel, packing = self._kernel, None
            if isinstance(kernel, PackKernel):
                packing = partial(pack_documents, device=device, alone_from=kernel.alone_from)
            self._steps[window, rows] = ring_steps_of(program, self._transport.rank, packing, padding=padding)
        return self._steps[window, rows]

    def _tokens(self, heads: HeadRange) -> int:
        return sum(rows.stop - rows.start for shard, rows in self._own.items() if self._ranges[shard[0]] == heads)

    def _own_gradients(self, sums: Mapping[HeadRange, PartialGradients]) -> dict[Shard, Tensor]:
        """Return where the gradients of this rank's own keys and values are summed, of those that are."""
        own = {shard: (sums[self._ranges[shard[0]]], rows) for shard, rows in self._own.items()}
        return {shard: each.dkv[:, rows] for shard, (each, rows) in own.items() if not each.is_of_packs}

    def _own_keys(self, blocks: Mapping[HeadRange, Block]) -> Held:
        held: Held = {}
        for shard, rows in self._own.items():
            block = blocks[self._ranges[shard[0]]]
            keys = (block.k[rows], block.v[rows])
            held[shard] = torch.stack(keys) if self._travels[shard[0]] else keys
        return held

    def _block(self, layer: Block, task: BlockTask, held: Held) -> Block:
        keys, values = held[task.piece, task.owner]
        return replace(
            layer,
            q=layer.q[task.q_start : task.q_stop],
            k=keys[task.kv_start : task.kv_stop],
            v=values[task.kv_start : task.kv_stop],
            causal=task.causal,
            mask=self._mask(task),
        )

    def _mask(self, task: BlockTask) -> BlockMask | None:
        """Return which keys each query of the block sees; None: the shape says it."""
        if task.window is None and (task.distance == 0 or not task.causal):
            return None
        queries, keys = task.q_stop - task.q_start, task.kv_stop - task.kv_start
        distance, causal, window = task.distance, task.causal, task.window
        mask = BlockMask(queries=queries, keys=keys, distance=distance, causal=causal, window=window)
        return self._masks.setdefault((queries, keys, distance, causal, window), mask)

    def _post(
        self, ring_step: RingStep, held: Held, gradients: dict[Shard, Tensor], blocks: Mapping[HeadRange, Block]
    ) -> tuple[Pending, Arriving]:
        """Post the ring step's grouped call; return what to wait for, and the messages that arrive with it."""
        if not ring_step.sends and not ring_step.receives:
            return Done(), []
        sends = []
        for send in ring_step.sends:
            shard, like = (send.piece, send.owner), blocks[send.heads].k
            message = held[shard] if send.content == Content.KV else gradients.pop(shard, None)
            if message is None:  # nothing of ours to add: the sum so far is zero
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


def _take_over(held: Held, arriving: Arriving, ring_step: RingStep) -> None:
    """Store the keys that arrived; drop those that no later ring step needs."""
    held.update({shard: message for content, shard, message in arriving if content == Content.KV})
    for shard in ring_step.last_used:
        del held[shard]


def _sinks_of(heads: HeadRange, sinks: Tensor | None) -> Tensor | None:
    return None if sinks is None else sinks[query_heads(heads, len(sinks))]


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
        softcap: float | None,
    ) -> Tensor:
        layer, attended = Block(q=q, k=k, v=v, scale=scale, softcap=softcap), dict[HeadRange, Attended]()

        def run() -> tuple[Tensor, Mapping[HeadRange, Tensor]]:
            out, found = planned.forward(layer, window, sinks)
            attended.update(found)
            return out, {heads: each.saved.lse for heads, each in found.items()}

        out, lses = run() if planned.recomputation is None else planned.recomputation.attend(run)
        if not attended:  # the first run's results were kept
            attended = planned.read_again(layer, out, lses)
        blocks = [(each.block, each.saved) for each in attended.values()]
        ctx.save_for_backward(
            sinks, *(x for block, saved in blocks for x in (block.q, block.k, block.v, saved.out, saved.lse))
        )
        ctx.planned, ctx.scale, ctx.window, ctx.softcap = planned, scale, window, softcap
        ctx.ranges = tuple(attended)
        ctx.num_heads = [x.shape[1] for x in (q, k, v)]
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] - the decorator hides its parameters
        ctx: Any, *grad_outputs: Tensor
    ) -> tuple[Tensor | None, ...]:
        sinks, *saved = ctx.saved_tensors
        attended = {
            heads: Attended(
                block=Block(q=q, k=k, v=v, scale=ctx.scale, softcap=ctx.softcap), saved=Saved(out=out, lse=lse)
            )
            for heads, (q, k, v, out, lse) in zip(ctx.ranges, zip(*[iter(saved)] * 5, strict=True), strict=True)
        }
        grads = ctx.planned.backward(grad_outputs[0], attended, ctx.num_heads, ctx.window, sinks)
        return *grads, None, None, None, None


def _sink_gradient(sinks: Tensor | None, grad_out: Rows, attended: Mapping[HeadRange, Attended]) -> Tensor | None:
    """Return -exp(sink - lse) x (grad_out . out) of each head, summed over the rows of this rank that have it."""
    if sinks is None:
        return None
    total = torch.zeros_like(sinks)
    for heads, each in attended.items():
        out, lse, (grad,) = each.saved.out, each.saved.lse, grad_out[heads]
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
    """Attend within each sequence of a microbatch, causally, wherever its tokens are.

    q is (tokens, heads, head_dim), k and v (tokens, kv_heads, head_dim): this rank's tokens in the order of
    `MicrobatchProgram.segments`, then padding. `window`: a query sees itself and the window - 1 tokens before it.
    `sinks` (heads,): logits that take weight and give no value. `softcap`: a score s
    counts as softcap x tanh(s / softcap), which the kernel must be able to do. Returns (tokens, heads, head_dim).
    """
    planned.count_layer()
    return _Attention.apply(q, k, v, sinks, planned, scale, window, softcap)
