"""Descriptions of hardware and costs from files: complete, sourced, checked."""

import json

import pytest

from lengthwise.core.errors import ConfigError, LengthwiseError, Problems
from lengthwise.core.files import read_package_json
from lengthwise.cost import HARDWARE_NAMES, named_hardware, named_shape, plain_cost
from lengthwise.cost.costs import cost_from_file

H100 = named_hardware("h100")
DESCRIBED = read_package_json("lengthwise.cost", "hardware.json")["h100"]


def test_named_hardware_states_its_source() -> None:
    for name in HARDWARE_NAMES:
        assert named_hardware(name).name == name
        assert len(named_hardware(name).source) > 40


def test_hardware_of_a_users_own_is_read_by_path(tmp_path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({**DESCRIBED, "link_bytes_per_second": 25e9}))
    mine = named_hardware(str(path))
    assert (mine.name, mine.link_bytes_per_second, mine.block_efficiency) == (str(path), 25e9, H100.block_efficiency)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"linear_efficiency": 1.5}, "linear_efficiency"),
        ({"link_bytes_per_second": 10**400}, "link_bytes_per_second"),
        ({"device_bytes": "80GB"}, "device_bytes"),
        ({"hop_latency_seconds": -1.0}, "hop_latency_seconds"),
        ({"ranks_per_node": 7.5}, "ranks_per_node"),
        ({"fused_norms": "yes"}, "fused_norms"),
        ({"link_byte_per_second": 1.0}, "link_bytes_per_second"),
        *(
            ({"block_efficiency": curve}, "block_efficiency")
            for curve in ([[1024, 0.9], [512, 1.0]], [[512, 0.9], [1024, 0.8], [2048, 1.0]], [[1024, 0.9]], [1024, 1.0])
        ),
        ({"ring_efficiency": [[128, 0.9], [16384, 1.0]]}, "no block faster than a document of twice its tokens"),
        ({"device_bytes": -1, "host_bytes": 0}, r"(?s)device_bytes.*host_bytes"),
        ({"device_bytes": ..., "source": ...}, "device_bytes, source"),
    ],
    ids=str,
)
def test_hardware_files_are_checked(tmp_path, change, said):
    path = tmp_path / "mine.json"
    described = {name: value for name, value in {**DESCRIBED, **change}.items() if value is not ...}
    path.write_text(json.dumps(described))
    with pytest.raises(LengthwiseError, match=said):
        named_hardware(str(path))


@pytest.mark.parametrize("text", [None, "[1]"])
def test_what_is_no_file_of_a_json_object_is_refused(tmp_path, text) -> None:
    path = tmp_path / "mine.json"
    if text is not None:
        path.write_text(text)
    for read in (named_hardware, named_shape):
        with pytest.raises(ConfigError, match=r"mine\.json"):
            read(str(path))


@pytest.mark.parametrize(("kernel", "reached"), [("flash2", 325.6), ("cudnn", 522.4), ("flash3", 575.7)])
def test_attention_kernels_reach_what_their_sources_say(kernel: str, reached: float) -> None:
    """TFLOP/s of forward and backward at 16K tokens, from those of both passes in the figures of FlashAttention-3."""
    hardware = named_hardware("h100").with_kernel(kernel)
    assert hardware.kernel == kernel
    assert hardware.attention_efficiency * hardware.peak_flops_per_second / 1e12 == pytest.approx(reached, rel=0.002)


def test_cost_from_file_takes_what_is_left_out_as_zero(tmp_path):
    path = tmp_path / "cost.json"
    path.write_text('{"linear_seconds": 2, "ring_seconds": 0.5}')
    cost = cost_from_file(path)
    assert cost == plain_cost(linear_seconds=2.0, ring_seconds=0.5, version=cost.version)
    assert cost.version == "given/1 linear_seconds=2.0 ring_seconds=0.5"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "JSON"),
        ('{"linear_seconds": 0, "fixed_seconds": 0.0}', "at least one"),
        ('{"linear_second": 1}', "Did you mean `linear_seconds`"),
        ('{"hop_seconds": 1}', "hop_seconds"),
        ('{"linear_seconds": 1%s}' % ("0" * 400), "linear_seconds"),
        ('{"linear_seconds": 1, "linear_seconds": 2}', 'the key "linear_seconds" twice'),
        ('{"linear_seconds": -1, "ring_seconds": NaN, "speed": 3}', "speed.*linear_seconds.*-1.*ring_seconds.*NaN"),
    ],
)
def test_cost_from_file_refuses_what_is_no_cost(tmp_path, text, said):
    path = tmp_path / "cost.json"
    path.write_text(text)
    with pytest.raises((ConfigError, Problems), match=rf"(?s)cost\.json.*{said}"):
        cost_from_file(path)
