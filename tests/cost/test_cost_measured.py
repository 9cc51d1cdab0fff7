"""The file of measurements: as it was written, what is wrong in it named, and the hardware that it describes."""

import json
import re
from dataclasses import replace

import numpy as np
import pytest

from cost.measured_samples import SHAPE, measurements_of, samples_of
from cost.test_cost_fit import machine
from lengthwise.core.errors import ConfigError, LengthwiseError, Problems
from lengthwise.cost import all_terms_cost, hardware_of_gpu, named_hardware, named_shape
from lengthwise.cost.analytic import layer_seconds
from lengthwise.cost.described import hardware_from_measurements, hardware_to_json
from lengthwise.cost.measured import cost_from_measurements, measured_cost, read_measurements

FOUND = measurements_of(samples_of(machine()))


def write(tmp_path, content, name="measurements.json"):
    path = tmp_path / name
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def changed(change):
    raw = json.loads(FOUND.to_json())
    change(raw)
    return raw


def test_the_file_comes_back_as_it_was_written(tmp_path):
    path = write(tmp_path, FOUND.to_json())
    read = read_measurements(path)
    assert read == FOUND
    assert read.to_json() == FOUND.to_json()
    assert read.model == SHAPE
    assert read.digest()[:12] in measured_cost(read).version


def test_all_that_is_wrong_in_a_file_is_said_at_once(tmp_path):
    def spoil(raw):
        raw["plase"] = raw.pop("place")
        raw["samples"][0]["seconds"] = float("nan")
        raw["samples"][1]["kind"] = "locale"
        raw["samples"][2]["lengths"] = [0]
        raw["samples"][3]["repeats"] = True
        del raw["samples"][4]["spread"]
        raw["fit"]["terms"]["linear_seconds"]["value"] = -1
        raw["fit"]["terms"]["speed"] = {"value": 1, "relative_error": None}
        raw["model"]["layers"] = "2"

    with pytest.raises(Problems) as caught:
        read_measurements(write(tmp_path, changed(spoil)))
    for key in (
        "place", "plase", "samples.0.seconds", "samples.1.kind", "samples.2.lengths.0", "samples.3.repeats",
        "samples.4.spread", "fit.terms.linear_seconds.value", "fit.terms.speed", "model.layers",
    ):  # fmt: skip
        assert key in str(caught.value)


def free(raw):
    for name in ("quadratic_seconds", "linear_seconds", "fixed_seconds"):
        raw["fit"]["terms"][name]["value"] = 0.0


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda raw: raw["fit"]["not_measured"].append("linear_seconds"), "fit.not_measured"),
        (lambda raw: raw["fit"]["terms"].pop("linear_seconds"), "no linear_seconds"),
        (lambda raw: raw["fit"]["terms"]["forward_linear"].update(value=1.5), "a share below 1"),
        (lambda raw: raw["fit"]["terms"]["near_bytes_per_second"].update(value=0.0), "more than 0 and less"),
        (lambda raw: raw.update(hardware="abacus"), "h100"),
        (lambda raw: raw["fit"].update(block_efficiency=[[100.0, 0.9], [200.0, 0.5]]), "block_efficiency"),
        (free, "at least one coefficient above 0"),
        ('{"schema": "lengthwise.measurements/2"}', "lengthwise.measurements/1"),
        ('{"schema": "lengthwise.measurements/1"', "broken JSON"),
        (lambda raw: raw["model"].update(experts=0), "experts: expected a whole number of at least 1; got 0"),
    ],
)
def test_what_makes_no_costs_is_refused(tmp_path, change, said):
    path = write(tmp_path, change if isinstance(change, str) else changed(change))
    with pytest.raises(LengthwiseError, match=re.escape(said)):
        read_measurements(path)


def test_a_file_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="No such file"):
        read_measurements(tmp_path / "none.json")


def test_a_run_plans_only_with_what_was_measured_of_its_like(tmp_path):
    path = write(tmp_path, FOUND.to_json())
    assert cost_from_measurements(path, SHAPE, precision="fp32", threads=1) == measured_cost(FOUND)
    with pytest.raises(Problems) as caught:
        cost_from_measurements(path, named_shape("llama-7b"), precision="bf16", threads=4)
    for word in ("model: layers: expected 32", "precision: expected bf16", "threads: expected 4", "Profile this model"):
        assert word in str(caught.value)
    of_adapters = write(tmp_path, replace(FOUND, adapters=80).to_json(), "adapters.json")
    assert cost_from_measurements(of_adapters, SHAPE, precision="fp32", adapters=80).reduced_bytes == 80 * 8
    for there, options, said in (
        (path, {"adapters": 80}, "adapters"),
        (path, {"on_gpus": True}, "device: expected a GPU"),
        (of_adapters, {}, "expected all of the model trained"),
    ):
        with pytest.raises(ConfigError, match=said):
            cost_from_measurements(there, SHAPE, precision="fp32", **options)


def test_costs_of_the_description_are_those_of_the_fit(tmp_path):
    path = tmp_path / "mine.json"
    path.write_text(hardware_to_json(hardware_from_measurements(FOUND)))
    described, fitted = all_terms_cost(SHAPE, named_hardware(str(path))), measured_cost(FOUND)
    for name in ("quadratic_seconds", "linear_seconds", "fixed_seconds", "copy_bytes_per_second"):
        assert getattr(described, name) == pytest.approx(getattr(fitted, name))
    for link, other in ((described.near, fitted.near), (described.far, fitted.far)):
        expected = (other.bytes_per_second, other.hop_seconds)
        assert (link.bytes_per_second, link.hop_seconds) == pytest.approx(expected)
    assert described.block_efficiency == fitted.block_efficiency


def test_what_was_not_measured_is_of_the_named_hardware_and_said():
    base, terms = named_hardware("cpu"), dict(FOUND.fit.terms)
    for name in ("near_bytes_per_second", "far_bytes_per_second", "copy_bytes_per_second"):
        del terms[name]
    found = replace(FOUND, fit=replace(FOUND.fit, terms=terms, block_efficiency=()))
    made = hardware_from_measurements(found, device_bytes=141e9, host_bytes=2e12, ranks_per_node=4)
    for name in ("node_link_bytes_per_second", "link_bytes_per_second", "copy_bytes_per_second", "block_efficiency"):
        assert getattr(made, name) == getattr(base, name)
    assert (made.device_bytes, made.host_bytes, made.ranks_per_node) == (141e9, 2e12, 4)
    assert made.node_uplink_bytes_per_second == 4 * base.node_uplink_bytes_per_second
    assert "taken from cpu" in made.source


def test_a_description_can_be_read_again_and_is_none_of_adapters():
    raw = json.loads(hardware_to_json(hardware_from_measurements(FOUND)))
    assert set(raw) == {*named_hardware("h100").__dataclass_fields__} - {"name", "kernel", "kernels"}
    with pytest.raises(ConfigError, match="of adapters"):
        hardware_from_measurements(replace(FOUND, adapters=1000))


def test_a_gpu_is_priced_by_its_name():
    known = {"NVIDIA H200": "h200", "NVIDIA H100 80GB HBM3": "h100", "NVIDIA A100-SXM4-80GB": "a100"}
    assert [hardware_of_gpu(device) for device in known] == [(name, None) for name in known.values()]
    found, said = hardware_of_gpu("NVIDIA B200")
    assert (found, said is not None and "B200" in said) == ("h100", True)


def test_costs_of_a_stage_are_its_part_of_the_whole_by_which_layers_are_weighed_alike():
    whole, half = measured_cost(FOUND), measured_cost(FOUND, stages=2)
    assert half.stages == 2
    assert 2 * half.linear_seconds == whole.linear_seconds
    shapes = [replace(SHAPE, layers=1)] * SHAPE.layers
    of_whole, of_half = (layer_seconds(cost, shapes, [3000, 1096], capacity=2048) for cost in (whole, half))
    for each, expected in zip(of_half, of_whole, strict=True):
        assert each == pytest.approx(expected)
    (layer, *others), embedding, head = of_whole
    assert {*others} == {layer}
    assert (embedding, head) == (4096 * whole.embedding_seconds, 4096 * whole.head_seconds)
    seconds = float(whole.compute_seconds(np.array([3000, 1096])).sum()) + 2 * whole.fixed_seconds
    assert SHAPE.layers * layer + embedding + head == pytest.approx(seconds)
    untold = layer_seconds(replace(whole, head_seconds=0.0, embedding_seconds=0.0), shapes, [4096], capacity=4096)
    share = SHAPE.hidden * SHAPE.vocab / SHAPE.linear_params
    assert untold[1:] == (0.0, pytest.approx(share * whole.linear_seconds * 4096))


def test_a_file_of_before_has_one_curve_and_a_term_that_the_fit_hardly_knows_stays_the_hardwares(tmp_path):
    """Copies of 107 GB/s with an error of 186 % were those of a PCIe link of 63; arithmetic is fitted together."""

    def spoil(raw):
        del raw["fit"]["ring_efficiency"]
        for name, error in (
            ("copy_bytes_per_second", 1.86),
            ("quadratic_seconds", 0.9),
            ("near_bytes_per_second", 0.4),
        ):
            raw["fit"]["terms"][name]["relative_error"] = error

    found, base = read_measurements(write(tmp_path, changed(spoil))), named_hardware("cpu")
    cost, described = measured_cost(found), hardware_from_measurements(found)
    assert cost.ring_efficiency == described.ring_efficiency == ()
    assert described.copy_bytes_per_second == base.copy_bytes_per_second
    assert cost.copy_bytes_per_second == base.host_copy_bytes_per_second / 2  # of two ranks a node
    assert "copy_bytes_per_second" not in described.source
    assert cost.quadratic_seconds == FOUND.fit.terms["quadratic_seconds"].value
    assert cost.near.bytes_per_second == FOUND.fit.terms["near_bytes_per_second"].value
