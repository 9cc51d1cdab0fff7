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
_FIRST = ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index")  # first layers have no experts
_EVERY = ("moe_layer_interval", "decoder_sparse_step")  # one in so many layers has experts


def mlps_of(
    config: Mapping[str, Any], kinds: Sequence[str], experts: int, size: Size, *, at: Sequence[int] | None = None
) -> dict[str, Any]:
    """Return the fields of a `ModelShape` for the MLPs of layers of these kinds.

    size: reads the first of some keys that the config has, a positive whole number, or its `default`. at: the numbers
    of the layers that count (default: all).
    """
    found: dict[str, Any] = {} if config.get("model_type") not in UNGATED else {"gated": False}
    layers = range(len(kinds)) if at is None else at
    having, beside = _main_mlps(config, kinds, experts), _beside(config, kinds, experts, size)
    main, width = sum(having[number] for number in layers), sum(beside[number] for number in layers)
    return found | ({} if main == len(layers) else {"mlp_layers": main}) | ({"dense_width": width} if width else {})


def has_experts(config: Mapping[str, Any], kinds: Sequence[str], experts: int) -> bool:
    """Return whether any layer has experts; a model cut to its first, dense layers has none."""
    return experts > 1 and any(_main_mlps(config, kinds, experts))


def _main_mlps(config: Mapping[str, Any], kinds: Sequence[str], experts: int) -> list[bool]:
    """Return which layers have experts, or the only MLP."""
    if experts == 1:
        return _with_any(kinds)
    if config.get("model_type") == "longcat_flash":  # experts beside two attentions and MLPs, counted as two layers
        return [number % 2 == 0 for number in range(len(kinds))]
    return _sparse_layers(config, kinds)


def _beside(config: Mapping[str, Any], kinds: Sequence[str], experts: int, size: Size) -> list[int]:
    """Return the width of each layer's MLPs that every token passes beside the main one."""
    layers, shares_keys = len(kinds), int(config.get("num_kv_shared_layers") or 0)
    last = size(*WIDTH) if config.get("use_double_wide_mlp") else 0  # additional width of layers that share keys
    found = [last * (number >= layers - shares_keys) for number in range(layers)]
    if experts == 1:
        return found
    sparse, own = _main_mlps(config, kinds, experts), _with_any(kinds)
    everywhere = config.get("model_type") == "longcat_flash"
    dense = [everywhere or (any_ and not has) for any_, has in zip(own, sparse, strict=True)]
    width = size("dense_intermediate_size", *WIDTH) if any(dense) else 0
    shared = _shared_width(config, size) if any(sparse) else 0
    return [more + width * own + shared * has for more, own, has in zip(found, dense, sparse, strict=True)]


def _with_any(kinds: Sequence[str]) -> list[bool]:
    """Return which layers have an MLP or experts; if some layers are nothing else, no others have any."""
    alone = [kind in ("mlp", "moe") for kind in kinds]
    return alone if any(alone) else [True] * len(kinds)


def _sparse_layers(config: Mapping[str, Any], kinds: Sequence[str]) -> list[bool]:
    """Return which layers have experts, in the ways of configs."""
    layers, listed, often = len(kinds), config.get("mlp_layer_types"), config.get("moe_layer_freq")
    if "moe" in kinds or "mlp" in kinds:
        return [kind == "moe" for kind in kinds]
    if isinstance(listed, list):
        return [kind == "sparse" for kind in listed]
    if isinstance(often, list):
        return [bool(each) for each in often]
    first, every = (next((int(config[key]) for key in keys if config.get(key)), 0) for keys in (_FIRST, _EVERY))
    without = config.get("mlp_only_layers") or ()
    return [number >= first and number not in without and (number + 1) % (every or 1) == 0 for number in range(layers)]


def _shared_width(config: Mapping[str, Any], size: Size) -> int:
    """Return the width that every token passes beside the experts of a layer."""
    if config.get("enable_moe_block"):  # gemma4: the layer's own MLP
        return size(*WIDTH)
    for key in _SHARED_WIDTH:
        if config.get(key) is not None:
            return int(config[key])
    shared: Any = next((config[key] for key in _SHARED if config.get(key)), 0)
    return (max(shared) if isinstance(shared, list) else int(shared)) * size(*EXPERT_WIDTH, *WIDTH)
