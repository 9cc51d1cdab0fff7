"""Model shapes: the named ones of `models.json`, and those read from a Hugging Face `config.json`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lengthwise.core.errors import ConfigError
from lengthwise.core.names import unknown_name
from lengthwise.core.shape import ModelShape
from lengthwise.cost.package_data import is_path, read_json_object, read_package_json

_SHAPES = read_package_json("lengthwise.cost", "models.json")["shapes"]
SHAPE_NAMES = tuple(_SHAPES)


def named_shape(name: str) -> ModelShape:
    """Look up a shape that ships with the package, or read a Hugging Face `config.json` given by its path.

    Args:
        name: one of `SHAPE_NAMES`, or a path (with a slash, or ending in .json).

    Raises:
        ConfigError: unknown name (the nearest one is given), or a file that is no model's config.
    """
    if is_path(name):
        path = Path(name)
        label = path.resolve().parent.name if path.name == "config.json" else path.stem
        return shape_from_config(read_json_object(name), name=label)
    if name not in _SHAPES:
        raise unknown_name("model shape", name, SHAPE_NAMES)
    return ModelShape(name=name, **_SHAPES[name])


# What configs call a size; the first that is there counts.
_HEADS = ("num_attention_heads", "n_head", "n_heads")
_HIDDEN = ("hidden_size", "n_embd", "d_model")
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
_WIDTH = ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size", "dff")
_EXPERT_WIDTH = ("moe_intermediate_size", "expert_ffn_hidden_size")
_ACTIVE = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "top_k_experts")


def shape_from_config(config: Mapping[str, Any], *, name: str | None = None) -> ModelShape:
    """Read the sizes from a Hugging Face config (llama, mistral, qwen3, mixtral and their like).

    `name` is what reports call the model (default: the config's `model_type`). With multi-head latent attention, every
    head has keys and values of the size of keys (the smaller values are filled up). Where each layer has sizes of its
    own the widest counts.

    Raises:
        ConfigError: a size that is missing or not a positive whole number.
    """
    label = name or str(config.get("model_type", "model"))
    heads = _first_size(config, _HEADS, label)
    hidden = _first_size(config, _HIDDEN, label)
    layers = _layers(config, label)
    experts = _first_size(config, _EXPERTS, label, 1)
    latent = config.get("qk_rope_head_dim") and config.get("qk_nope_head_dim")
    return ModelShape(
        name=label,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=heads if latent else _first_size(config, ("num_key_value_heads",), label, heads),
        head_dim=_size(config, "qk_nope_head_dim", label) + _size(config, "qk_rope_head_dim", label)
        if latent
        else _first_size(config, ("head_dim",), label, max(1, hidden // heads)),
        intermediate=_first_size(config, (*(_EXPERT_WIDTH if experts > 1 else ()), *_WIDTH), label, 4 * hidden),
        vocab=_size(config, "vocab_size", label),
        experts=experts,
        experts_per_token=_first_size(config, _ACTIVE, label) if experts > 1 else 1,
        windows=_windows(config, layers, label),
    )


def _layers(config: Mapping[str, Any], label: str) -> int:
    if config.get("model_type") == "longcat_flash":  # two attentions and two MLPs a layer
        return 2 * _size(config, "num_layers", label)
    return _first_size(config, _LAYERS, label)


def _windows(config: Mapping[str, Any], layers: int, label: str) -> tuple[tuple[int, int], ...]:
    """Find the sliding window and how many layers have it, in the three ways that configs say so."""
    if config.get("sliding_window") is None or config.get("use_sliding_window") is False:
        return ()
    window, kinds, pattern = _size(config, "sliding_window", label), config.get("layer_types"), None
    if kinds is None:
        pattern = config.get("sliding_window_pattern")
    if kinds is not None:
        having = sum(1 for kind in kinds if "sliding" in str(kind))
    elif isinstance(pattern, int) and pattern > 1:  # every pattern-th layer sees everything
        having = layers - layers // pattern
    else:
        having = layers
    return ((window, having),) if having else ()


def _first_size(config: Mapping[str, Any], keys: tuple[str, ...], label: str, default: int | None = None) -> int:
    for key in keys:
        if config.get(key) is not None:
            return _size(config, key, label)
    return default if default is not None else _size(config, keys[0], label)


def _size(config: Mapping[str, Any], key: str, label: str) -> int:
    value = config.get(key)
    if isinstance(value, list | tuple) and value and all(isinstance(each, int) for each in value):  # one a layer
        value = max(value)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(
            f"model {label}: config key {key}",
            expected="a whole number of at least 1",
            got="nothing" if value is None else repr(value),
            remedy="Mend the model's config.json.",
        )
    return value
