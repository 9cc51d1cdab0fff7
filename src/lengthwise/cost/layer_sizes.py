"""Sizes of parts of layers, from a Hugging Face config, as fields of a `ModelShape`.

Projections of attention (`full_heads`, `projections_of`, `layer_inputs`), MLPs and experts (`mlps_of`), and layers that
mix tokens without attention (`mixers_of`: gated delta rule, KDA, Mamba 2, convolutions). Of the last, costs need the
parameters in matrix products, FLOPs of scans, numbers in the map of a state, and numbers kept for backward. FLOPs of a
scan in chunks of c tokens, per head with a state (k, v): 6 k v to read and update it, and 4 c (k + v) inside a chunk.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lengthwise.core.trained import MIXERS_OF, UNGATED

# families whose attention has a gate as large as its queries
_GATED = ("afmoe", "beam", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next")
Size = Callable[..., int]
WIDTH = ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size", "dff")
EXPERT_WIDTH = ("moe_intermediate_size", "expert_ffn_hidden_size")
_SHARED_WIDTH = ("moe_shared_expert_intermediate_size", "shared_expert_intermediate_size", "shared_intermediate_size")
_SHARED = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts", "num_shared_expert")
_FIRST = ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index")  # first layers have no experts
_EVERY = ("moe_layer_interval", "decoder_sparse_step")  # one in so many layers has experts
_CHUNK = 64  # tokens per chunk of delta rules; Mamba 2 has it in its config


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
    """Return the field of a `ModelShape` for the projections of layers that attend; {} for those of plain heads.

    sizes: hidden, heads, kv_heads, head_dim, and the result of `full_heads`. windowed: number of layers with a window.
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
    rope, nope, latent = (int(config[key]) for key in ("qk_rope_head_dim", "qk_nope_head_dim", "kv_lora_rank"))
    values, queries = int(config.get("v_head_dim") or nope), config.get("q_lora_rank")
    of_queries = heads * (rope + nope)
    down = hidden * of_queries if not queries else int(queries) * (hidden + of_queries)
    return down + hidden * (latent + rope) + latent * heads * (nope + values) + heads * values * hidden


def mlps_of(
    config: Mapping[str, Any], kinds: Sequence[str], experts: int, size: Size, *, at: Sequence[int] | None = None
) -> dict[str, Any]:
    """Return the fields of a `ModelShape` for the MLPs of layers of these kinds.

    size: function that reads the config's first of some keys, a positive whole number, or its `default`. at: numbers of
    the layers that count (default: all).
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
    """Return which layers have an MLP or experts; if some layers are only that, no others have any."""
    alone = [kind in ("mlp", "moe") for kind in kinds]
    return alone if any(alone) else [True] * len(kinds)


def _sparse_layers(config: Mapping[str, Any], kinds: Sequence[str]) -> list[bool]:
    """Return which layers have experts, by the keys of several families' configs."""
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


def mixers_of(config: Mapping[str, Any], kinds: Sequence[str], hidden: int) -> dict[str, int]:
    """Return the fields of a `ModelShape` for layers of these kinds, or {} if all of them attend."""
    counts = Counter(kinds)
    states, convolutions = counts["linear_attention"] + counts["hybrid"], counts["conv"]
    attending = (
        sum(counts[kind] for kind in counts if MIXERS_OF.get(kind, 1)) - counts["linear_attention"] - convolutions
    )
    if attending == len(kinds) and not states:
        return {}
    sizes = {"mixer_params": 0, "scan_flops": 0, "map_values": 0, "mixer_kept": 0}
    if states:
        sizes = _with_states(config, hidden)
    if convolutions:  # three projections in, a product before and after the convolution, one out
        sizes = {**sizes, "mixer_params": 4 * hidden * hidden, "mixer_kept": 6 * hidden}
    layers = states + convolutions
    scaled = {name: layers * sizes[name] for name in ("mixer_params", "scan_flops", "mixer_kept")}
    return {"attention_layers": attending, "state_layers": states, "map_values": sizes["map_values"], **scaled}


def _with_states(config: Mapping[str, Any], hidden: int) -> dict[str, int]:
    def size(default: int, *keys: str) -> int:
        return next((int(config[key]) for key in keys if config.get(key) is not None), default)

    if any(key in config for key in ("mamba_n_heads", "mamba_num_heads", "ssm_state_size", "mamba_d_state")):
        heads, head = size(128, "mamba_n_heads", "mamba_num_heads"), size(64, "mamba_d_head", "mamba_head_dim")
        state, groups = size(128, "mamba_d_state", "ssm_state_size"), size(1, "mamba_n_groups", "n_groups")
        chunk, inner = size(256, "mamba_chunk_size", "chunk_size"), heads * head
        mixed = inner + 2 * groups * state
        return _sizes(
            params=hidden * (inner + mixed + heads) + inner * hidden,
            heads=heads,
            state=(head, state),
            chunk=chunk,
            of_map=heads,
            kept=2 * mixed + 3 * inner,
        )
    kimi = config.get("linear_attn_config")
    if isinstance(kimi, Mapping) or "linear_num_heads" in config or config.get("model_type") == "bailing_hybrid":
        kimi = kimi if isinstance(kimi, Mapping) else {}
        heads = int(kimi.get("num_heads", size(size(32, "num_attention_heads"), "linear_num_heads")))
        head = int(kimi.get("head_dim", size(128, "linear_head_dim")))
        inner = heads * head
        params, keys, values, key, value = (
            hidden * (4 * inner + 2 * head + heads) + 2 * head * inner,
            inner,
            inner,
            head,
            head,
        )
    else:
        heads, key_heads = size(32, "linear_num_value_heads"), size(16, "linear_num_key_heads")
        key, value = size(128, "linear_key_head_dim"), size(128, "linear_value_head_dim")
        keys, values = key_heads * key, heads * value
        params = hidden * (2 * keys + 3 * values + 2 * heads)
    return _sizes(
        params=params,
        heads=heads,
        state=(key, value),
        chunk=_CHUNK,
        of_map=heads * key * key,
        kept=2 * (2 * keys + values) + 5 * values,
    )


def _sizes(*, params: int, heads: int, state: tuple[int, int], chunk: int, of_map: int, kept: int) -> dict[str, int]:
    first, second = state
    return {
        "mixer_params": params,
        "scan_flops": heads * (6 * first * second + 4 * chunk * (first + second)),
        "map_values": heads * first * second + of_map,
        "mixer_kept": kept,
    }
