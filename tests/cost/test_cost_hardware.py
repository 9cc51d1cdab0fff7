"""Hardware descriptions: complete, sourced, checked."""

from dataclasses import replace

import pytest

from lengthwise.core.errors import ConfigError
from lengthwise.cost import HARDWARE_NAMES, hardware_of_gpu, named_hardware


@pytest.mark.parametrize("name", HARDWARE_NAMES)
def test_named_hardware_states_its_source(name: str) -> None:
    hardware = named_hardware(name)
    assert hardware.name == name
    assert len(hardware.source) > 40


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("peak_flops_per_second", 0.0),
        ("linear_efficiency", 1.5),
        ("attention_efficiency", 0.0),
        ("link_bytes_per_second", float("inf")),
        ("link_bytes_per_second", 10**400),
        ("node_hop_latency_seconds", 1e308),
        ("device_bytes", 1e-320),
        ("hop_latency_seconds", -1.0),
        ("compute_dtype_bytes", True),
    ],
)
def test_hardware_refuses_impossible_values(field: str, value: float) -> None:
    with pytest.raises(ConfigError, match=field):
        replace(named_hardware("h100"), **{field: value})


@pytest.mark.parametrize(("kernel", "reached"), [("flash2", 325.6), ("cudnn", 522.4), ("flash3", 575.7)])
def test_attention_kernels_reach_what_their_sources_say(kernel: str, reached: float) -> None:
    """TFLOP/s of forward and backward at 16K tokens, from those of both passes in the figures of FlashAttention-3."""
    hardware = named_hardware("h100").with_kernel(kernel)
    assert hardware.kernel == kernel
    assert hardware.attention_efficiency * hardware.peak_flops_per_second / 1e12 == pytest.approx(reached, rel=0.002)
    passes = {"flash2": (335, 322), "cudnn": (539, 516), "flash3": (616, 561)}[kernel]
    assert 3.5 / (1 / passes[0] + 2.5 / passes[1]) == pytest.approx(reached, rel=0.001)


def test_an_a100_reaches_what_flash_attention_2_reports() -> None:
    hardware = named_hardware("a100")
    both_passes = 3.5 / (1 / 230 + 2.5 / (0.63 * 312))
    assert hardware.kernel == "flash2"
    assert hardware.attention_efficiency * 312 == pytest.approx(both_passes, rel=0.002)
    assert hardware_of_gpu("NVIDIA A100-SXM4-80GB") == ("a100", None)


def test_the_default_kernel_runs_packs_as_flash2_and_long_blocks_faster() -> None:
    """As our engine does on Hopper without FlashAttention-3: cuDNN for long blocks alone."""
    hardware = named_hardware("h100")
    flash2, cudnn = (hardware.with_kernel(name) for name in ("flash2", "cudnn"))
    assert hardware.kernel == "cudnn"
    for (tokens, share), (same, other) in zip(cudnn.block_efficiency, flash2.block_efficiency, strict=False):
        assert tokens == same
        assert share * cudnn.attention_efficiency == pytest.approx(other * flash2.attention_efficiency, rel=0.01)
    assert cudnn.block_efficiency[-1] == (32768, 1.0)


def test_kernels_that_are_not_known_are_refused() -> None:
    with pytest.raises(ConfigError, match="Did you mean `flash3`"):
        named_hardware("h100").with_kernel("flash33")
    with pytest.raises(ConfigError, match="kernel"):
        named_hardware("cpu").with_kernel("flash2")
