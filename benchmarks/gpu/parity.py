"""Right on the device: kernels by dtype, heads and length, rings in bf16 at 32K and more, over 2^31 logits.

Errors are relative, L2, against plain matrix products in fp32 on the same rounded inputs. A ring is held to one call of
the same kernel: rounding of partial results may add a little, a wrong block adds a lot. The loss in chunks is held to
the whole one, whose logits need 64-bit indices.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from testing.attention_ranks import attend_on_ranks
from testing.oracles import relative_error
from torch import Tensor

from gpu.loops import OurLoop
from gpu.records import Records
from gpu.sizes import Sizes
from lengthwise.attention import Block, BlockKernel, ReferenceKernel, Saved, choose_kernel
from lengthwise.core.errors import ConfigError, MemoryShortage
from lengthwise.core.plan import Microbatch, Piece, Plan
from lengthwise.engine.batch import random_batch
from lengthwise.engine.step import run_plan

KERNELS = ("auto", "flash2", "flash3", "flash4", "cudnn", "efficient", "reference")
PARTS = ("out", "dq", "dk", "dv")
TOLERANCES = {torch.bfloat16: 2e-2, torch.float32: 1e-4}
_RING_OVER_CALL, _RING_MORE = 2.0, 1e-3  # that a ring's error may be: so many times one call's, and a little more
_MOST_OF_FP32 = 16 * 1024  # tokens up to which fp32 is tried, which takes ten times as long


def parity(sizes: Sizes, records: Records) -> None:
    """Write rows `kernel parity`, `ring parity` and `logits`.

    Raises:
        SystemExit: an error is over its tolerance.
    """
    wrong = []
    for dtype in (torch.bfloat16, torch.float32):
        for name in KERNELS:
            for heads, kv_heads, head_dim in sizes.parity_heads:
                kernel = _kernel(sizes, records, name, dtype, head_dim)
                if kernel is None:
                    continue
                for tokens in sizes.parity_tokens:
                    if dtype == torch.bfloat16 or tokens <= _MOST_OF_FP32:
                        shape = (tokens, heads, kv_heads, head_dim)
                        if not _one_call(sizes, records, name, kernel, dtype, shape):
                            wrong.append(f"{name} {dtype} {shape}")
    wrong += [
        f"ring of {ring[0]} over {ring[1]} tokens" for ring in sizes.parity_rings if not _ring(sizes, records, *ring)
    ]
    wrong += [] if _logits(sizes, records) else ["loss in chunks"]
    if wrong:
        raise SystemExit(f"parity: over the tolerance: {', '.join(wrong)}")


def _kernel(sizes: Sizes, records: Records, name: str, dtype: torch.dtype, head_dim: int) -> BlockKernel | None:
    device = sizes.where
    try:
        return choose_kernel(device, dtype=dtype, head_dim=head_dim, implementation=name)
    except ConfigError as error:
        values = {"dtype": str(dtype).removeprefix("torch."), "head_dim": head_dim}
        records.add("kernel parity", kernel=name, **values, refused=f"{error.expected}; got {error.got}"[:200])
        return None


def _draw(sizes: Sizes, dtype: torch.dtype, shape: tuple[int, int, int, int], seed: int = 0) -> list[Tensor]:
    """Return (q, k, v, gradient of the output) on the device, rounded to `dtype`."""
    tokens, heads, kv_heads, head_dim = shape
    random = torch.Generator().manual_seed(seed)
    drawn = (torch.randn(tokens, number, head_dim, generator=random) for number in (heads, kv_heads, kv_heads, heads))
    return [each.to(sizes.device, dtype) for each in drawn]


def _attend(kernel: BlockKernel, rows: Sequence[Tensor], scale: float) -> list[Tensor]:
    q, k, v, grad = rows
    block = Block(q=q, k=k, v=v, scale=scale)
    out, lse = kernel.forward(block)
    return [out, *kernel.backward(grad, block, Saved(out=out, lse=lse))]


def _errors(got: Sequence[Tensor], wanted: Sequence[Tensor]) -> dict[str, float]:
    """Return the relative error of each part; values of a token or two are compared with a floor."""
    return {
        f"{part}_error": relative_error(a.to(b.device), b, floor=0.05 * b.numel() ** 0.5)
        for part, a, b in zip(PARTS, got, wanted, strict=True)
    }


def _exact(rows: Sequence[Tensor], scale: float) -> list[Tensor]:
    return _attend(ReferenceKernel(), [each.float() for each in rows], scale)


def _one_call(
    sizes: Sizes,
    records: Records,
    name: str,
    kernel: BlockKernel,
    dtype: torch.dtype,
    shape: tuple[int, int, int, int],
) -> bool:
    """Compare one call with fp32; return whether it is within the tolerance."""
    tokens, heads, kv_heads, head_dim = shape
    rows, scale = _draw(sizes, dtype, shape), head_dim**-0.5
    found: dict[str, Any] = {"passed": False}
    try:
        errors = _errors(_attend(kernel, rows, scale), _exact(rows, scale))
        found = {"passed": max(errors.values()) <= TOLERANCES[dtype], **errors}
    except RuntimeError as error:  # the kernel's own: the others are tried all the same
        found["refused"] = str(error).splitlines()[0][:200]
    records.add(
        "kernel parity",
        kernel=name,
        is_named=kernel.name,
        dtype=str(dtype).removeprefix("torch."),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        tokens=tokens,
        **found,
    )
    return found["passed"]


def _ring(sizes: Sizes, records: Records, degree: int, tokens: int) -> bool:
    """Hold a ring of threads on the device to one call of the same kernel, both against fp32."""
    device, head_dim = sizes.where, sizes.parity_heads[0][2]
    shape = (tokens, *sizes.parity_heads[0])
    rows, scale = _draw(sizes, torch.bfloat16, shape), head_dim**-0.5
    kernel = choose_kernel(device, dtype=torch.bfloat16, head_dim=head_dim)
    microbatch = Microbatch(pieces=(Piece(ranks=tuple(range(degree)), sequences=(0,)),))
    plan = Plan(ranks=degree, layers=1, capacity=tokens + 1, tokens=(tokens,), microbatches=(microbatch,))
    exact = _exact(rows, scale)
    alone = _errors(_attend(kernel, rows, scale), exact)
    (found,) = attend_on_ranks(plan, [rows], kernel, scale=scale, device=device)
    over = _errors(found, exact)
    passed = all(over[name] <= _RING_OVER_CALL * alone[name] + _RING_MORE for name in alone)
    of_ring = {f"ring_{name}": error for name, error in over.items()}
    records.add("ring parity", degree=degree, tokens=tokens, kernel=kernel.name, passed=passed, **alone, **of_ring)
    return passed


def _logits(sizes: Sizes, records: Records) -> bool:
    """Compare loss and gradients of whole logits and of chunks; of so many tokens that their number passes 2^31."""
    device, tokens = sizes.where, sizes.logits_tokens
    loop = OurLoop(sizes.logits_model, device, sizes.dtype)
    config: Any = loop.model.config
    piece, layers = Piece(ranks=(0,), sequences=(0,)), config.num_hidden_layers
    plan = Plan(ranks=1, layers=layers, capacity=tokens, tokens=(tokens,), microbatches=(Microbatch(pieces=(piece,)),))
    batch = random_batch((tokens,), vocab=config.vocab_size)
    found: list[tuple[float, Tensor]] = []
    for at_once in (sizes.logits_at_once, None):
        try:
            ran = run_plan(loop.model, plan, batch, loop.transport, loop.kernel, name="logits", logits_at_once=at_once)
        except MemoryShortage as error:
            records.add("logits", logits_at_once=at_once, refused=error.got[:200])
            return False
        found.append((ran.loss_sum, torch.cat([each.gradient for each in loop.parameters.shards()]).clone()))
        loop.parameters.clear_gradients()
    (chunked, in_chunks), (whole, whole_gradient) = found
    loss_error, gradient_error = chunked / whole - 1, relative_error(in_chunks, whole_gradient)
    passed = abs(loss_error) <= 1e-4 and gradient_error <= TOLERANCES[sizes.dtype]
    records.add(
        "logits",
        tokens=tokens,
        logits=tokens * config.vocab_size,
        loss=whole,
        passed=passed,
        loss_error=loss_error,
        gradient_error=gradient_error,
    )
    return passed
