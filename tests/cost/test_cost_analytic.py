"""Costs from FLOPs and bytes, checked against hand counts and published ratios."""

from dataclasses import replace

import pytest

from lengthwise.cost import HARDWARE_NAMES, SHAPE_NAMES, analytic_cost, named_hardware, named_shape

H100 = named_hardware("h100")
LLAMA_7B = named_shape("llama-7b")


def test_analytic_cost_of_7b_ring_token_is_about_an_eighth_of_a_linear_token() -> None:
    cost = analytic_cost(LLAMA_7B, H100)
    assert H100.link_bytes_per_second == 50e9
    assert cost.ring_seconds / cost.linear_seconds == pytest.approx(0.12, abs=0.01)


def test_analytic_cost_of_7b_with_full_heads_is_about_half() -> None:
    cost = analytic_cost(replace(LLAMA_7B, kv_heads=32), H100)
    assert cost.ring_seconds / cost.linear_seconds == pytest.approx(0.5, abs=0.07)


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


def test_analytic_cost_names_what_it_was_made_from() -> None:
    assert analytic_cost(LLAMA_7B, H100).version == "analytic/1 llama-7b h100"


@pytest.mark.parametrize("shape", SHAPE_NAMES)
@pytest.mark.parametrize("hardware", HARDWARE_NAMES)
def test_analytic_cost_exists_for_every_shipped_pair(shape: str, hardware: str) -> None:
    cost = analytic_cost(named_shape(shape), named_hardware(hardware))
    assert cost.quadratic_seconds > 0
    assert cost.linear_seconds > 0
    assert cost.ring_seconds > 0
