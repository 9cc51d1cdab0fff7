"""A model saved from flat buffers opens as any Hugging Face model; ranks but 0 store no parameter before its arrive."""

import copy
import json

import pytest
import torch
from safetensors import safe_open
from testing import MODEL_TYPES, SIZES, tiny_family_config
from testing.laid import whole_parameters
from testing.strict import StrictWorld
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3MoeConfig, modeling_utils
from transformers.integrations import hub_kernels

from lengthwise.comm import SoloTransport
from lengthwise.core.errors import ConfigError, Problems
from lengthwise.models import DTYPES, FAMILIES, wrapped_layers
from lengthwise.models.families import check_model_config, refused_model
from lengthwise.models.model_files import save_model
from lengthwise.models.model_source import ModelSource, build_model, count_parameters, find_model
from tiers import some


def source(kind=LlamaConfig, **changes):
    return ModelSource(name="t", config=kind(**{**SIZES, **changes}), weights=False)


@pytest.mark.parametrize(("precision", "tied"), [("bf16", False), ("fp64", True)])
def test_saved_model_opens_with_equal_weights(tmp_path, tied, precision):
    model, dtype = build_model(source(tie_word_embeddings=tied), seed=1), DTYPES[precision]
    flat = whole_parameters(model, SoloTransport(), dtype=dtype)
    with torch.no_grad():
        flat.values.add_(torch.randn(flat.values.shape, dtype=dtype))
    assert len({parameter.untyped_storage().data_ptr() for parameter in model.parameters()}) == 1, "views of one buffer"
    assert model.model.rotary_emb.inv_freq.dtype == torch.float32, "as in every Hugging Face model"
    save_model(model, tmp_path / "model")
    names = {path.name for path in (tmp_path / "model").iterdir()}
    assert {"config.json", "model.safetensors"} <= names
    with safe_open(tmp_path / "model" / "model.safetensors", "pt") as file:
        assert ("lm_head.weight" in file.keys()) != tied, "tied weights are written once"  # noqa: SIM118 - no mapping
    opened = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype="auto")
    assert (opened.lm_head.weight is opened.model.embed_tokens.weight) == tied
    found = find_model(str(tmp_path / "model"))
    assert found.weights
    again = build_model(found, seed=99)
    assert opened.state_dict().keys() == model.state_dict().keys()
    for name, tensor in model.state_dict().items():
        assert opened.state_dict()[name].dtype == dtype
        assert torch.equal(opened.state_dict()[name], tensor)
        assert torch.equal(again.state_dict()[name].to(dtype), tensor)
    found.config.save_pretrained(tmp_path / "bare")
    assert not find_model(str(tmp_path / "bare")).weights


def test_drawn_parameters_depend_on_the_seed_only():
    first, _, state = build_model(source(), seed=1), torch.randn(3), torch.random.get_rng_state()
    second, other = build_model(source(), seed=1), build_model(source(), seed=2)
    assert torch.equal(state, torch.random.get_rng_state()), "the global generator is left alone"
    assert all(map(torch.equal, first.parameters(), second.parameters()))
    assert not torch.equal(first.lm_head.weight, other.lm_head.weight)


ENGINE_KEYS = {
    "attention": {
        f"{before}attn_implementation{after}": "org/kernels"
        for before, after in (("_", ""), ("", ""), ("_", "_internal"))
    },
    "flash": {"_attn_implementation": "flash_attention_2"},
    "by part": {"_attn_implementation": {"": "org/kernels"}},
    "experts": {"_experts_implementation": "grouped_mm", "experts_implementation": "batched_mm"},
    "by layer": {"per_layer_config": {"1": {"_attn_implementation": "org/kernels"}}},
    "fusion and outputs": {
        "fusion_config": {"patch_embeddings": True},
        "output_attentions": True,
        "output_hidden_states": True,
        "return_dict": False,
    },
}


@pytest.mark.parametrize("keys", ENGINE_KEYS)
def test_config_does_not_choose_how_to_compute(tmp_path, monkeypatch, keys):
    """`org/name` as attention makes Hugging Face load native code from the hub."""

    def entered(*_args, **_kwargs):
        raise AssertionError("the loader of hub kernels was entered")

    monkeypatch.setattr(modeling_utils, "lazy_import_flash_attention", entered)
    monkeypatch.setattr(hub_kernels, "get_kernel", entered)
    kind = Qwen3MoeConfig if keys == "experts" else LlamaConfig
    sizes = {"num_experts": 4, "moe_intermediate_size": 8} if keys == "experts" else {}
    save_model(build_model(source(kind, **sizes), seed=1), tmp_path / "model")
    path = tmp_path / "model" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **ENGINE_KEYS[keys]}))
    found = find_model(str(tmp_path / "model"))
    assert "org" not in found.config.to_json_string()
    assert getattr(found.config, "fusion_config", None) is None
    count_parameters(found.config)
    refused_model(found.config)
    for attention in ("lengthwise", "sdpa"):
        model = build_model(found, seed=1, attention=attention)
        layers = {module.config._attn_implementation for module in model.modules() if hasattr(module, "config")}
        assert layers == {attention}
        assert model.config._experts_implementation == "eager"
        assert model.config.return_dict
        assert not model.config.output_attentions
        assert not model.config.output_hidden_states


def test_config_of_endless_layers_and_experts_is_refused_before_anything_is_built(tmp_path):
    """Qwen's configs list a type for each layer as they are read, and every model makes its layers one by one."""
    endless = {"num_hidden_layers": 10**12, "num_experts": 10**6, "num_labels": 10**9, "nested": [{"n_layer": 10_001}]}
    (tmp_path / "config.json").write_text(json.dumps({**SIZES, **endless, "model_type": "qwen3_moe"}))
    with pytest.raises(Problems) as caught:
        find_model(str(tmp_path))
    for key in ("num_hidden_layers", "num_experts", "num_labels", "n_layer"):
        assert f"{key}: expected at most 10,000; got" in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"use_cache": "true"}, "'use_cache' expected bool, got str"),
        ({"num_hidden_layers": -1}, "num_hidden_layers: expected at least 1; got -1"),
        ({"intermediate_size": 2**70}, "config.json: expected"),
        ({"model_type": []}, "unhashable"),
        ({"head_dim": 3}, "head_dim 3 is odd"),
        ({"num_key_value_heads": 3}, "num_attention_heads 4 is not a multiple of num_key_value_heads 3"),
        ({"model_type": "mistral", "initializer_range": float("nan")}, r"config\.json: expected .*std nan"),
        # The routers are looked at before the model's sizes are.
        ({"model_type": "mixtral", "output_router_logits": True, "pad_token_id": 99}, "Padding_idx"),
    ],
    ids=str,
)
def test_config_that_no_model_can_be_built_of_is_one_line_with_file_and_entry(tmp_path, changes, said):
    source().config.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    def use():
        found = find_model(str(tmp_path))
        count_parameters(found.config)
        check_model_config(found.config)
        build_model(found, seed=0)

    with pytest.raises(ConfigError, match=said) as caught:
        use()
    assert caught.value.where.startswith(str(tmp_path))
    assert "config.json" in caught.value.where
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["{folder}/nowhere", "{folder}", "no-such-owner/no-such-model"])
def test_model_that_cannot_be_found_is_one_line(name, tmp_path):
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"^[^\n]*$"):
        find_model(name.format(folder=tmp_path))


CPU = torch.device("cpu")


def tensors_beside_parameters(model):
    """Map where a tensor is that is no parameter to it: buffers, and attributes that nobody registered."""
    every = [(path, {**each.__dict__, **each._buffers}) for path, each in model.named_modules()]
    named = [(f"{path}.{name}", value) for path, values in every for name, value in values.items()]
    return {name: value for name, value in named if isinstance(value, torch.Tensor)}


@pytest.mark.parametrize("model_type", some([name for name in FAMILIES if name in MODEL_TYPES]))
def test_all_but_parameters_is_that_of_any_other_build(model_type):
    source = ModelSource(name=model_type, config=tiny_family_config(model_type), weights=False)
    stored, without = (build_model(source, seed=0, stored=stored) for stored in (True, False))
    assert all(each.is_meta for each in without.parameters())
    named, others = (
        {name: (each.shape, each.requires_grad) for name, each in model.named_parameters()}
        for model in (stored, without)
    )
    assert named == others, "tied ones are one"
    wanted, found = tensors_beside_parameters(stored), tensors_beside_parameters(without)
    assert wanted.keys() == found.keys()
    for name, value in wanted.items():
        assert not found[name].is_meta, name
        assert torch.equal(found[name], value), name
    assert len(wrapped_layers(stored)) == len(wrapped_layers(without))


def test_only_rank_0_opens_weights(tmp_path, monkeypatch):
    config = LlamaConfig(**SIZES, tie_word_embeddings=True)
    torch.manual_seed(3)
    AutoModelForCausalLM.from_config(copy.deepcopy(config)).save_pretrained(tmp_path)
    source = find_model(str(tmp_path))
    read, opened = build_model(source, seed=0), []
    real = AutoModelForCausalLM.from_pretrained
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *a, **k: opened.append(a) or real(*a, **k))
    empty = [build_model(source, seed=rank, stored=rank == 0) for rank in range(3)]
    assert len(opened) == 1
    for rank, model in enumerate(empty):  # buffers may be weights
        model.register_buffer("own", torch.tensor(rank, dtype=torch.float64), persistent=False)

    def work(transport):
        model = empty[transport.rank]
        whole_parameters(model, transport, dtype=torch.float32, device=CPU, layers=wrapped_layers(model))
        assert model.lm_head.weight is model.model.embed_tokens.weight
        assert model.own == 0
        return model.state_dict()

    for state in StrictWorld(3).run(work):
        assert state.keys() == read.state_dict().keys()
        assert all(torch.equal(state[name], value) for name, value in read.state_dict().items())
