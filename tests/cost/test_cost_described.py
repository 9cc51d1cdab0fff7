"""Measurements as a hardware description: its costs are those of the fit, and what was not measured is named."""

import json
from dataclasses import replace

import pytest

from cost.measured_samples import SHAPE, measurements_of, samples_of
from cost.test_cost_fit import machine
from lengthwise.core.errors import ConfigError
from lengthwise.core.measurements import Term
from lengthwise.cost import all_terms_cost, hardware_of_gpu, named_hardware
from lengthwise.cost.described import hardware_from_measurements, hardware_to_json
from lengthwise.cost.measured import measured_cost


@pytest.fixture
def found():
    return measurements_of(samples_of(machine()))


def test_costs_of_the_description_are_those_of_the_fit(tmp_path, found):
    path = tmp_path / "mine.json"
    path.write_text(hardware_to_json(hardware_from_measurements(found)))
    described, fitted = all_terms_cost(SHAPE, named_hardware(str(path))), measured_cost(found)
    for name in ("quadratic_seconds", "linear_seconds", "fixed_seconds"):
        assert getattr(described, name) == pytest.approx(getattr(fitted, name))
    for name in ("near", "far"):
        of_both = [getattr(cost, name) for cost in (described, fitted)]
        assert of_both[0].bytes_per_second == pytest.approx(of_both[1].bytes_per_second)
        assert of_both[0].hop_seconds == pytest.approx(of_both[1].hop_seconds)
    assert described.block_efficiency == fitted.block_efficiency
    assert described.copy_bytes_per_second == pytest.approx(fitted.copy_bytes_per_second)


def test_what_was_not_measured_is_of_the_named_hardware_and_said(found):
    base, terms = named_hardware("cpu"), dict(found.fit.terms)
    for name in ("near_bytes_per_second", "far_bytes_per_second", "copy_bytes_per_second"):
        del terms[name]
    found = replace(found, fit=replace(found.fit, terms=terms, block_efficiency=()))
    made = hardware_from_measurements(found, device_bytes=141e9, host_bytes=2e12, ranks_per_node=4)
    for name in ("node_link_bytes_per_second", "link_bytes_per_second", "copy_bytes_per_second", "block_efficiency"):
        assert getattr(made, name) == getattr(base, name)
        assert f"{name}," not in made.source
    assert (made.device_bytes, made.host_bytes, made.ranks_per_node) == (141e9, 2e12, 4)
    assert made.node_uplink_bytes_per_second == 4 * base.node_uplink_bytes_per_second
    assert "as of cpu" in made.source
    for part in ("2026-11-22", "torch 2.13.0", "linear_efficiency"):
        assert part in made.source


def test_rates_above_the_named_peak_raise_it(found):
    terms = dict(found.fit.terms)
    terms["linear_seconds"] = replace(terms["linear_seconds"], value=1e-9)
    terms["quadratic_seconds"] = Term(value=0.0, relative_error=None)
    made = hardware_from_measurements(replace(found, fit=replace(found.fit, terms=terms)))
    base = named_hardware("cpu")
    assert made.linear_efficiency == 1.0
    assert made.peak_flops_per_second == pytest.approx(6.0 * SHAPE.linear_params / 1e-9)
    assert made.attention_efficiency * made.peak_flops_per_second == pytest.approx(
        base.attention_efficiency * base.peak_flops_per_second
    )


def test_measurements_of_adapters_describe_no_hardware(found):
    with pytest.raises(ConfigError, match="of adapters"):
        hardware_from_measurements(replace(found, adapters=1000))


def test_a_description_can_be_read_again(found):
    raw = json.loads(hardware_to_json(hardware_from_measurements(found)))
    assert set(raw) == {*named_hardware("h100").__dataclass_fields__} - {"name", "kernel", "kernels"}


@pytest.mark.parametrize(
    ("device", "name"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100 PCIe", "h100"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA B200", None),
    ],
)
def test_a_gpu_is_priced_by_its_name(device, name):
    found, said = hardware_of_gpu(device)
    assert found == (name or "h100")
    assert (said is None) == (name is not None)
    if said is not None:
        assert said.startswith(f"{device} is planned with the figures of h100")


def test_h200_is_h100_with_more_memory():
    h100, h200 = named_hardware("h100"), named_hardware("h200")
    assert h200.device_bytes == 141e9
    assert replace(h200, name="h100", device_bytes=h100.device_bytes, source=h100.source) == h100
