"""Parameters of attention projections, from a Hugging Face config, where they are not those of plain heads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# families whose attention has a gate as large as its queries
_GATED = ("afmoe", "beam", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next")


def full_heads(config: Mapping[str, Any]) -> dict[str, int]:
    """Return the fields of a `ModelShape` for the heads of layers without a window, if they differ (gemma4)."""
    overrides: Any = config.get("per_layer_config") or {}
    first: Mapping[str, Any] = next(iter(overrides.values()), {}) if isinstance(overrides, Mapping) else {}
    head, keys = config.get("global_head_dim") or first.get("head_dim"), first.get("num_key_value_heads")
    if config.get("attention_k_eq_v", "global_head_dim" in config):
        keys = config.get("num_global_key_value_heads") or keys
    found = {"full_head_dim": head, "full_kv_heads": keys}
    return {name: int(value) for name, value in found.items() if value is not None}


def projections_of(
    config: Mapping[str, Any], sizes: Mapping[str, int], attending: int, windowed: int, *, share: float = 1.0
) -> dict[str, int]:
    """Return the field of a `ModelShape` for the projections of layers that attend; {}: those of plain heads.

    sizes: hidden, heads, kv_heads, head_dim, and what `full_heads` returned. windowed: number of layers with a window.
    share: these layers' share of the model's.
    """
    hidden, heads = sizes["hidden"], sizes["heads"]
    if config.get("qk_rope_head_dim") and config.get("qk_nope_head_dim"):
        return {"attention_params": attending * _latent(config, hidden, heads)}
    if config.get("model_type") in _GATED:
        width = sizes["head_dim"] * (3 * heads + 2 * sizes["kv_heads"])
        return {"attention_params": attending * hidden * width}
    shared = share * int(config.get("num_kv_shared_layers") or 0)
    if "full_head_dim" not in sizes:
        return {}
    head, keys = sizes["full_head_dim"], sizes.get("full_kv_heads", sizes["kv_heads"])
    full, of_keys = attending - windowed, 1 if config.get("attention_k_eq_v") else 2
    whole = windowed * sizes["head_dim"] * (2 * heads + 2 * sizes["kv_heads"])
    whole += full * head * (2 * heads + of_keys * keys)
    share_full = shared * full / max(1, attending)  # layers that share keys, in proportion to the kinds
    share_full = round(share_full) if share == 1 else share_full
    without = (shared - share_full) * sizes["head_dim"] * 2 * sizes["kv_heads"] + share_full * head * of_keys * keys
    return {"attention_params": round(hidden * (whole - without))}


def layer_inputs(config: Mapping[str, Any], layers: int, hidden: int) -> dict[str, int]:
    """Return the fields of a `ModelShape` for embeddings of each layer's own (gemma3n, gemma4 E2B, E4B)."""
    width, words = config.get("hidden_size_per_layer_input"), config.get("vocab_size_per_layer_input")
    if not width or not words:
        return {}
    return {"lookup_params": layers * int(width) * int(words), "mixer_params": 3 * layers * int(width) * hidden}


def _latent(config: Mapping[str, Any], hidden: int, heads: int) -> int:
    """Return the parameters of multi-head latent attention in a layer."""
    rope, nope, latent = (int(config[key]) for key in ("qk_rope_head_dim", "qk_nope_head_dim", "kv_lora_rank"))
    values, queries = int(config.get("v_head_dim") or nope), config.get("q_lora_rank")
    of_queries = heads * (rope + nope)
    down = hidden * of_queries if not queries else int(queries) * (hidden + of_queries)
    return down + hidden * (latent + rope) + latent * heads * (nope + values) + heads * values * hidden
