"""A model that was trained in flat buffers is saved as any Hugging Face model, and opened again as one."""

import json

import pytest
import torch
from safetensors import safe_open
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    modeling_utils,
)
from transformers.integrations import hub_kernels

from lengthwise.comm import SoloTransport
from lengthwise.core.errors import ConfigError, OutputError, Problems
from lengthwise.engine.replicated import FlatParameters
from lengthwise.models import (
    DTYPES,
    ModelSource,
    build_model,
    check_buildable,
    check_model_config,
    count_parameters,
    find_model,
    keep_double,
    save_model,
)
from lengthwise.models.refusals import refused_model
from tiers import some

SIZES = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "bos_token_id": None,
    "eos_token_id": None,
}


def source(kind=LlamaConfig, **changes):
    return ModelSource(name="t", config=kind(**SIZES, **changes), weights=False)


@pytest.mark.parametrize("precision", some(DTYPES, 0, 2))
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", [LlamaConfig, Qwen3Config])
def test_saved_model_opens_with_equal_weights(tmp_path, kind, tied, precision):
    model = build_model(source(kind, tie_word_embeddings=tied), seed=1)
    flat = FlatParameters(model, SoloTransport(), dtype=DTYPES[precision])
    with torch.no_grad():
        flat.values.add_(torch.randn(flat.values.shape).to(flat.values.dtype))
    storages = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    assert len(storages) == 1, "all parameters are views of one buffer"
    save_model(model, tmp_path / "model")
    names = {path.name for path in (tmp_path / "model").iterdir()}
    assert {"config.json", "model.safetensors"} <= names
    assert not any(name.endswith((".bin", ".pt", ".pkl")) for name in names)
    with safe_open(tmp_path / "model" / "model.safetensors", "pt") as file:
        assert ("lm_head.weight" in file.keys()) != tied, "tied weights are written once"  # noqa: SIM118 - no mapping
        assert all(file.get_tensor(name).dtype == DTYPES[precision] for name in file.keys())  # noqa: SIM118
    opened = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype="auto")
    assert opened.config.tie_word_embeddings == tied
    tie = opened.lm_head.weight is opened.model.embed_tokens.weight
    assert tie == tied
    assert opened.state_dict().keys() == model.state_dict().keys()
    for name, tensor in opened.state_dict().items():
        assert tensor.dtype == DTYPES[precision]
        assert torch.equal(tensor, model.state_dict()[name]), name


def test_saved_model_is_found_and_built_again(tmp_path):
    model = build_model(source(), seed=1)
    save_model(model, tmp_path / "model")
    found = find_model(str(tmp_path / "model"))
    assert found.weights
    again = build_model(found, seed=99)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    found.config.save_pretrained(tmp_path / "bare")
    assert not find_model(str(tmp_path / "bare")).weights


def test_fp64_weights_are_not_rounded(tmp_path):
    model = build_model(source(), seed=1).double()
    with torch.no_grad():
        model.model.norm.weight += 1e-12
    save_model(model, tmp_path / "model")
    again = build_model(find_model(str(tmp_path / "model")), seed=0)
    assert torch.equal(model.model.norm.weight, again.model.norm.weight)


def test_saving_where_nothing_can_be_written_is_an_output_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError):
        save_model(build_model(source(), seed=1), tmp_path / "file" / "model")


def test_drawn_parameters_depend_on_the_seed_only():
    torch.manual_seed(5)
    first = build_model(source(), seed=1)
    torch.randn(3)
    state = torch.random.get_rng_state()
    second, other = build_model(source(), seed=1), build_model(source(), seed=2)
    assert torch.equal(state, torch.random.get_rng_state()), "the global generator is left alone"
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    assert not torch.equal(first.lm_head.weight, other.lm_head.weight)
    assert all(parameter.dtype == torch.float32 for parameter in first.parameters())


def test_flat_buffers_leave_rope_frequencies_in_fp32():
    model = build_model(source(), seed=1)
    FlatParameters(model, SoloTransport(), dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert model.model.rotary_emb.inv_freq.dtype == torch.float32


def test_tiny_has_about_a_million_parameters_and_grouped_heads():
    found = find_model("tiny")
    model = build_model(found, seed=0)
    assert 0.8e6 < sum(parameter.numel() for parameter in model.parameters()) < 1.5e6
    assert found.config.num_key_value_heads < found.config.num_attention_heads


@pytest.mark.parametrize("order", [("lengthwise", "sdpa"), ("sdpa", "lengthwise")])
def test_one_source_builds_models_that_keep_their_own_attention(order):
    """Hugging Face writes the attention's name into the config: the second model must not switch the first one's."""
    one = source()
    built = [build_model(one, seed=1, attention=attention) for attention in order]
    assert tuple(model.config._attn_implementation for model in built) == order


def test_keep_double_computes_norms_in_fp64():
    """Hugging Face norms step down to fp32 in any model; `verify` in fp64 must not, or it fails at random at 1e-12."""
    norm = build_model(source(), seed=1).double().model.norm
    x = torch.randn(50, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    exact = x / (x.square().mean(-1, keepdim=True) + norm.variance_epsilon).sqrt()
    assert (norm(x) - exact).abs().max() > 1e-9, "plain Hugging Face rounds here"
    with keep_double(torch.float64):
        assert (norm(x) - exact).abs().max() < 1e-14
    with keep_double(torch.float32):
        assert (norm(x) - exact).abs().max() > 1e-9


ENGINE_KEYS = {
    "private": {"_attn_implementation": "org/kernels"},
    "public": {"attn_implementation": "org/kernels"},
    "flash": {"_attn_implementation": "flash_attention_2"},
    "internal": {"_attn_implementation_internal": "org/kernels"},
    "by part": {"_attn_implementation": {"": "org/kernels"}},
    "experts": {"_experts_implementation": "grouped_mm", "experts_implementation": "batched_mm"},
    "by layer": {"per_layer_config": {"1": {"_attn_implementation": "org/kernels"}}},
    "fusion": {"fusion_config": {"patch_embeddings": True}},
    "outputs": {"output_attentions": True, "output_hidden_states": True, "return_dict": False},
}


@pytest.mark.parametrize("weights", [True, False])
@pytest.mark.parametrize("keys", ENGINE_KEYS)
def test_config_does_not_choose_how_to_compute(tmp_path, monkeypatch, keys, weights):
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
    found = find_model(str(tmp_path / "model"), weights=None if weights else "fresh")
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


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "qwen3_moe"])
def test_config_of_endless_layers_and_experts_is_refused_before_anything_is_built(tmp_path, model_type):
    """Qwen's configs list a type for each layer as they are read, and every model makes its layers one by one."""
    endless = {"num_hidden_layers": 10**12, "num_experts": 10**6}
    values = {
        **SIZES,
        **endless,
        "nested": [{"n_layer": 10_001}],
        "num_labels": 10**9,
        "model_type": model_type,
        "hidden_size": 65_536,
    }
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(Problems) as caught:
        find_model(str(tmp_path))
    lines = str(caught.value).splitlines()
    keys = ("num_hidden_layers", "num_experts", "num_labels", "n_layer")
    assert [line.split(": expected")[0].rpartition(" ")[2] for line in lines] == list(keys)
    assert all("expected at most 10,000; got" in line for line in lines)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"use_cache": "true"}, "'use_cache' expected bool, got str"),
        ({"hidden_size": 1.5}, "'hidden_size' expected int, got float"),
        ({"num_attention_heads": 0}, "ZeroDivisionError"),
        ({"num_hidden_layers": -1}, "num_hidden_layers: expected at least 1; got -1"),
        ({"vocab_size": 0}, "vocab_size: expected at least 1; got 0"),
        ({"intermediate_size": 2**70}, "config.json: expected"),
        ({"dtype": "float99"}, "float99"),
        ({"model_type": []}, "unhashable"),
        ({"hidden_act": "rule"}, "rule"),
        ({"head_dim": 3}, "head_dim 3 is odd"),
        ({"num_key_value_heads": 3}, "num_attention_heads 4 is no multiple of num_key_value_heads 3"),
    ],
    ids=str,
)
def test_config_that_no_model_can_be_built_of_is_one_line_with_file_and_entry(tmp_path, changes, said):
    source().config.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    with pytest.raises(ConfigError, match=said) as caught:
        check_buildable(find_model(str(tmp_path)).config)
    assert caught.value.where.startswith(str(tmp_path))
    assert "config.json" in caught.value.where
    assert "\n" not in str(caught.value)


def test_spread_of_fresh_parameters_that_is_no_number_is_one_line(tmp_path):
    found = source(MistralConfig, initializer_range=float("nan"))
    with pytest.raises(ConfigError, match=r"config\.json: expected .*std nan"):
        build_model(found, seed=0)


def test_router_of_a_config_that_cannot_be_built_is_one_line():
    """The routers are looked at before the model's sizes are."""
    found = source(MixtralConfig, output_router_logits=True, pad_token_id=99)
    with pytest.raises(ConfigError, match="Padding_idx"):
        check_model_config(found.config)
