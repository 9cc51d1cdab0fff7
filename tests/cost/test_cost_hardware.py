"""Hardware descriptions: complete, sourced, checked."""

from dataclasses import replace

import pytest

from lengthwise.core.errors import ConfigError
from lengthwise.cost import HARDWARE_NAMES, named_hardware


@pytest.mark.parametrize("name", HARDWARE_NAMES)
def test_named_hardware_states_its_source(name: str) -> None:
    hardware = named_hardware(name)
    assert hardware.name == name
    assert len(hardware.source) > 40


def test_named_hardware_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="Did you mean `h100`"):
        named_hardware("h10")


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


def test_hardware_allows_no_latency() -> None:
    assert replace(named_hardware("cpu"), hop_latency_seconds=0.0).hop_latency_seconds == 0.0
