"""Model shapes: the named ones and those of Hugging Face configs."""

import json
from dataclasses import replace
from typing import Any

import pytest

from lengthwise.core.errors import ConfigError, Problems
from lengthwise.core.trained import FAMILIES
from lengthwise.cost import (
    SHAPE_NAMES,
    Cost,
    all_terms_cost,
    analytic_cost,
    layer_shapes,
    named_hardware,
    named_shape,
    shape_from_config,
    step_flops,
)
from lengthwise.cost.analytic import layer_flops, layer_seconds

MISTRAL: dict[str, Any] = {
    "model_type": "mistral", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 32000,
}  # fmt: skip


CARDS = {  # parameters in billions, as the model's card says
    "Qwen/Qwen3-0.6B": 0.75, "qwen3-8b": 8.19, "mixtral-8x7b": 46.7, "Qwen/Qwen3-30B-A3B": 30.5,
    "Qwen/Qwen3-235B-A22B-Instruct-2507": 235, "Qwen/Qwen3-VL-32B-Instruct": 32.8, "Qwen/Qwen2.5-7B-Instruct": 7.61,
    "Qwen/Qwen2.5-72B": 72.7, "meta-llama/Llama-3.3-70B-Instruct": 70.6, "google/gemma-3-12b-it": 12.8,
    "mistralai/Mistral-7B-Instruct-v0.3": 7.25, "mistralai/Mistral-Small-3.2-24B-Instruct-2506": 23.6,
    "mistralai/Ministral-3-8B-Reasoning-2512": 8.5, "openai/gpt-oss-120b": 117, "microsoft/phi-4": 14.7,
    "Qwen/Qwen3.5-9B": 8.95, "Qwen/Qwen3.6-27B": 27, "Qwen/Qwen3-Next-80B-A3B-Instruct": 79.7,
    "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": 31.6, "moonshotai/Kimi-Linear-48B-A3B-Instruct": 49.1,
    "allenai/Olmo-3-1025-7B": 7.3, "allenai/Olmo-Hybrid-7B": 7.43, "deepseek-ai/DeepSeek-V3-0324": 671,
    "zai-org/GLM-4.7-Flash": 30, "MiniMaxAI/MiniMax-M2": 229, "ByteDance-Seed/Seed-OSS-36B-Instruct": 36.2,
    "tiiuae/Falcon-H1-7B-Instruct": 7.59,
}  # fmt: skip
SHARING = {  # of models whose head is their embedding
    "google/gemma-4-31B-it": 30.7, "google/gemma-4-26B-A4B-it": 25.2, "google/gemma-2-27b-it": 27.2,
    "ibm-granite/granite-4.0-h-small": 32.2, "ibm-granite/granite-4.0-h-tiny": 6.94, "LiquidAI/LFM2-8B-A1B": 8.34,
    "LiquidAI/LFM2-2.6B-Exp": 2.57, "LiquidAI/LFM2-350M": 0.354, "LiquidAI/LFM2.5-1.2B-Instruct": 1.17,
    "HuggingFaceTB/SmolLM3-3B-Base": 3.08,
}  # fmt: skip


def test_named_shape_knows_published_models_by_their_hub_names() -> None:
    """As many parameters as their cards say; a shape counts shared weights twice."""
    for name, billions in {**CARDS, **SHARING}.items():
        shape = named_shape(name)
        shared = shape.hidden * shape.vocab if name in SHARING else 0
        assert (shape.total_params - shared) / 1e9 == pytest.approx(billions, rel=0.01), name
    published = {named_shape(name).family for name in SHAPE_NAMES} - {""}
    assert published <= {*FAMILIES, "qwen3_vl_text", "qwen3_vl_moe_text"}


@pytest.mark.parametrize(("name", "billions"), [("nemotron-3-nano-30b-a3b", 3.2), ("deepseek-v3", 36.5)])
def test_a_token_passes_as_many_parameters_as_cards_call_active(name: str, billions: float) -> None:
    """Of latent attention, layers without experts, shared experts and MLPs without a gate, not of plain layers."""
    assert named_shape(name).linear_params / 1e9 == pytest.approx(billions, rel=0.04)


def test_heads_of_layers_without_a_window_count_where_they_differ() -> None:
    """Gemma 4 31B: 50 layers of 32 heads of 256, 16 for keys; 10 of 512, 4 for keys; both in costs."""
    shape = named_shape("google/gemma-4-31B-it")
    assert shape.query_width == 32 * (50 * 256 + 10 * 512)
    assert shape.key_width == 50 * 16 * 256 + 10 * 4 * 512
    assert shape.window_shares == ((1024, pytest.approx(50 * 256 / (50 * 256 + 10 * 512))),)
    plain = replace(shape, full_head_dim=None, full_kv_heads=None)
    hardware = named_hardware("h100")
    ours, other = analytic_cost(shape, hardware), analytic_cost(plain, hardware)
    assert ours.quadratic_seconds / other.quadratic_seconds == pytest.approx(shape.query_width / plain.query_width)
    assert ours.ring_bytes / other.ring_bytes == pytest.approx(shape.key_width / plain.key_width)
    assert all_terms_cost(shape, hardware).ring_bytes == 2 * shape.key_width * (2 * 2 + 4)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("somebody/a-model", "names on the hub are not looked up"),
        ("huggyllama/llama-7b", "Download its config"),  # ours has other KV heads
        ("mixtral-8x7", "Did you mean `mixtral-8x7b`"),
        ("./qwen3-8b", "which does not exist"),
    ],
)
def test_named_shape_refuses_what_it_does_not_know(name, said):
    with pytest.raises(ConfigError, match=said):
        named_shape(name)


@pytest.mark.parametrize(
    ("changes", "read"),
    [
        ({}, {"name": "mistral", "family": "mistral", "head_dim": 128, "kv_heads": 8, "experts": 1}),
        ({"num_key_value_heads": None, "head_dim": None}, {"kv_heads": 32, "head_dim": 128}),
        ({"num_local_experts": 8, "num_experts_per_tok": 2}, {"experts": 8, "experts_per_token": 2}),
        ({"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}, {"intermediate": 768}),
        ({"moe_num_experts": 64, "moe_k": 6, "moe_intermediate_size": 9}, {"experts_per_token": 6, "intermediate": 9}),
        ({"num_local_experts": 0, "num_experts_per_tok": 0, "shared_intermediate_size": 64}, {"intermediate": 64}),
        ({"model_type": "lfm2", "intermediate_size": 8192, "block_ff_dim": 12288}, {"intermediate": 8192}),
        (
            {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 9, "first_k_dense_replace": 99},
            {},
        ),
        # null or nothing is four times the hidden size in GPT-2
        ({"intermediate_size": None, "n_inner": None}, {"intermediate": 4 * 4096}),
    ],
)
def test_shape_from_config_reads_sizes(changes: dict[str, Any], read: dict[str, Any]) -> None:
    shape = shape_from_config({**MISTRAL, **changes})
    assert {name: getattr(shape, name) for name in read} == read
    assert read or shape == shape_from_config(MISTRAL)


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"num_hidden_layers": 0, "vocab_size": ...}, "(?s)num_hidden_layers.*vocab_size"),
        *(({"hidden_size": value}, "hidden_size") for value in (None, 2.5)),
        ({"num_local_experts": 8}, "num_experts_per_tok: .*got nothing"),
        ({"num_experts_per_tok": 2}, "num_local_experts: .*got nothing"),
        ({"model_type": "gemma", "num_attention_heads": 16, "hidden_size": 3072}, "head_dim: .*got nothing"),  # 256
        ({"intermediate_size": ...}, "intermediate_size"),
    ],
)
def test_shape_from_config_names_the_bad_key_and_guesses_nothing_that_families_do_otherwise(changes, key):
    config = {name: value for name, value in {**MISTRAL, **changes}.items() if value is not ...}
    with pytest.raises((ConfigError, Problems), match=key):
        shape_from_config(config)


def test_shape_from_config_reads_the_text_part_of_a_model_with_pictures() -> None:
    assert shape_from_config({"model_type": "gemma3", "text_config": MISTRAL, "vision_config": {}}).layers == 32


SIX = {"model_type": "mistral", "num_hidden_layers": 6, "sliding_window": 8}


@pytest.mark.parametrize(
    ("config", "windows"),
    [
        ({**SIX}, ((8, 6),)),
        ({**SIX, "use_sliding_window": False}, ()),
        ({**SIX, "layer_types": ["sliding_attention"] * 5 + ["full_attention"]}, ((8, 5),)),
        ({**SIX, "sliding_window_pattern": 6}, ((8, 5),)),
        # what older configs leave to their family: off in Qwen2 unless use_sliding_window says so
        ({"model_type": "qwen2", "sliding_window": 4096}, ()),
        (
            {"model_type": "qwen2", "sliding_window": 4096, "use_sliding_window": True, "max_window_layers": 20},
            ((4096, 12),),
        ),
        ({"model_type": "gemma2", "head_dim": 256, "sliding_window": 4096}, ((4096, 16),)),
        ({"model_type": "gemma3_text", "head_dim": 256, "sliding_window": 512}, ((512, 27),)),
    ],
)
def test_shape_from_config_reads_windows(config, windows):
    shape = shape_from_config({**MISTRAL, **config})
    assert shape.windows == windows
    shares = tuple((window, layers / shape.layers) for window, layers in windows)
    assert analytic_cost(shape, named_hardware("h100")).windows == shares


def test_named_shape_reads_a_models_folder(tmp_path, monkeypatch) -> None:
    folder = tmp_path / "my-model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(MISTRAL))
    monkeypatch.chdir(tmp_path)
    for name in (str(folder), str(folder / "config.json"), "my-model", "./my-model", "my-model/"):
        assert named_shape(name) == shape_from_config(MISTRAL, name="my-model")
    (tmp_path / "tiny").mkdir()
    assert named_shape("tiny").layers == 2, "a named shape wins; ./tiny means the folder"
    with pytest.raises(ConfigError, match=r"tiny/config\.json: .*No such file"):
        named_shape("./tiny")


def test_layers_weigh_what_their_kinds_and_windows_take() -> None:
    """Of each layer alone, as of the whole model."""
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128, "vocab_size": 256}
    scan = {"mamba_num_heads": 4, "mamba_head_dim": 16, "ssm_state_size": 8, "n_groups": 2}
    letters = {**sizes, **scan, "model_type": "nemotron_h", "hybrid_override_pattern": "M*-M"}
    windows = {**sizes, "model_type": "gemma2", "num_hidden_layers": 4, "sliding_window": 16, "head_dim": 16}
    gated = {**sizes, "model_type": "qwen3_5_text", "num_hidden_layers": 4, "head_dim": 16, "linear_key_head_dim": 8}
    for config in (letters, windows, gated):
        flops, head = layer_flops(layer_shapes(config), [40, 70])
        assert sum(flops) + head == pytest.approx(step_flops(shape_from_config(config), [40, 70]))
    first, attends, mlp, last = layer_shapes(letters)
    assert (attends.num_attention, attends.num_mlp, mlp.num_attention, mlp.num_mlp) == (1, 0, 0, 1)
    assert first == last
    assert [each.windows for each in layer_shapes(windows)] == [((16, 1),), (), ((16, 1),), ()]
    assert [each.num_attention for each in layer_shapes(gated)] == [0, 0, 0, 1]
    cost = Cost(quadratic_seconds=2.0, linear_seconds=3.0, fixed_seconds=4.0, embedding_seconds=0.5, head_seconds=1.0)
    (m, star, dash, again), embedding, head = layer_seconds(cost, layer_shapes(letters), [5], capacity=10)
    assert (embedding, head, m) == (2.5, 5.0, again)
    assert m + star + dash + again == pytest.approx(2 * 25 + 3 * 5 + 4 * 5 / 10 - 7.5)
    assert star > 2 * 25  # all attention
