"""Tiny configs of every causal-LM family of the installed transformers, and of the variants that a family has.

A family keeps what is its own (windows, experts, kinds of layers, caps) and only its sizes shrink. What a config leaves
off by default but the family knows (sliding layers beside full ones) is switched on, so that a proof covers it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from lengthwise.core.trained import WITH_TOWERS
from lengthwise.models import ROUTER_FAMILIES, coefficient_key
from lengthwise.models.computing import Layers

MODEL_TYPES = tuple(sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))
VOCAB = 48

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
}
"""A tiny model of a family whose config has the usual names."""

_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "encoder_layers")
_HEADS = ("num_attention_heads", "n_head", "n_heads", "decoder_attention_heads", "encoder_attention_heads", "num_heads")

_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id", "cls_token_id", "sep_token_id")

# Four layers of which the upper two take the keys and values of the lower two.
_SHARED_KEYS = {
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_kv_shared_layers": 2,
}

# Caps of the size of tiny models' scores and logits, so that they show.
_CAPS = {"query_pre_attn_scalar": 8, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}

# Factors of published models, which are 1 by default.
_SCALES = {
    "embedding_multiplier": 5.7,
    "lm_head_multiplier": 0.4,
    "key_multiplier": 0.6,
    "ssm_multipliers": [0.35, 0.25, 0.2, 0.5, 0.4],
}

# What makes a model of a family tiny, by whatever name the family has for it; the rest stays as the family has it.
_SIZES = {
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), VOCAB),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "dim"), 32),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "ffn_hidden_size", "decoder_ffn_dim", "encoder_ffn_dim"), 48),
    **dict.fromkeys(_LAYERS, 2),
    **dict.fromkeys(_HEADS, 4),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx"), 128),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    "n_shared_experts": 1,
    "mlp_only_layers": [0],  # a dense layer below one with experts
    "num_key_value_heads": 2,
    "head_dim": 8,
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "top_k_experts"), 2),
    **dict.fromkeys(("moe_intermediate_size", "expert_ffn_hidden_size"), 24),
    **dict.fromkeys(("sliding_window", "attention_chunk_size"), 6),
    "hidden_size_per_layer_input": 8,
    "laurel_rank": 8,
    # Heads of multi-head latent attention, with values smaller than keys; groups of experts to choose from.
    "q_lora_rank": 12,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    # Heads of layers with states, by the names of delta rules and of Mamba 2.
    **dict.fromkeys(("linear_num_key_heads", "mamba_n_groups", "n_groups"), 2),
    **dict.fromkeys(("linear_num_value_heads", "linear_num_heads", "mamba_n_heads", "mamba_num_heads"), 4),
    **dict.fromkeys(("linear_key_head_dim", "linear_head_dim", "mamba_d_state", "ssm_state_size"), 8),
    **dict.fromkeys(("mamba_d_head", "mamba_head_dim", "mamba_chunk_size", "chunk_size"), 16),
    "linear_value_head_dim": 6,
    "shared_expert_intermediate_size": 24,
    "n_group": 2,
    "topk_group": 1,
    **dict.fromkeys(("first_k_dense_replace", "num_dense_layers"), 1),
    **dict.fromkeys(_TOKENS),
}

# Two layers with states, or convolutions, and one of attention between them.
_STATES, _CONVOLUTIONS = (
    {"num_hidden_layers": 3, "layer_types": [kind, "full_attention", kind]} for kind in ("linear_attention", "conv")
)

# What only these families need: sizes that depend on each other, or kinds of layers that their defaults leave out.
_OWN: dict[str, dict[str, Any]] = {
    "bailing_hybrid": {**_STATES, "head_dim": 8},
    "bamba": {"num_hidden_layers": 3, "attn_layer_indices": [1]},
    "cohere_compass_text": {"layer_types": None, "rope_parameters": None},
    **dict.fromkeys(("kimi_linear", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next"), _STATES),
    "cwm": {"bos_token_id": 0},
    **dict.fromkeys(("gemma3n_text", "gemma4_text", "gemma4_unified_text"), _SHARED_KEYS),
    "falcon_h1": {"mamba_d_ssm": 64, **_SCALES},
    "granitemoehybrid": {**_STATES, "shared_intermediate_size": 24},
    "hrm_text": {"prefix_lm": False},
    **dict.fromkeys(("gemma2", "vaultgemma"), _CAPS),
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 6},
    **dict.fromkeys(("lfm2", "lfm2_moe"), _CONVOLUTIONS),
    "longcat_flash": {"head_dim": 4, "zero_expert_num": 2},
    "mamba2": {"num_heads": 8, "head_dim": 8},
    "modernbert-decoder": dict.fromkeys(_TOKENS, 0),
    "nemotron": {"head_dim": 8},
    "nemotron_h": {"layer_types": ["linear_attention", "full_attention", "moe", "mlp", "linear_attention"]},
    "olmo_hybrid": {**_STATES, "linear_num_key_heads": 4},
    "qwen2_moe": {"use_sliding_window": False, "layer_types": ["full_attention"] * 2},
    "reformer": {"is_decoder": True},
    "zaya": {"num_experts_per_tok": 1},
}

# Ropes whose frequencies are the same at every length.
ROPES: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0, "original_max_position_embeddings": 32},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "rope_theta": 10000.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
}
# Half of the lengths that tests draw are above what these two were made for, half below.
_DYNAMIC = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 16,
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [1.0, 2.0, 3.0, 4.0],
}

# What a family can be besides its own default, by what people call it: (family, changes to its tiny config).
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    **{f"llama, rope {kind}": ("llama", {"rope_parameters": rope}) for kind, rope in ROPES.items()},
    "llama, rope dynamic": ("llama", {"rope_parameters": _DYNAMIC, "max_position_embeddings": 16}),
    "llama, rope longrope": ("llama", {"rope_parameters": _LONGROPE}),
    "phi3, rope longrope": ("phi3", {"rope_parameters": _LONGROPE, "original_max_position_embeddings": 16}),
    "llama, tied embeddings": ("llama", {"tie_word_embeddings": True}),
    "llama, untied embeddings": ("llama", {"tie_word_embeddings": False}),
    "llama, padded vocabulary": ("llama", {"vocab_size": 64}),
    "mistral, window": ("mistral", {"sliding_window": 6}),
    "mistral, no window": ("mistral", {"sliding_window": None}),
    "qwen2, no window": ("qwen2", {"use_sliding_window": False, "layer_types": ["full_attention"] * 2}),
    "qwen3, tied embeddings": ("qwen3", {"tie_word_embeddings": True}),
    "gemma3_text, logits capped by tanh": ("gemma3_text", {"final_logit_softcapping": 3.0}),
    "deepseek_v3, no latent queries": ("deepseek_v3", {"q_lora_rank": None}),
    "deepseek_v3, values larger than keys": ("deepseek_v3", {"v_head_dim": 20}),
    "deepseek_v3, rope yarn": (
        "deepseek_v3",
        {"rope_parameters": {**ROPES["yarn"], "mscale": 1.0, "mscale_all_dim": 1.0}},
    ),
    **{
        f"{family}, router loss": (family, {"output_router_logits": True, coefficient_key(family): 0.5})
        for family in ROUTER_FAMILIES
        if family not in WITH_TOWERS
    },
}


def tiny_family_config(model_type: str, changes: Mapping[str, Any] | None = None) -> Any:
    """Return a tiny config of the family, with windows, experts and each kind of layer that it has; `changes` win.

    Raises:
        ValueError: the family is a part of a composite model (vision, audio).
    """
    base = AutoConfig.for_model(model_type)
    if getattr(base, "text_config", None) is not None:
        raise ValueError("a composite model with a text part")
    shape = base.to_dict()
    names = {*shape, *type(base).attribute_map}
    sizes: dict[str, Any] = {name: value for name, value in _SIZES.items() if name in names}
    sizes |= {name: 0.0 for name in names if "dropout" in name or name.endswith(("pdrop", "layerdrop"))}
    if "qk_rope_head_dim" in names:  # latent attention: every head has keys of its own, and head_dim is not theirs
        sizes["num_key_value_heads"] = sizes["num_attention_heads"]
        sizes.pop("head_dim", None)
    if shape.get("q_lora_rank", 1) is None:
        del sizes["q_lora_rank"]
    if "use_sliding_window" in names:
        sizes["use_sliding_window"] = True
    kinds = _kinds(base, names)
    if kinds:
        sizes |= dict.fromkeys((name for name in _LAYERS if name in names), max(2, len(kinds)))
        sizes["layer_types"] = kinds if len(kinds) > 1 else kinds * 2
    return type(base)(**{**sizes, **_OWN.get(model_type, {}), **(changes or {})})


def _kinds(base: Any, names: set[str]) -> list[str]:
    """List the kinds of layers of a family, sliding ones too where it has a window and does not list them."""
    key = type(base).attribute_map.get("layer_types", "layer_types")
    if isinstance(getattr(type(base), key, None), property):  # not to be set: it follows from other keys
        return []
    kinds: set[str] = set(getattr(base, "layer_types", None) or ())
    if kinds == {"full_attention"} and "sliding_window" in names:
        kinds.add("sliding_attention")
    return sorted(kinds, reverse=True)


def put_forwards(model, chosen):
    """Let a model compute by forwards that were chosen for it; return what was said of them."""
    forwards, said = chosen
    Layers(model=model, forwards=forwards, experts=None).put()
    return said
