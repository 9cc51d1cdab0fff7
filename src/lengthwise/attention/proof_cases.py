"""Small calls of every kind that a plan may make of an attention kernel, with plain attention in fp64 (`proof`).

Out, lse and gradients are compared, gradients with out and lse of more keys than the block's, as in rings and with
sinks. Expected gradients are autograd's; operands lie inside larger tensors of NaN. Takes about 20 ms on a CPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lengthwise.attention.abilities import AttentionNeeds
from lengthwise.attention.cudnn import ByLengthKernel
from lengthwise.attention.kernels import Block, BlockKernel, BlockMask, Saved
from lengthwise.attention.packs import PackKernel, joined_pack, pack_documents
from lengthwise.attention.proof import Case, Proof, Results, prove

_TOKENS, _TOKENS_ON_CPU = 200, 72
_WINDOW = 24  # stands for the model's: a kernel takes any
_SOFTCAP = 0.7  # stands for the model's, too: scores here are about 1, so that a cap of 50 would hardly show
_RAGGED = (1, 37, 200, 5, 64)  # tokens of documents: shorter and longer than a tile of any kernel
_KEYS_OF = (64, 5, 37, 200, 1)  # tokens of the keys of such documents, where these are others
_ROWS_AT_ONCE = 512
_NAMES = ("out", "lse", "dq", "dk", "dv")


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """Queries and keys. distance: from the first key to the first query. documents: their tokens, side by side.

    keys_of: keys of each document, which all its queries see, if they are others.
    """

    name: str
    queries: int
    keys: int
    causal: bool = True
    window: int | None = None
    distance: int = 0
    documents: tuple[int, ...] | None = None
    padding: int = 0
    keys_of: tuple[int, ...] | None = None

    def seen(self, device: torch.device) -> Tensor:
        """Return the mask (queries, keys) of seen keys. Shares no code with the kernels."""
        gap = torch.arange(self.queries, device=device)[:, None] + self.distance
        gap = gap - torch.arange(self.keys, device=device)
        seen = (gap >= 0) if self.causal else torch.ones_like(gap, dtype=torch.bool)
        if self.window is not None:
            seen &= gap < self.window
        if self.documents is not None:
            of_queries, of_keys = (
                torch.arange(len(each), device=device).repeat_interleave(torch.tensor(each, device=device))
                for each in (self.documents, self.keys_of or self.documents)
            )
            seen &= of_queries[:, None] == of_keys
        return seen


def prove_kernel(kernel: BlockKernel, needs: AttentionNeeds, device: torch.device) -> Proof:
    """Prove a kernel for a model on a device. May run out of memory."""
    heads = f"heads of {needs.head_dim}"
    cases = (
        Case(name=f"{call.name}, {heads}", run=partial(_compared, each, call, needs, device))
        for each, call in _calls(kernel, needs, device)
    )
    return prove(cases, needs.dtype, device)


def _calls(kernel: BlockKernel, needs: AttentionNeeds, device: torch.device) -> Iterator[tuple[BlockKernel, Call]]:
    tokens = _TOKENS if device.type == "cuda" else _TOKENS_ON_CPU
    yield kernel, _block(tokens, tokens)
    yield kernel, _block(tokens // 2, tokens - 37)
    yield kernel, _block(5, 9)
    if needs.windowed:
        keys, more, window = tokens // 2, _WINDOW - 1, f"of a window of {_WINDOW} tokens"
        yield kernel, Call(name=f"tile {window}", queries=keys - more, keys=keys, window=_WINDOW, distance=more)
        edge = f"edge {window}"
        yield kernel, Call(name=edge, queries=20, keys=21, causal=False, window=_WINDOW, distance=_WINDOW)
    if isinstance(kernel, PackKernel):
        for window in (None, _WINDOW) if needs.windowed else (None,):
            name = f"documents of 1 to {max(_RAGGED)} tokens" + (f", window of {window}" if window else "")
            yield kernel, _pack(name, _RAGGED, window=window)
        name, queries, keys = "documents of other keys", sum(_RAGGED), sum(_KEYS_OF)
        yield kernel, Call(name=name, queries=queries, keys=keys, causal=False, documents=_RAGGED, keys_of=_KEYS_OF)
    if isinstance(kernel, ByLengthKernel) and not torch.are_deterministic_algorithms_enabled():
        for queries, keys in ((_TOKENS, _TOKENS), (_TOKENS // 2, _TOKENS - 37)):
            yield kernel.long, _block(queries, keys, f"{kernel.long.name}, ")
        if device.type == "cuda" or kernel.diagonal_tokens < _TOKENS:  # a long one takes little time
            tokens, padding = kernel.diagonal_tokens + 41, 87
            name = f"{kernel.name}, document of {tokens} tokens after short ones"
            yield kernel, _pack(name, (37, 5, tokens, padding), padding=padding)


def _block(queries: int, keys: int, of: str = "") -> Call:
    causal = queries == keys
    name = f"causal block of {keys} tokens" if causal else f"full block of {queries} queries and {keys} keys"
    return Call(name=of + name, queries=queries, keys=keys, causal=causal)


def _pack(name: str, documents: tuple[int, ...], window: int | None = None, padding: int = 0) -> Call:
    tokens = sum(documents)
    return Call(name=name, queries=tokens, keys=tokens, documents=documents, window=window, padding=padding)


def _compared(kernel: BlockKernel, call: Call, needs: AttentionNeeds, device: torch.device) -> tuple[Results, Results]:
    q, k, v, grad_out, sinks = _operands(call, needs, device)
    mask = None
    if call.distance:
        size = {"queries": call.queries, "keys": call.keys, "distance": call.distance}
        mask = BlockMask(**size, causal=call.causal, window=call.window)
    softcap = _SOFTCAP if needs.capped else None
    block = Block(q=q, k=k, v=v, scale=needs.head_dim**-0.5, causal=call.causal, mask=mask, softcap=softcap)
    expected, saved = _expected(call, block, grad_out, sinks)
    found = _found(kernel, block, grad_out, saved, call)
    for x in (*found, *expected):  # rows of padding have any finite values
        x.narrow(int(x.dim() == 2), x.shape[int(x.dim() == 2)] - call.padding, call.padding).mul_(0)
    return dict(zip(_NAMES, found, strict=True)), dict(zip(_NAMES, expected, strict=True))


@torch.no_grad()
def _found(kernel: BlockKernel, block: Block, grad_out: Tensor, saved: Saved, call: Call) -> tuple[Tensor, ...]:
    if call.documents is None:
        return *kernel.forward(block), *kernel.backward(grad_out, block, saved)
    assert isinstance(kernel, PackKernel), f"{kernel.name} takes no packs"
    if call.keys_of is not None:
        pack = joined_pack(call.documents, call.keys_of, block.q.device)
        return *kernel.forward_pack(block, pack), *kernel.backward_pack(grad_out, block, saved, pack)
    lengths, where = call.documents[: len(call.documents) - (call.padding > 0)], block.q.device
    how = {"window": call.window, "padding": call.padding, "alone_from": kernel.alone_from}
    parts = []
    for pack in sorted(pack_documents(lengths, device=where, **how), key=lambda each: each.rows.start):
        rows, its = pack.rows, block.at(pack.rows)
        grads = kernel.backward_pack(grad_out[rows], its, saved.at(rows), pack)
        parts.append((*kernel.forward_pack(its, pack), *grads))
    return tuple(torch.cat(each, dim=int(place == 1)) for place, each in enumerate(zip(*parts, strict=True)))


def _operands(call: Call, needs: AttentionNeeds, device: torch.device) -> tuple[Tensor, ...]:
    """Return q, k, v, the gradient of out, and logits (heads,) of keys elsewhere; the same on all ranks."""
    random = torch.Generator().manual_seed(call.queries + call.keys)
    kv_heads = 1 if call.queries > _ROWS_AT_ONCE else min(2, needs.kv_heads)
    heads = kv_heads * (needs.heads // needs.kv_heads)
    made = []
    for tokens, width in ((call.queries, heads), (call.keys, kv_heads), (call.keys, kv_heads), (call.queries, heads)):
        values = torch.randn(tokens, width, needs.head_dim, generator=random, device="cpu", dtype=torch.float32)
        made.append(_amid_nan(values.to(device, needs.dtype)))
    made[3][call.queries - call.padding :] = 0  # padding has no gradient
    return *made, torch.randn(heads, generator=random, device="cpu").to(device, torch.float64) + 4


def _amid_nan(x: Tensor, dim: int = 0) -> Tensor:
    """Copy a tensor to the middle of a larger one along `dim`, NaN elsewhere."""
    shape = list(x.shape)
    shape[dim] += 16
    room = x.new_full(shape, float("nan"))
    middle = room.narrow(dim, 8, x.shape[dim])
    middle.copy_(x)
    return middle


def _expected(call: Call, block: Block, grad_out: Tensor, sinks: Tensor) -> tuple[tuple[Tensor, ...], Saved]:
    """Return (out, lse, dq, dk, dv) in fp64, and (out, lse) with one more key of logit `sinks` and value 0."""
    q, k, v = wide = [x.detach().double().requires_grad_() for x in (block.q, block.k, block.v)]
    seen, ratio = call.seen(q.device), q.shape[1] // k.shape[1]

    def attend(q: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
        scores = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(ratio, dim=1)) * block.scale
        if block.softcap is not None:
            scores = block.softcap * torch.tanh(scores / block.softcap)
        scores = scores.masked_fill(~seen, float("-inf"))
        return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v.repeat_interleave(ratio, dim=1)), scores.logsumexp(-1)

    parts = zip(q.split(_ROWS_AT_ONCE), seen.split(_ROWS_AT_ONCE), strict=True)
    outs, lses = zip(
        *(checkpoint(attend, *part, use_reentrant=False, preserve_rng_state=False) for part in parts), strict=True
    )
    out, lse = torch.cat(outs), torch.cat(lses, dim=1)
    total_lse = torch.logaddexp(lse, sinks[:, None])
    total = out * (lse - total_lse).exp().t()[..., None]
    gradients = torch.autograd.grad(total, wide, grad_out.double())
    saved_lse = total_lse.detach().to(torch.promote_types(block.q.dtype, torch.float32))
    saved = Saved(out=_amid_nan(total.detach().to(block.q.dtype)), lse=_amid_nan(saved_lse, dim=1))
    return (out.detach(), lse.detach(), *gradients), saved
