"""Weights are loaded whole, or drawn from the seed where that is asked for; nothing between the two."""

import json
import os
import shutil
from functools import partial

import pytest
import torch
from safetensors.torch import load_file, save_file
from testing import SIZES
from transformers import LlamaConfig, LlamaForCausalLM

from lengthwise.core.errors import ConfigError
from lengthwise.models import build_model, check_weights, find_model
from lengthwise.models.own_rows import OwnRows

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Two folders of one model: in one file, and in shards."""
    folder = tmp_path_factory.mktemp("whole")
    with torch.random.fork_rng():
        torch.manual_seed(5)
        model = LlamaForCausalLM(LlamaConfig(**SIZES))
    model.save_pretrained(folder / "single")
    model.save_pretrained(folder / "shards", max_shard_size="5KB")
    assert (folder / "shards" / INDEX).is_file()
    return folder


def shards(folder):
    return sorted(folder.glob("model-*.safetensors"))


def edit(file, change):
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


def move_outside(folder):
    shards(folder)[0].rename(folder.parent / "other.safetensors")
    index = json.loads((folder / INDEX).read_text())
    outside = dict.fromkeys(index["weight_map"], "../other.safetensors")
    (folder / INDEX).write_text(json.dumps({**index, "weight_map": outside}))


FAULTS = {
    "one shard missing": ("shards", lambda f: shards(f)[0].unlink(), r"1 of \d+ files of model.*missing"),
    "one tensor missing": ("shards", lambda f: edit(shards(f)[-1], dict.popitem), r"1 tensors .*not in their files"),
    "index that leaves the folder": ("shards", move_outside, "not the name of a file beside it"),
    "file cut short": ("single", lambda f: os.truncate(f / SINGLE, 999), "model.safetensors: "),
    "download under way": ("single", lambda f: (f / SINGLE).rename(f / f"{SINGLE}.incomplete"), "incomplete"),
    "half-saved": ("single", lambda f: (f / SINGLE).unlink(), "generation_config.json"),
    "pickle": ("single", lambda f: (f / SINGLE).rename(f / "pytorch_model.bin"), "pytorch_model.bin"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_weights_that_are_not_whole_are_refused_and_start_fresh_only_when_asked(whole, tmp_path, fault):
    kind, change, said = FAULTS[fault]
    folder = tmp_path / "model"
    shutil.copytree(whole / kind, folder)
    assert find_model(str(folder)).weights
    change(folder)
    with pytest.raises(ConfigError, match=said) as caught:
        find_model(str(folder))
    assert "weights: fresh" in caught.value.remedy
    fresh = find_model(str(folder), weights="fresh")
    assert not fresh.weights
    build_model(fresh, seed=0)


def test_weights_in_shards_are_those_of_one_file(whole):
    models = [build_model(find_model(str(whole / kind), weights="load"), seed=0) for kind in ("single", "shards")]
    assert all(torch.equal(a, b) for a, b in zip(*(model.parameters() for model in models), strict=True))


@pytest.mark.parametrize("name", ["tiny", "bare"])
def test_weights_load_is_refused_where_there_are_none(tmp_path, name):
    LlamaConfig(**SIZES).save_pretrained(tmp_path / "bare")
    with pytest.raises(ConfigError, match=f"weights to load; got .*{name}, which has none"):
        find_model("tiny" if name == "tiny" else str(tmp_path / name), weights="load")


def changed(whole, folder, change):
    """Copy the model in one file, its tensors as `change` makes them."""
    shutil.copytree(whole / "single", folder)
    edit(folder / SINGLE, change)
    return find_model(str(folder))


def recast(dtype, *names):
    def change(tensors):
        tensors.update({name: tensors[name].to(dtype) for name in names or list(tensors)})

    return change


NORM = "model.norm.weight"
NO_WEIGHTS = {
    "int64": (recast(torch.int64, NORM), rf"16 to 32 bits.*1 others: {NORM} I64"),
    "fp8 without a scale": (recast(torch.float8_e4m3fn), r"\d+ others: .* F8_E4M3"),
    "wider than the config": (recast(torch.float64), "F64"),
    "missing": (lambda w: w.pop(NORM), rf"1 missing \({NORM}\)"),
    "not in the model": (lambda w: w.update(extra=torch.zeros(2)), r"1 not in the model \(extra\)"),
    "misshapen": (lambda w: w.update({NORM: torch.zeros(3)}), "1 of another shape"),
}


@pytest.mark.parametrize("kind", NO_WEIGHTS)
def test_weights_that_would_be_changed_are_refused_before_any_is_read(whole, tmp_path, kind):
    change, said = NO_WEIGHTS[kind]
    found = changed(whole, tmp_path / "model", change)
    for check in (check_weights, partial(build_model, seed=0)):
        with pytest.raises(ConfigError, match=said) as caught:
            check(found)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("dtype", "value"), [(torch.float32, "nan"), (torch.bfloat16, "-inf")])
def test_weights_that_are_not_finite_are_named_by_whoever_reads_them(whole, tmp_path, dtype, value):
    """The whole model, and a rank that reads its own rows; other rows of the tensor are none of its business."""

    def change(tensors):
        recast(dtype)(tensors)
        tensors[NORM][-1] = float(value)

    found = changed(whole, tmp_path / "model", change)
    said = rf"finite weights; got NaN or infinity in {NORM}\."
    with pytest.raises(ConfigError, match=said):
        build_model(found, seed=0)
    rows = OwnRows(tmp_path / "model")
    assert len(rows.read(NORM, 0, 4)) == 4
    with pytest.raises(ConfigError, match=said):
        rows.read(NORM, 4, *rows.shape(NORM))


def test_model_folder_with_an_adapter_is_refused(whole, tmp_path):
    """Hugging Face would read the base that the adapter names, or put the adapter into the model."""
    shutil.copytree(whole / "single", tmp_path / "model")
    adapter = {"peft_type": "LORA", "base_model_name_or_path": str(whole / "shards")}
    (tmp_path / "model" / "adapter_config.json").write_text(json.dumps(adapter))
    with pytest.raises(ConfigError, match=r"got adapter_config\.json.*`lora\.adapter`"):
        find_model(str(tmp_path / "model"))
