"""The bytes that the attention kernel of long sequences takes inside, which small passes never run."""

from __future__ import annotations

from math import inf

import torch

from lengthwise.attention import AttentionNeeds, Block, BlockKernel, Saved
from lengthwise.attention.cudnn import ByLengthKernel
from lengthwise.cost import LongKernelBytes
from lengthwise.engine.byte_watch import AllocatorWatch, LiveWatch
from lengthwise.offload import ActivationSaver


def measure_long_kernel(
    kernel: BlockKernel, needs: AttentionNeeds, device: torch.device, *, most_tokens: int
) -> LongKernelBytes:
    """Measure what one layer's attention over a long sequence takes beyond the kernel of short ones.

    Two sequences, the shortest that the long kernel takes and one of twice its tokens, give a line over the rows. No
    bytes where one kernel takes all lengths up to `most_tokens`.
    """
    if not isinstance(kernel, ByLengthKernel) or (kernel.alone_from or inf) > most_tokens:
        return LongKernelBytes()
    least, more = kernel.diagonal_tokens, list[int]()
    for tokens in (least, 2 * least):
        long, rest = (_peak_bytes(each, tokens, needs, device) for each in (kernel.long, kernel.rest))
        more.append(long - rest)
    a_row = max(0.0, (more[1] - more[0]) / least)
    return LongKernelBytes(least_rows=least, fixed=max(more) - 2 * least * a_row, a_row=a_row)


@torch.no_grad()
def _peak_bytes(kernel: BlockKernel, tokens: int, needs: AttentionNeeds, device: torch.device) -> int:
    """Return the most bytes that forward and backward of a causal block make, operands left out."""
    shapes = ((tokens, heads, needs.head_dim) for heads in (needs.heads, needs.kv_heads, needs.kv_heads))
    q, k, v = (torch.zeros(shape, dtype=needs.dtype, device=device) for shape in shapes)
    block, saver, asks = (
        Block(q=q, k=k, v=v, scale=1.0),
        ActivationSaver(None, stays=frozenset()),
        device.type == "cuda",
    )

    def run() -> None:
        out, lse = kernel.forward(block)
        kernel.backward(out, block, Saved(out=out, lse=lse))

    if asks:
        run()  # libraries allocate once, for each size
    with AllocatorWatch(device, saver) if asks else LiveWatch(q, k, v, saver=saver) as watch:
        run()
    return max(step.live for segment in watch.segments for step in segment)
