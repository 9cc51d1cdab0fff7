"""A model that was trained in flat buffers is saved as any Hugging Face model, and opened again as one."""

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

from lengthwise.comm import SoloTransport
from lengthwise.core.errors import OutputError
from lengthwise.models import DTYPES, ModelSource, build_model, cast_parameters, find_model, save_model
from lengthwise.train.flat import FlatParameters

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


@pytest.mark.parametrize("precision", DTYPES)
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


def test_saved_model_says_what_the_trained_one_said(tmp_path):
    model = build_model(source(), seed=1, attention="sdpa")
    FlatParameters(model, SoloTransport(), dtype=torch.float32)
    save_model(model, tmp_path / "model")
    opened = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    ids = torch.arange(9)[None]
    with torch.no_grad():
        assert torch.equal(model(ids, use_cache=False).logits, opened(ids, use_cache=False).logits)


def test_saved_model_is_found_and_built_again(tmp_path):
    model = build_model(source(), seed=1)
    save_model(model, tmp_path / "model")
    found = find_model(str(tmp_path / "model"))
    assert found.weights
    again = build_model(found, seed=99)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    found.config.save_pretrained(tmp_path / "bare")
    assert not find_model(str(tmp_path / "bare")).weights


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


def test_cast_leaves_rope_frequencies_in_fp32():
    model = cast_parameters(build_model(source(), seed=1), "bf16")
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert model.model.rotary_emb.inv_freq.dtype == torch.float32


def test_tiny_has_about_a_million_parameters_and_grouped_heads():
    found = find_model("tiny")
    model = build_model(found, seed=0)
    assert 0.8e6 < sum(parameter.numel() for parameter in model.parameters()) < 1.5e6
    assert found.config.num_key_value_heads < found.config.num_attention_heads
