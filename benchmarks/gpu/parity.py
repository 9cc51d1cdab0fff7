"""Right on the device: a ring in bf16 at 32K tokens, and over 2^31 logits; kernels by length have tests in tests/gpu.

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
from lengthwise.core.errors import MemoryShortage
from lengthwise.core.plan import Microbatch, Piece, Plan
from lengthwise.engine.batch import random_batch
from lengthwise.engine.step import run_plan

TOLERANCES = {torch.bfloat16: 2e-2, torch.float32: 1e-4}
_RING_OVER_CALL, _RING_MORE = 2.0, 1e-3  # that a ring's error may be: so many times one call's, and a little more


def parity(sizes: Sizes, records: Records) -> None:
    """Write rows `ring parity` and `logits`.

    Raises:
        SystemExit: an error is over its tolerance.
    """
    passed = {"ring": _ring(sizes, records), "loss in chunks": _logits(sizes, records)}
    if wrong := [name for name, right in passed.items() if not right]:
        raise SystemExit(f"parity: over the tolerance: {', '.join(wrong)}")


def _attend(kernel: BlockKernel, rows: Sequence[Tensor], scale: float) -> list[Tensor]:
    q, k, v, grad = rows
    block = Block(q=q, k=k, v=v, scale=scale)
    out, lse = kernel.forward(block)
    return [out, *kernel.backward(grad, block, Saved(out=out, lse=lse))]


def _errors(got: Sequence[Tensor], wanted: Sequence[Tensor]) -> dict[str, float]:
    parts = zip(("out", "dq", "dk", "dv"), got, wanted, strict=True)
    return {f"{part}_error": relative_error(a.to(b.device), b) for part, a, b in parts}


def _ring(sizes: Sizes, records: Records) -> bool:
    """Hold a ring of threads on the device to one call of the same kernel, both against fp32."""
    device, degree, tokens = sizes.where, sizes.ring_degree, sizes.ring_tokens
    heads, kv_heads, head_dim = sizes.ring_heads
    random, scale = torch.Generator().manual_seed(0), head_dim**-0.5
    drawn = (torch.randn(tokens, number, head_dim, generator=random) for number in (heads, kv_heads, kv_heads, heads))
    rows = [each.to(device, torch.bfloat16) for each in drawn]
    kernel = choose_kernel(device, dtype=torch.bfloat16, head_dim=head_dim)
    microbatch = Microbatch(pieces=(Piece(ranks=tuple(range(degree)), sequences=(0,)),))
    plan = Plan(ranks=degree, layers=1, capacity=tokens + 1, tokens=(tokens,), microbatches=(microbatch,))
    exact = _attend(ReferenceKernel(), [each.float() for each in rows], scale)
    alone = _errors(_attend(kernel, rows, scale), exact)
    (found,) = attend_on_ranks(plan, [rows], kernel, scale=scale, device=device)
    over = _errors(found, exact)
    passed = max(alone.values()) <= TOLERANCES[torch.bfloat16] and all(
        over[name] <= _RING_OVER_CALL * alone[name] + _RING_MORE for name in alone
    )
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
