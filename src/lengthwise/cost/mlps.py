"""Sizes of MLPs, from a Hugging Face config: which layers have experts, and what every token passes beside them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lengthwise.core.trained import UNGATED

Size = Callable[..., int]
WIDTH = ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size", "dff")
EXPERT_WIDTH = ("moe_intermediate_size", "expert_ffn_hidden_size")
_SHARED_WIDTH = ("moe_shared_expert_intermediate_size", "shared_expert_intermediate_size", "shared_intermediate_size")
_SHARED = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts", "num_shared_expert")
_FIRST = ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index")  # layers without experts before others
_EVERY = ("moe_layer_interval", "decoder_sparse_step")  # which of the layers has experts


def mlps_of(config: Mapping[str, Any], kinds: Sequence[str], experts: int, size: Size) -> dict[str, Any]:
    """Return the fields of a `ModelShape` for the MLPs of layers of these kinds.

    size: reads the first of some keys that the config has, a positive whole number, or its `default`.
    """
    family, layers = config.get("model_type"), len(kinds)
    found: dict[str, Any] = {} if family not in UNGATED else {"gated": False}
    shares_keys = int(config.get("num_kv_shared_layers") or 0)
    wider = shares_keys * size(*WIDTH) if config.get("use_double_wide_mlp") else 0
    if experts == 1:
        having = _dense_kinds(kinds)
        return found | ({} if having == layers else {"mlp_layers": having}) | ({"dense_width": wider} if wider else {})
    sparse = _sparse_layers(config, kinds)
    dense = _dense_kinds(kinds) - sparse
    if family == "longcat_flash":  # experts beside two attentions with an MLP each, which are counted as layers
        sparse, dense = layers // 2, layers
    beside = dense * size("dense_intermediate_size", *WIDTH) if dense else 0
    beside += sparse * _shared_width(config, size) + wider
    return found | ({} if sparse == layers else {"mlp_layers": sparse}) | ({"dense_width": beside} if beside else {})


def _dense_kinds(kinds: Sequence[str]) -> int:
    """Count the layers with an MLP or experts; where some layers are nothing but one of these, no others have any."""
    alone = sum(kind in ("mlp", "moe") for kind in kinds)
    return alone or len(kinds)


def _sparse_layers(config: Mapping[str, Any], kinds: Sequence[str]) -> int:
    """Count the layers with experts, in the ways of configs."""
    layers, listed, often = len(kinds), config.get("mlp_layer_types"), config.get("moe_layer_freq")
    if "moe" in kinds:
        return sum(kind == "moe" for kind in kinds)
    if isinstance(listed, list):
        return sum(kind == "sparse" for kind in listed)
    if isinstance(often, list):
        return sum(map(bool, often))
    first, every = (next((int(config[key]) for key in keys if config.get(key)), 0) for keys in (_FIRST, _EVERY))
    without = config.get("mlp_only_layers") or ()
    return sum(
        number >= first and number not in without and (number + 1) % (every or 1) == 0 for number in range(layers)
    )


def _shared_width(config: Mapping[str, Any], size: Size) -> int:
    """Return the width of what every token passes beside the experts of a layer."""
    if config.get("enable_moe_block"):  # gemma4: the layer's own MLP
        return size(*WIDTH)
    for key in _SHARED_WIDTH:
        if config.get(key) is not None:
            return int(config[key])
    shared: Any = next((config[key] for key in _SHARED if config.get(key)), 0)
    return (max(shared) if isinstance(shared, list) else int(shared)) * size(*EXPERT_WIDTH, *WIDTH)
