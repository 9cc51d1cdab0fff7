"""Model shapes: the named ones and those of Hugging Face configs."""

from typing import Any

import pytest

from lengthwise.core.errors import ConfigError
from lengthwise.cost import SHAPE_NAMES, named_shape, shape_from_config

MISTRAL: dict[str, Any] = {
    "model_type": "mistral",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 32000,
}


@pytest.mark.parametrize(
    ("name", "layers", "heads", "hidden", "billions"),
    [
        ("llama-7b", 32, 32, 4096, 5.8),
        ("llama-13b", 40, 40, 5120, 11.2),
        ("llama-30b", 60, 56, 6656, 28.7),
        ("llama-70b", 80, 64, 8192, 68.7),
        ("mixtral-8x7b", 32, 32, 4096, 12.7),
        ("mixtral-8x22b", 56, 48, 6144, 38.8),
    ],
)
def test_named_shape_has_the_sizes_of_the_evaluation(
    name: str, layers: int, heads: int, hidden: int, billions: float
) -> None:
    shape = named_shape(name)
    assert (shape.layers, shape.heads, shape.hidden, shape.kv_heads) == (layers, heads, hidden, 8)
    assert shape.linear_params / 1e9 == pytest.approx(billions, rel=0.02)


def test_named_shape_names_the_nearest() -> None:
    assert named_shape(SHAPE_NAMES[0]).name == SHAPE_NAMES[0]
    with pytest.raises(ConfigError, match="Did you mean `mixtral-8x7b`"):
        named_shape("mixtral-8x7")


def test_shape_from_config_reads_mistral() -> None:
    shape = shape_from_config(MISTRAL)
    assert (shape.name, shape.head_dim, shape.kv_heads, shape.experts) == ("mistral", 128, 8, 1)


def test_shape_from_config_takes_all_heads_where_no_kv_heads_are_given() -> None:
    config = {key: value for key, value in MISTRAL.items() if key != "num_key_value_heads"}
    assert shape_from_config(config, name="old").kv_heads == 32


def test_shape_from_config_reads_explicit_head_dim() -> None:
    assert shape_from_config({**MISTRAL, "model_type": "qwen3", "hidden_size": 1024, "head_dim": 128}).head_dim == 128


def test_shape_from_config_takes_null_as_absent() -> None:
    assert shape_from_config({**MISTRAL, "head_dim": None, "num_key_value_heads": None}).kv_heads == 32


def test_shape_from_config_reads_mixtral_experts() -> None:
    shape = shape_from_config({**MISTRAL, "model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2})
    assert (shape.experts, shape.experts_per_token, shape.intermediate) == (8, 2, 14336)


def test_shape_from_config_reads_narrow_experts() -> None:
    config = {**MISTRAL, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}
    assert shape_from_config(config).intermediate == 768


@pytest.mark.parametrize("key", ["hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size"])
@pytest.mark.parametrize("value", [None, 0, -1, 2.5, True, "64"])
def test_shape_from_config_names_the_bad_key(key: str, value: object) -> None:
    with pytest.raises(ConfigError, match=key):
        shape_from_config({**MISTRAL, key: value})


def test_shape_from_config_names_missing_experts_per_token() -> None:
    with pytest.raises(ConfigError, match="num_experts_per_tok"):
        shape_from_config({**MISTRAL, "num_local_experts": 8})
