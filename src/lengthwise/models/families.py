"""Which models are proved equal to plain Hugging Face, and what in their config stops a run before it starts.

`core/families.json` lists those proved by `tests/models/test_models_families.py` (`make families`); all others are
refused by name, as an unknown part could mix documents of a pack and be silently wrong.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from lengthwise.core.errors import LengthwiseError, ModelRefused, raise_problems
from lengthwise.core.trained import FAMILIES, USE_OTHERS, family_refusal, layer_types
from lengthwise.models.dropout import DROPOUT_FAMILIES, DROPOUT_KEYS
from lengthwise.models.mixers import has_states
from lengthwise.models.refusals import refused_model
from lengthwise.models.rope import LENGTH_ROPE
from lengthwise.models.router import router_problems
from lengthwise.models.text_part import has_towers, text_config

# Families whose layers do not hand their window to attention: Hugging Face puts it into a mask, and we make none.
WINDOW_IN_MASK = ("qwen2_moe",)

# Families whose layers hand their cap of scores to attention; others with such a key leave it out without a word.
SOFTCAP_FAMILIES = ("gemma2", "vaultgemma")

# Config keys with one of these words make a layer draw random numbers.
RANDOM_WORDS = ("dropout", "pdrop", "jitter", "layerdrop", "drop_path")

_NOT_IN_CAUSAL_LMS = ("summary_", "classifier_")  # of other heads of the same family

# RoPE kinds whose frequencies do not depend on how long the sequence at hand is.
STATIC_ROPE = ("default", "linear", "llama3", "yarn", "proportional")

_SWITCHES = {
    "prefix_lm": (
        "false (a prefix that sees itself both ways)",
        f"Set prefix_lm to false. With it: {USE_OTHERS.lower()}.",
    ),
    "quantization_config": (
        "none (a quantised model)",
        "Use the model's full-precision weights, or plain TRL.",
    ),
}


def check_model_config(config: Any) -> None:
    """Refuse a config with parts that a plan would compute wrongly: a ModelRefused with each and its remedy.

    Of a model with towers that is that of the whole; its text part is what has to be right.
    """
    whole, config = config, text_config(config)
    problems: list[LengthwiseError] = [] if _is_listed(whole) else [*refused_model(whole)]
    is_listed = not problems

    def refuse(where: str, expected: str, got: object, remedy: str) -> None:
        problems.append(ModelRefused(f"model config: {where}", expected=expected, got=str(got), remedy=remedy))

    for key, value in config.to_dict().items():
        if value and any(word in key for word in RANDOM_WORDS) and not key.startswith(_NOT_IN_CAUSAL_LMS):
            if key in DROPOUT_KEYS and config.model_type in DROPOUT_FAMILIES:
                continue
            inside = any(word in key for word in ("attention", "attn"))
            where = "inside of attention kernels" if inside else "in training"
            expected = f"0 (what is drawn at random {where} is not supported yet)"
            refuse(key, expected, value, f"Set {key} to 0.")
    both_ways = getattr(config, "use_bidirectional_attention", None)  # "vision" is about tokens of images: none here
    if getattr(config, "is_causal", None) is False or both_ways not in (None, False, "vision"):
        remedy = "Use a causal language model."
        refuse("is_causal", "causal attention (each token sees those before it)", "bidirectional", remedy)
    known = (*STATIC_ROPE, *LENGTH_ROPE)
    for where, kind in rope_kinds(config):
        if kind not in known:
            remedy = f"{USE_OTHERS}."
            refuse(where, f"one whose frequencies are known ({', '.join(known)})", kind, remedy)
    for key, (expected, remedy) in _SWITCHES.items():
        if value := getattr(whole, key, None) or getattr(config, key, None):
            refuse(key, expected, value, remedy)
    if is_listed:
        for where, kind in _other_layers(config):
            expected = f"layers of kinds that are known in this family ({', '.join(layer_types(config.model_type))})"
            refuse(where, expected, kind, f"{USE_OTHERS}.")
    problems += router_problems(whole)
    raise_problems(problems)


def _is_listed(config: Any) -> bool:
    if has_towers(config):
        return family_refusal(config.to_dict(), "model") is None
    return config.model_type in FAMILIES


def _other_layers(config: Any) -> Iterator[tuple[str, str]]:
    """Yield (config entry, kind) for what attention cannot do in a listed family, once a kind."""
    if (cap := score_cap(config)) and config.model_type not in SOFTCAP_FAMILIES:
        yield "attn_logit_softcapping", f"{cap} (the layers of {config.model_type} do not hand it to attention)"
    kinds: list[str] = list(getattr(config, "layer_types", None) or ())
    for kind in sorted(set(kinds)):
        where = f"layer_types[{kinds.index(kind)}]"
        if kind not in layer_types(config.model_type):
            yield where, kind
        elif kind == "sliding_attention" and config.model_type in WINDOW_IN_MASK:
            yield where, f"{kind} (the layers of {config.model_type} do not hand their window to attention)"


def largest_head_dim(config: Any) -> int:
    """Return the largest head that any attention of the model has, by what its config says."""
    config = text_config(config)
    layers = getattr(config, "per_layer_config", None) or [config]  # where layers differ, the config has one for each
    named = ("head_dim", "global_head_dim", "v_head_dim")
    latent = ("qk_nope_head_dim", "qk_rope_head_dim")
    sizes = [getattr(layer, name, None) or 0 for layer in layers for name in named]
    sizes += [sum(getattr(layer, name, None) or 0 for name in latent) for layer in layers]
    return max(sizes) or config.hidden_size // config.num_attention_heads


def attention_heads(config: Any) -> tuple[int, int]:
    """Return (query heads, key heads) of the layer with most queries on a key, by what its config says."""
    config = text_config(config)
    layers = getattr(config, "per_layer_config", None) or [config]
    found = []
    for layer in layers:
        heads = getattr(layer, "num_attention_heads", None) or 1
        kv_heads = getattr(layer, "num_key_value_heads", None) or heads
        found.append((heads, kv_heads) if heads % kv_heads == 0 else (heads, heads))
    return max(found, key=lambda each: each[0] // each[1])


def has_windows(config: Any) -> bool:
    """Return whether some layer of the model may attend in a sliding window, by what its config says."""
    config = text_config(config)
    layers = getattr(config, "per_layer_config", None) or [config]
    return any(
        getattr(layer, "sliding_window", None) and getattr(layer, "use_sliding_window", True) for layer in layers
    )


def score_cap(config: Any) -> float | None:
    """Return at what size the model caps its attention scores by tanh, by what its config says; None: it does not."""
    return getattr(config, "attn_logit_softcapping", None) or None


def rope_kinds(config: Any) -> list[tuple[str, str]]:
    """List (config path, RoPE kind): one for the model, or one for each kind of layer where they differ."""
    rope = getattr(config, "rope_parameters", None) or {}
    nested = {f"rope_parameters.{name}": each for name, each in rope.items() if isinstance(each, dict)}
    return [
        (f"{where}.rope_type", each.get("rope_type", "default"))
        for where, each in (nested or {"rope_parameters": rope}).items()
    ]


def position_limit(config: Any) -> int | None:
    """Return how long a sequence may be where positions are looked up in a table; None where rope, or a state, is."""
    config = text_config(config)
    is_free = bool(getattr(config, "rope_parameters", None)) or has_states(config)
    return None if is_free else getattr(config, "max_position_embeddings", None)
