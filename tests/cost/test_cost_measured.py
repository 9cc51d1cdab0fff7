"""The file of measurements: it comes back as it was written, and what is wrong in it is named, all at once."""

import json
import re
from dataclasses import replace

import numpy as np
import pytest

from cost.measured_samples import SHAPE, measurements_of, samples_of
from cost.test_cost_fit import machine
from lengthwise.core.errors import ConfigError, LengthwiseError, Problems
from lengthwise.cost import named_shape
from lengthwise.cost.analytic import layer_seconds
from lengthwise.cost.measured import cost_from_measurements, measured_cost, measured_shape, read_measurements

FOUND = measurements_of(samples_of(machine()))


def write(tmp_path, content):
    path = tmp_path / "measurements.json"
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
    assert measured_shape(read) == SHAPE
    assert read.digest()[:12] in measured_cost(read).version


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "an empty file"),
        ("[1]", 'an object with "schema"'),
        ('{"schema": "lengthwise.measurements/2"}', "lengthwise.measurements/1"),
        ('{"schema": "lengthwise.measurements/1", "schema": 1}', 'the key "schema" twice'),
        ('{"schema": "lengthwise.measurements/1"', "broken JSON"),
    ],
)
def test_what_is_no_file_of_measurements_is_refused(tmp_path, content, said):
    with pytest.raises(ConfigError, match=re.escape(said)):
        read_measurements(write(tmp_path, content))


def test_a_file_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="No such file"):
        read_measurements(tmp_path / "none.json")


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
    said = str(caught.value)
    for key in ("place: expected a value", "plase", "Did you mean `place`?", "samples.0.seconds", "samples.1.kind"):
        assert key in said
    for key in ("samples.2.lengths.0", "samples.3.repeats", "samples.4.spread", "fit.terms.linear_seconds.value"):
        assert key in said
    assert "fit.terms.speed" in said
    assert "model.layers" in said


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
        (lambda raw: raw["fit"]["terms"]["linear_seconds"].update(value=1e300), "at most 1e+06 seconds"),
        (lambda raw: raw["fit"]["terms"]["near_bytes_per_second"].update(value=1e300), "less than 1e+18 bytes"),
        (lambda raw: raw.update(hardware="abacus"), "h100"),
        (lambda raw: raw["fit"].update(block_efficiency=[[100.0, 0.9], [200.0, 0.5]]), "block_efficiency"),
        (free, "at least one coefficient above 0"),
    ],
)
def test_values_that_make_no_costs_are_refused(tmp_path, change, said):
    with pytest.raises(LengthwiseError, match=re.escape(said)):
        read_measurements(write(tmp_path, changed(change)))


def test_a_run_plans_only_with_what_was_measured_of_its_like(tmp_path):
    path = write(tmp_path, FOUND.to_json())
    assert cost_from_measurements(path, SHAPE, precision="fp32", threads=1) == measured_cost(FOUND)
    with pytest.raises(Problems) as caught:
        cost_from_measurements(path, named_shape("llama-7b"), precision="bf16", threads=4)
    said = str(caught.value)
    with pytest.raises(ConfigError, match="expected adapters of 80 parameters trained, as in the run; got all"):
        cost_from_measurements(path, SHAPE, precision="fp32", adapters=80)
    with pytest.raises(ConfigError, match="place: device: expected a GPU, as in the run; got cpu"):
        cost_from_measurements(path, SHAPE, precision="fp32", on_gpus=True)
    path = write(tmp_path, replace(FOUND, adapters=80).to_json())
    assert cost_from_measurements(path, SHAPE, precision="fp32", adapters=80).reduced_bytes == 80 * 8
    with pytest.raises(ConfigError, match="expected all of the model trained"):
        cost_from_measurements(path, SHAPE, precision="fp32")
    for word in ("model: layers: expected 32", "precision: expected bf16", "threads: expected 4", "Profile this model"):
        assert word in said


def test_costs_of_a_stage_are_its_part_of_the_whole_by_which_layers_are_weighed_alike():
    whole, half = measured_cost(FOUND), measured_cost(FOUND, stages=2)
    assert half.stages == 2
    assert 2 * half.linear_seconds == whole.linear_seconds
    of_whole, of_half = (layer_seconds(cost, SHAPE, [3000, 1096], capacity=2048) for cost in (whole, half))
    assert of_half == pytest.approx(of_whole)
    layer, embedding, head = of_whole
    assert (embedding, head) == (4096 * whole.embedding_seconds, 4096 * whole.head_seconds)
    seconds = float(whole.compute_seconds(np.array([3000, 1096])).sum()) + 2 * whole.fixed_seconds
    assert SHAPE.layers * layer + embedding + head == pytest.approx(seconds)
    untold = layer_seconds(replace(whole, head_seconds=0.0, embedding_seconds=0.0), SHAPE, [4096], capacity=4096)
    share = SHAPE.hidden * SHAPE.vocab / SHAPE.linear_params
    assert untold[1:] == (0.0, pytest.approx(share * whole.linear_seconds * 4096))
