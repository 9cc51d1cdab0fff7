"""Costs from FLOPs and bytes, checked against hand counts and published ratios."""

import pytest

from lengthwise.cost import analytic_cost, named_hardware, named_shape

H100 = named_hardware("h100")
LLAMA_7B = named_shape("llama-7b")


def test_analytic_cost_of_attention_passes_linear_work_at_about_30k_tokens() -> None:
    """With FlashAttention-2; with a quicker kernel later, in the ratio of their speeds."""
    flash2, cudnn = (analytic_cost(LLAMA_7B, H100.with_kernel(name)) for name in ("flash2", "cudnn"))
    assert flash2.linear_seconds / flash2.quadratic_seconds == pytest.approx(29_900, rel=0.02)
    assert cudnn.quadratic_seconds / flash2.quadratic_seconds == pytest.approx(0.329 / 0.528)


def test_analytic_cost_counts_flops_and_bytes() -> None:
    cost = analytic_cost(LLAMA_7B, H100)
    matrices = 32 * (4096 * 128 * (2 * 32 + 2 * 8) + 3 * 4096 * 11008) + 4096 * 32000
    assert cost.linear_seconds == pytest.approx(6 * matrices / (989e12 * 0.42))
    assert cost.quadratic_seconds == pytest.approx(7 * 32 * 32 * 128 / (989e12 * 0.528))
    forward = 2 * 2 * 8 * 128 * 32  # K and V in bf16
    assert cost.ring_seconds == pytest.approx(4 * forward / 50e9)  # backward is 3 x: K, V again and fp32 dK, dV
