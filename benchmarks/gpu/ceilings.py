"""What the device itself does: copies, matrix products, and attention kernels by length; all tables are read by these.

Attention is torch's own `scaled_dot_product_attention`, causal, forward and backward, by each backend that takes it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from gpu.clock import seconds_of
from gpu.records import Records, middle
from gpu.sizes import Sizes

BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}


def ceilings(sizes: Sizes, records: Records) -> None:
    """Write rows `copy`, `matrix product` and `attention`."""
    _copy(sizes, records)
    for size in sizes.product_sizes:
        _product(sizes, records, size)
    for tokens in sizes.attention_tokens:
        for name, backend in BACKENDS.items():
            _attention(sizes, records, tokens, name, backend)


def _copy(sizes: Sizes, records: Records) -> None:
    device = sizes.where
    source = torch.zeros(sizes.copy_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    took = middle(seconds_of(lambda: target.copy_(source), device, repeats=sizes.repeats))
    records.add("copy", moved_bytes_per_second=2 * sizes.copy_bytes / took["seconds"], **took)


def _product(sizes: Sizes, records: Records, size: int) -> None:
    device = sizes.where
    a, b = (torch.randn(size, size, dtype=sizes.dtype, device=device) for _ in range(2))
    took = middle(seconds_of(lambda: a @ b, device, repeats=sizes.repeats, warm_up=2))
    records.add("matrix product", size=size, flops_per_second=2 * size**3 / took["seconds"], **took)


def _attention(sizes: Sizes, records: Records, tokens: int, name: str, backend: SDPBackend) -> None:
    device, heads, dim = sizes.where, sizes.attention_heads, 128
    q, k, v = (
        torch.randn(1, heads, tokens, dim, dtype=sizes.dtype, device=device, requires_grad=True) for _ in range(3)
    )

    def run() -> None:
        with sdpa_kernel(backend):
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out.backward(torch.ones_like(out))

    flops = 0.5 * 3.5 * 4 * tokens**2 * dim * heads
    try:
        took = middle(seconds_of(run, device, repeats=sizes.repeats))
    except RuntimeError as error:  # this torch or this device has no such kernel
        records.add("attention", backend=name, tokens=tokens, refused=str(error).splitlines()[0][:200])
        return
    records.add("attention", backend=name, tokens=tokens, heads=heads, flops_per_second=flops / took["seconds"], **took)
