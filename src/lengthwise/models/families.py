"""Check by a config whether a plan computes a model right, and name the layers that it would compute wrongly.

`core/families.json` lists the families that `tests/models/test_models_families.py` (`make families`) proves equal to
plain Hugging Face. All others are refused by name, because an unknown part could mix documents of a pack and be
silently wrong.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from typing import Any

from torch import nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, BitsAndBytesConfig

from lengthwise.core.errors import ConfigError, LengthwiseError, ModelRefused, raise_problems
from lengthwise.core.trained import FAMILIES, USE_OTHERS, family_refusal, layer_types, towers
from lengthwise.models.dropout import DROPOUT_FAMILIES, DROPOUT_KEYS
from lengthwise.models.mixer_layers import has_states, runs_by_plan
from lengthwise.models.model_source import build_skeleton, size_problems
from lengthwise.models.rope import LENGTH_ROPE
from lengthwise.models.router import router_problems
from lengthwise.models.text_part import has_towers, layer_configs, text_config

# Families whose layers do not pass their window to attention: Hugging Face puts it into a mask, which we do not make.
WINDOW_IN_MASK = ("qwen2_moe",)

# Families whose layers pass their cap of scores to attention; others with such a key silently leave it out.
SOFTCAP_FAMILIES = ("gemma2", "vaultgemma")

# Config keys with one of these words make a layer draw random numbers.
RANDOM_WORDS = ("dropout", "pdrop", "jitter", "layerdrop", "drop_path")

_NOT_IN_CAUSAL_LMS = ("summary_", "classifier_")  # keys of other heads of the same family

# RoPE kinds whose frequencies do not depend on the sequence's length.
STATIC_ROPE = ("default", "linear", "llama3", "yarn", "proportional")

_SWITCHES = {
    "prefix_lm": (
        "false (a prefix that sees itself both ways)",
        f"Set prefix_lm to false. With it: {USE_OTHERS.lower()}.",
    ),
    "quantization_config": (
        "none (a quantised model)",
        "Use the model's full-precision weights, with quantization: nf4 in a run file.",
    ),
}


def check_model_config(config: Any) -> None:
    """Refuse a config with parts that a plan would compute wrongly. config: config of the whole model, with towers.

    Raises:
        ModelRefused, Problems: one message has all parts and remedies.
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
            where = "inside attention kernels" if inside else "in training"
            expected = f"0 (random numbers {where} are not supported yet)"
            refuse(key, expected, value, f"Set {key} to 0.")
    both_ways = getattr(config, "use_bidirectional_attention", None)  # "vision" applies to image tokens only
    if getattr(config, "is_causal", None) is False or both_ways not in (None, False, "vision"):
        remedy = "Use a causal language model."
        refuse("is_causal", "causal attention (a token sees only earlier ones)", "bidirectional", remedy)
    known = (*STATIC_ROPE, *LENGTH_ROPE)
    for where, kind in rope_kinds(config):
        if kind not in known:
            remedy = f"{USE_OTHERS}."
            refuse(where, f"a kind with known frequencies ({', '.join(known)})", kind, remedy)
    for key, (expected, remedy) in _SWITCHES.items():
        value = getattr(whole, key, None) or getattr(config, key, None)
        if value and not isinstance(value, BitsAndBytesConfig):  # which Hugging Face sets when it quantizes itself
            refuse(key, expected, value, remedy)
    if is_listed:
        for where, kind in _other_layers(config):
            expected = f"layers of the family's known kinds ({', '.join(layer_types(config.model_type))})"
            refuse(where, expected, kind, f"{USE_OTHERS}.")
    problems += [*router_problems(whole), *size_problems(whole)]
    raise_problems(problems)


def _is_listed(config: Any) -> bool:
    if has_towers(config):
        return family_refusal(config.to_dict(), "model") is None
    return config.model_type in FAMILIES


def _other_layers(config: Any) -> Iterator[tuple[str, str]]:
    """Yield (config entry, kind) for each kind of layer that a listed family should not have."""
    if (cap := score_cap(config)) and config.model_type not in SOFTCAP_FAMILIES:
        yield "attn_logit_softcapping", f"{cap} (the layers of {config.model_type} do not pass it to attention)"
    kinds: list[str] = list(getattr(config, "layer_types", None) or ())
    for kind in sorted(set(kinds)):
        where = f"layer_types[{kinds.index(kind)}]"
        if kind not in layer_types(config.model_type):
            yield where, kind
        elif kind == "sliding_attention" and config.model_type in WINDOW_IN_MASK:
            yield where, f"{kind} (the layers of {config.model_type} do not pass their window to attention)"


def largest_head_dim(config: Any) -> int:
    """Return the largest head dimension of the model's attentions, by its config."""
    layers = layer_configs(config)
    named = ("head_dim", "global_head_dim", "v_head_dim")
    latent = ("qk_nope_head_dim", "qk_rope_head_dim")
    sizes = [getattr(layer, name, None) or 0 for layer in layers for name in named]
    sizes += [sum(getattr(layer, name, None) or 0 for name in latent) for layer in layers]
    return max(sizes) or layers[0].hidden_size // layers[0].num_attention_heads


def attention_heads(config: Any) -> tuple[int, int]:
    """Return (query heads, key heads) of the layer with the most query heads per key head, by the config."""
    found = []
    for layer in layer_configs(config):
        heads = getattr(layer, "num_attention_heads", None) or 1
        kv_heads = getattr(layer, "num_key_value_heads", None) or heads
        found.append((heads, kv_heads) if heads % kv_heads == 0 else (heads, heads))
    return max(found, key=lambda each: each[0] // each[1])


def has_windows(config: Any) -> bool:
    """Return whether a layer may attend in a sliding window, by the config."""
    return any(
        getattr(layer, "sliding_window", None) and getattr(layer, "use_sliding_window", True)
        for layer in layer_configs(config)
    )


def score_cap(config: Any) -> float | None:
    """Return the size at which the model caps attention scores by tanh, by its config, or None."""
    return getattr(config, "attn_logit_softcapping", None) or None


def rope_kinds(config: Any) -> list[tuple[str, str]]:
    """List (config path, RoPE kind): one for the model, or one per kind of layer if they differ."""
    rope = getattr(config, "rope_parameters", None) or {}
    nested = {f"rope_parameters.{name}": each for name, each in rope.items() if isinstance(each, dict)}
    return [
        (f"{where}.rope_type", each.get("rope_type", "default"))
        for where, each in (nested or {"rope_parameters": rope}).items()
    ]


def position_limit(config: Any) -> int | None:
    """Return the longest sequence of a model with a table of positions, or None with RoPE or states."""
    config = text_config(config)
    is_free = bool(getattr(config, "rope_parameters", None)) or has_states(config)
    return None if is_free else getattr(config, "max_position_embeddings", None)


# Layers of families that are not listed: the modules of the model on the meta device are compared with the kinds
# below, by class name. A model of unknown kinds is reported by its attention layer, as not proved yet.

_STATE = "the layer's state passed between the ranks of a ring, and cleared at the start of each document of a pack"
_HALO = (
    "the tokens just before a shard, fetched from the rank that holds them, but none from another document of a pack"
)
_TOWER = "the tower's output for each image or sound, placed at its tokens on the ranks that hold them"
_ENCODER = "cross-attention over an encoder's states on every rank of a ring, and positions from outside"
_INTERFACE = "an attention that transformers' AttentionInterface can replace, with positions from outside"
_CHUNKS = "blocks that end at the border of a chunk"
_SPARSE = "the scores of all keys, on whichever rank they are, before attention, and blocks that follow the selection"
_BIAS = "a block kernel that adds the bias, by the tokens' positions in their sequence"
_PROOF = (
    "a proof: `python benchmarks/families.py {model_type}` compares it with plain Hugging Face; "
    "if it passes, add the name to lengthwise/core/families.json"
)

_INDEXED = (
    "model config: model_type",
    "sparse attention that chooses keys of the whole sequence by its scores",
    _SPARSE,
)
_BY_NAME = dict.fromkeys(("glm5_next", "glm5_next_text", "qwen4_exp", "qwen4_exp_text"), _INDEXED)
"""Obstacles of families whose default config has more than text, or cannot be built."""

_ALIBI = ("alibi: scores with a bias that grows with distance", _BIAS)
KINDS = {
    r"Vision|Siglip|CLIP|Audio|ImageEmbed|Perceiver": ("a tower for images or sound", _TOWER),
    r"^Mamba2Mixer$": (
        "a layer without forward's keyword arguments, which this family's causal language model drops",
        "another way for the plan to reach the layer",
    ),
    r"^Zamba2HybridLayer$": (
        "checkpointed layers inside of each other",
        "one checkpointed layer at a time, for recomputation",
    ),
    r"Delta(Net|Attention)|Lightning": ("linear attention, whose state runs through the whole sequence", _STATE),
    r"Mamba\d?(Mixer|Layer)?$|Mixer$": ("a Mamba layer (a selective state space)", _STATE),
    r"RecurrentBlock|RwkvSelfAttention|LSTMLayer": (
        "a recurrent layer, whose state runs through the whole sequence",
        _STATE,
    ),
    r"ShortConv|CCAProjection|^Conv1d$": ("a convolution over neighbouring tokens", _HALO),
    r"Indexer$|Compressor$": ("sparse attention that chooses keys of the whole sequence by its own scores", _SPARSE),
    r"CrossAttention$|DecoderWrapper$": ("a decoder made for the states of an encoder", _ENCODER),
    r"^(Bloom|Mpt)Attention$": _ALIBI,
    r"^FalconAttention$": _ALIBI,
    r"^(CpmAntSegmentPositionEmbedding|XLNetRelativeAttention|InklingAttention|Inkling2Attention)$": (
        "scores with a learned bias for each distance",
        f"{_BIAS}, and its gradient",
    ),
    r"(Bert\w*|Electra|Ernie|Roberta\w*|Data2VecText|Camembert|RoFormer|Xmod)SelfAttention$|BlockSparse": (
        "attention of a bidirectional encoder, with positions counted in the row",
        "causal attention (is_decoder), and positions of each sequence passed to the embedding",
    ),
    r"^PhimoeTopKRouter$": (
        "a router that draws random numbers in training",
        "random numbers keyed by the token's sequence and position, the same under every plan",
    ),
    r"^(StableLm|Nemotron)Attention$": (
        "a layer that does not pass forward's keyword arguments to its attention",
        "another way for the plan to reach the layer",
    ),
    r"^Llama4TextAttention$": ("attention inside chunks", _CHUNKS),
    r"^DogeAttention$": (
        "attention under a mask that is made from the keys and values",
        "that mask for every block, and its gradient",
    ),
    r"^DiffLlamaAttention$": (
        "two attentions per layer, one subtracted from the other",
        "support for two attentions in one layer, and a proof",
    ),
}
"""(description, needs of support) by a regular expression of class names; the first match counts."""

ONLY_WITH = {
    r"^FalconAttention$": "alibi",
    r"^Llama4TextAttention$": "attention_chunk_size",
}
"""Config keys without which layers of such names are not of that kind."""


_Reason = tuple[str, str, str]
"""(place, description, needs of support)."""


def refused_model(config: Any) -> list[ModelRefused]:
    """Return the refusals of a model of no listed family, at least one."""
    values = config.to_dict()
    if ((found := towers(values)) or has_towers(config)) and config.model_type not in _BY_NAME:
        where = f"{config.model_type}: model config: {', '.join(found)}"
        return [each for each in (family_refusal(values, where),) if each is not None]
    return [
        ModelRefused(
            f"{config.model_type}: {where}",
            expected="layers that this version trains (docs/families.md lists the families)",
            got=what,
            remedy=f"{USE_OTHERS}.",
        )
        for where, what, _ in reasons(config)
    ]


def reasons(config: Any) -> list[_Reason]:
    """List the obstacles in a model of no listed family."""
    if config.model_type in _BY_NAME:
        return [_BY_NAME[config.model_type]]
    if getattr(config, "is_encoder_decoder", False):
        return [("model config: is_encoder_decoder", "an encoder-decoder", _ENCODER)]
    if has_towers(config):
        return reasons(text_config(config))
    if found := towers(config.to_dict()):
        return [(f"model config: {', '.join(found)}", "a model of more than text", _TOWER)]
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        what = "a family without a causal language model in transformers"
        return [("model config: model_type", what, "a decoder-only language model")]
    try:
        model = build_skeleton(config)
    except ConfigError as error:  # report any error of an unproved model
        what = f"a family without a proof; its layers cannot be listed ({error.got[:160]})"
        return [("model config: model_type", what, _PROOF.format(model_type=config.model_type))]
    return _layers_of_kinds(model, config) or [_unproved(model, config)]


def _layers_of_kinds(model: nn.Module, config: Any) -> list[_Reason]:
    """List the first layer of each kind, with the number of its layers; their parts do not count."""
    kinds = {
        name: kind for name, kind in KINDS.items() if name not in ONLY_WITH or getattr(config, ONLY_WITH[name], None)
    }
    found: dict[tuple[str, str], list[tuple[str, nn.Module]]] = {}
    inside: str | None = None
    for path, module in model.named_modules():
        if not path or (inside is not None and path.startswith(inside)):
            continue
        kind = next((kind for name, kind in kinds.items() if re.search(name, type(module).__name__)), None)
        if kind is not None:
            inside = f"{path}."
            if kind[1] not in (_STATE, _HALO) or not runs_by_plan(type(module)):
                found.setdefault(kind, []).append((path, module))
    return [(_place(*places[0], len(places)), what, needed) for (what, needed), places in found.items()]


def _unproved(model: nn.Module, config: Any) -> _Reason:
    """Return the first attention layer, which is of an unknown kind or not proved yet."""
    attentions = [found for found in model.named_modules() if re.search("Attention|MLA", type(found[1]).__name__)]
    path, module = attentions[0] if attentions else ("model", model)
    place = _place(path or "model", module, len(attentions))
    if "ALL_ATTENTION_FUNCTIONS" in inspect.getsource(type(module)):
        return place, "a family without a proof", _PROOF.format(model_type=config.model_type)
    return place, "attention that does not use transformers' attention interface", _INTERFACE


def _place(path: str, module: nn.Module, count: int) -> str:
    return f"{path} ({type(module).__name__})" + (f", one of {count}" if count > 1 else "")
