"""Compare an attention kernel with plain attention in fp64, on the device where a run will use it.

A wrong call may give finite numbers and a worse model, without an error. The kernel attends to small blocks of every
kind: out, lse and gradients are compared, with out and lse of more keys than the block's, as in rings and with sinks.
Expected gradients are autograd's; operands lie inside larger tensors of NaN. Takes about 20 ms on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise

import torch
from torch import Tensor

from lengthwise.attention.abilities import AttentionNeeds
from lengthwise.attention.cudnn import ByLengthKernel
from lengthwise.attention.kernels import Block, BlockKernel, BlockMask, Saved
from lengthwise.attention.packs import PackKernel, pack_documents

_TOKENS, _TOKENS_ON_CPU = 200, 72
_WINDOW = 24  # stands for the model's: a kernel takes any
_SOFTCAP = 0.7  # stands for the model's, too: scores here are about 1, so that a cap of 50 would hardly show
_RAGGED = (1, 37, 200, 5, 64)  # tokens of documents: shorter and longer than a tile of any kernel
_ROWS_AT_ONCE = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class Tolerance:
    """Allowed differences, relative except for `lse`.

    distance: norm of the difference. size: difference of the projection on the expected tensor, which noise hardly
    changes.
    """

    distance: float
    size: float
    lse: float


_HALF = Tolerance(distance=2e-2, size=4e-3, lse=5e-3)
TOLERANCES = {
    torch.float64: Tolerance(distance=1e-10, size=1e-10, lse=1e-10),
    torch.float32: Tolerance(distance=1e-4, size=1e-4, lse=1e-4),
    torch.bfloat16: _HALF,
    torch.float16: _HALF,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A call of a kernel: one block of `keys`, or `documents`, given by their tokens, side by side."""

    name: str
    queries: int
    keys: int
    causal: bool = True
    mask: BlockMask | None = None
    documents: tuple[int, ...] | None = None
    window: int | None = None
    padding: int = 0
    by: Callable[[BlockKernel], BlockKernel] = field(default=lambda kernel: kernel)

    @property
    def tokens(self) -> int:
        """Number of queries without padding."""
        return self.queries - self.padding


def fault_of(kernel: BlockKernel, needs: AttentionNeeds, device: torch.device) -> str | None:
    """Describe the kernel's errors on `device`; return None without any. May run out of memory."""
    for case in cases_of(kernel, needs, device):
        try:
            # The caller's torch modes are for the model: one turns fp32 to fp64, others count or record.
            with (
                torch._C.DisableTorchFunction(),
                torch.inference_mode(False),
                torch.autocast(device.type, enabled=False),
            ):
                wrong = _compared(kernel, case, needs, device)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # noqa: BLE001 - after any error the kernel cannot be used
            wrong = [f"{type(error).__name__}: {(str(error).splitlines() or ['no message'])[0]}"]
        if wrong:
            return f"{case.name}, {needs.bits}, heads of {needs.head_dim}: {'; '.join(wrong)}"
    return None


def cases_of(kernel: BlockKernel, needs: AttentionNeeds, device: torch.device) -> Iterator[Case]:
    """Yield small calls of every kind that a plan may make of this kernel."""
    tokens = _TOKENS if device.type == "cuda" else _TOKENS_ON_CPU
    yield _causal(tokens)
    yield _full(tokens // 2, tokens - 37)
    yield _full(5, 9)
    if needs.windowed:
        keys, more = tokens // 2, _WINDOW - 1
        tile = BlockMask(queries=keys - more, keys=keys, distance=more, causal=True, window=_WINDOW)
        yield Case(name=f"tile of a window of {_WINDOW} tokens", queries=keys - more, keys=keys, mask=tile)
        edge = BlockMask(queries=20, keys=21, distance=_WINDOW, causal=False, window=_WINDOW)
        yield Case(name=f"edge of a window of {_WINDOW} tokens", queries=20, keys=21, causal=False, mask=edge)
    if isinstance(kernel, PackKernel):
        tokens, longest = sum(_RAGGED), max(_RAGGED)
        for window in (None, _WINDOW) if needs.windowed else (None,):
            name = f"documents of 1 to {longest} tokens" + (f", window of {window}" if window else "")
            yield Case(name=name, queries=tokens, keys=tokens, documents=_RAGGED, window=window)
    if isinstance(kernel, ByLengthKernel) and not torch.are_deterministic_algorithms_enabled():
        yield from _long_cases(kernel, device)


def _causal(tokens: int) -> Case:
    return Case(name=f"causal block of {tokens} tokens", queries=tokens, keys=tokens)


def _full(queries: int, keys: int) -> Case:
    return Case(name=f"full block of {queries} queries and {keys} keys", queries=queries, keys=keys, causal=False)


def _long_cases(kernel: ByLengthKernel, device: torch.device) -> Iterator[Case]:
    """Yield small blocks for the kernel of long ones, and a long one if that takes little time."""

    def of_long(found: BlockKernel) -> BlockKernel:
        assert isinstance(found, ByLengthKernel), f"of {kernel.name}"
        return found.long

    for case in (_causal(_TOKENS), _full(_TOKENS // 2, _TOKENS - 37)):
        yield replace(case, name=f"{kernel.long.name}, {case.name}", by=of_long)
    if device.type == "cuda" or kernel.diagonal_tokens < _TOKENS:
        tokens, padding = kernel.diagonal_tokens + 41, 87
        documents = (37, 5, tokens, padding)
        name = f"{kernel.name}, document of {tokens} tokens after short ones"
        yield Case(name=name, queries=sum(documents), keys=sum(documents), documents=documents, padding=padding)


def _compared(kernel: BlockKernel, case: Case, needs: AttentionNeeds, device: torch.device) -> list[str]:
    q, k, v, grad_out, sinks = _operands(case, needs, device)
    softcap = _SOFTCAP if needs.capped else None
    block = Block(q=q, k=k, v=v, scale=needs.head_dim**-0.5, causal=case.causal, mask=case.mask, softcap=softcap)
    expected, saved = _expected(case, block, grad_out, sinks)
    with torch.no_grad():
        found = _found(case.by(kernel), block, grad_out, saved, case)
    kept, tokens = tolerance_for(needs.dtype), case.tokens
    wrong = []
    for name, one, wanted in zip(("out", "lse", "dq", "dk", "dv"), found, expected, strict=True):
        if tuple(one.shape) != tuple(wanted.shape):
            wrong.append(f"{name} has the shape {tuple(one.shape)}, not {tuple(wanted.shape)}")
            continue
        if not one.isfinite().all():
            wrong.append(f"{name} is not finite")
            continue
        one, wanted = (x[:, :tokens] if name == "lse" else x[:tokens] for x in (one.double(), wanted))
        wrong += differences(name, one, wanted, kept)
    return wrong


def differences(name: str, found: Tensor, wanted: Tensor, kept: Tolerance) -> list[str]:
    """Describe a tensor's difference, in fp64, from the expected one, if it is more than `kept`."""
    if name == "lse":
        off = float((found - wanted).abs().max())
        return [] if off <= kept.lse else [f"lse is off by {off:.2g}, but {kept.lse:g} is allowed"]
    norm = wanted.norm()
    distance = float((found - wanted).norm() / norm)
    if distance > kept.distance:
        return [f"{name} is off by {distance:.2g} of its norm, but {kept.distance:g} is allowed"]
    size, allowed = float((found * wanted).sum() / norm**2), kept.size + 8 * distance / wanted.numel() ** 0.5
    if abs(size - 1) > allowed:
        return [f"{name} is {size:.4f} times the expected one, but 1 +- {allowed:.2g} is allowed"]
    return []


def tolerance_for(dtype: torch.dtype) -> Tolerance:
    """Return the tolerance of a dtype; for fp32 it is bf16's if the process allows TF32 in matrix products."""
    short = dtype == torch.float32 and torch.get_float32_matmul_precision() != "highest"
    return _HALF if short else TOLERANCES[dtype]


def _found(kernel: BlockKernel, block: Block, grad_out: Tensor, saved: Saved, case: Case) -> tuple[Tensor, ...]:
    if case.documents is None:
        return *kernel.forward(block), *kernel.backward(grad_out, block, saved)
    assert isinstance(kernel, PackKernel), f"{kernel.name} takes no packs"
    lengths, where = case.documents[: len(case.documents) - (case.padding > 0)], block.q.device
    how = {"window": case.window, "padding": case.padding, "alone_from": kernel.alone_from}
    parts = []
    for pack in sorted(pack_documents(lengths, device=where, **how), key=lambda each: each.rows.start):
        rows, its = pack.rows, block.at(pack.rows)
        grads = kernel.backward_pack(grad_out[rows], its, saved.at(rows), pack)
        parts.append((*kernel.forward_pack(its, pack), *grads))
    return tuple(torch.cat(each, dim=int(place == 1)) for place, each in enumerate(zip(*parts, strict=True)))


def _operands(case: Case, needs: AttentionNeeds, device: torch.device) -> tuple[Tensor, ...]:
    """Draw q, k, v, the gradient of out, and logits (heads,) of keys elsewhere, the same on all ranks."""
    random = torch.Generator().manual_seed(case.queries + case.keys)
    kv_heads = 1 if case.queries > _ROWS_AT_ONCE else min(2, needs.kv_heads)
    heads = kv_heads * (needs.heads // needs.kv_heads)
    made = []
    for tokens, width in ((case.queries, heads), (case.keys, kv_heads), (case.keys, kv_heads), (case.queries, heads)):
        values = torch.randn(tokens, width, needs.head_dim, generator=random, device="cpu", dtype=torch.float32)
        made.append(_amid_nan(values.to(device, needs.dtype)))
    made[3][case.tokens :] = 0  # padding has no gradient
    return *made, torch.randn(heads, generator=random, device="cpu").to(device, torch.float64) + 4


def _amid_nan(x: Tensor, dim: int = 0) -> Tensor:
    """Copy a tensor to the middle of a larger one along `dim`, NaN elsewhere."""
    shape = list(x.shape)
    shape[dim] += 16
    room = x.new_full(shape, float("nan"))
    middle = room.narrow(dim, 8, x.shape[dim])
    middle.copy_(x)
    return middle


def _seen(case: Case, device: torch.device) -> Tensor | None:
    """Return the mask (queries, keys) of seen keys, or None for all. Shares no code with the kernels."""
    query, key = torch.arange(case.queries, device=device)[:, None], torch.arange(case.keys, device=device)
    if case.documents is not None:
        seen = torch.zeros(case.queries, case.keys, dtype=torch.bool, device=device)
        starts = [sum(case.documents[:number]) for number in range(len(case.documents) + 1)]
        for start, stop in pairwise(starts):
            seen[start:stop, start:stop] = True
        seen &= key <= query
        return seen if case.window is None else seen & (query - key < case.window)
    if case.mask is not None:
        first = case.keys - case.queries if case.causal else _WINDOW  # the first query's place among the keys
        seen = query + first - key < _WINDOW
        return seen & (key <= query + first) if case.causal else seen
    return key <= query if case.causal else None


def _expected(case: Case, block: Block, grad_out: Tensor, sinks: Tensor) -> tuple[tuple[Tensor, ...], Saved]:
    """Return (out, lse, dq, dk, dv) in fp64, and (out, lse) with one more key of logit `sinks` and value 0."""
    q, k, v = block.q, block.k, block.v
    seen, ratio = _seen(case, q.device), q.shape[1] // k.shape[1]
    outs, lses, totals, total_lses = [], [], [], []
    gradients: list[Tensor | None] = [None] * 3
    with torch.enable_grad():
        wide = [x.detach().double().requires_grad_() for x in (q, k, v)]
        keys, values = (x.repeat_interleave(ratio, dim=1) for x in wide[1:])
        for start in range(0, case.queries, _ROWS_AT_ONCE):
            rows = slice(start, start + _ROWS_AT_ONCE)
            scores = torch.einsum("qhd,khd->hqk", wide[0][rows], keys) * block.scale
            if block.softcap is not None:
                scores = block.softcap * torch.tanh(scores / block.softcap)
            if seen is not None:
                scores = scores.masked_fill(~seen[rows], float("-inf"))
            elsewhere = sinks[:, None, None].expand(-1, scores.shape[1], 1)
            weights = torch.cat((scores, elsewhere), dim=-1).softmax(-1)[..., :-1]
            total = torch.einsum("hqk,khd->qhd", weights, values)
            parts = torch.autograd.grad(total, wide, grad_out[rows].double(), retain_graph=True)
            gradients = [part if one is None else one + part for one, part in zip(gradients, parts, strict=True)]
            own = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values)
            lse = scores.logsumexp(-1)
            outs.append(own.detach())
            lses.append(lse.detach())
            totals.append(total.detach())
            total_lses.append(torch.logaddexp(lse, sinks[:, None]).detach())
    saved_lse = torch.cat(total_lses, dim=1).to(torch.promote_types(q.dtype, torch.float32))
    saved = Saved(out=_amid_nan(torch.cat(totals).to(q.dtype)), lse=_amid_nan(saved_lse, dim=1))
    return (torch.cat(outs), torch.cat(lses, dim=1), *[x for x in gradients if x is not None]), saved
