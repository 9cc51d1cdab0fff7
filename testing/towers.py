"""Tiny configs of models with towers for images or sounds, with every kind of text part that they are trained with."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from transformers import CONFIG_MAPPING, SiglipVisionConfig

from lengthwise.core.trained import WITH_TOWERS, family_refusal
from lengthwise.models import ROUTER_FAMILIES, coefficient_key
from testing.tiny import VOCAB, tiny_family_config

_PAIRS = [  # with text parts that are known
    (whole, text)
    for whole, texts in WITH_TOWERS.items()
    for text in texts
    if family_refusal({"model_type": whole, "text_config": {"model_type": text}}, "") is None
]
TOWER_PAIRS: dict[str, tuple[str, str, dict[str, Any]]] = {  # with what changes of the text part
    **{f"{whole}, {text}": (whole, text, {}) for whole, text in _PAIRS},
    **{
        f"{whole}, {text}, router loss": (whole, text, {"output_router_logits": True, coefficient_key(text): 0.5})
        for whole, text in _PAIRS
        if whole in ROUTER_FAMILIES
    },
}

_TOWER: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "embed_dim", "d_model", "width", "hidden_dim"), 16),
    **dict.fromkeys(("intermediate_size", "encoder_ffn_dim"), 24),
    **dict.fromkeys(("num_hidden_layers", "depth", "encoder_layers", "num_layers"), 1),
    **dict.fromkeys(("num_attention_heads", "num_heads", "num_key_value_heads", "encoder_attention_heads"), 2),
    **dict.fromkeys(("out_hidden_size", "output_dim", "projector_hidden_size"), 32),
    **dict.fromkeys(("patch_size", "num_mel_bins"), 4),
    "image_size": 16,
    "head_dim": 8,
    "num_position_embeddings": 16,
    **dict.fromkeys(("mm_embed_dim", "mm_posemb_size", "position_embedding_size"), 16),
    "deepstack_visual_indexes": [],
}
_AXES = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1], "partial_rotary_factor": 1.0}
_PADDED = ("gemma4_text", "gemma4_unified_text")
_OF_AXES = (
    *("qwen2_vl_text", "qwen2_5_vl_text", "qwen3_vl_text", "qwen3_vl_moe_text"),
    *("glm4v_text", "glm4v_moe_text"),
)
_TEXTS: dict[str, dict[str, Any]] = {  # what a text part needs inside of such a model
    **{name: {"pad_token_id": 0} for name in _PADDED},
    **{name: {"rope_parameters": _AXES} for name in _OF_AXES},
}
_PLACEHOLDERS = 100  # and above, behind the vocabulary: no tokens of a row


def tiny_tower_config(whole: str, text: str, changes: Mapping[str, Any] | None = None, **others: Any) -> Any:
    """Return a tiny config of a model with towers around the tiny text part of a family, with `changes` of that part.

    others: of the whole.
    """
    kind = CONFIG_MAPPING[whole]
    base = kind()
    parts: dict[str, Any] = {
        "text_config": tiny_family_config(text, {**_TEXTS.get(text, {}), **(changes or {})}).to_dict()
    }
    sub_configs: Any = kind.sub_configs
    for key in sub_configs:
        if key != "text_config":
            part = getattr(base, key, None) or sub_configs[key]()  # gemma4 has its towers only if a config lists them
            own = part.to_dict()
            names = {*own, *type(part).attribute_map}
            parts[key] = {"model_type": part.model_type, **{name: v for name, v in _TOWER.items() if name in names}}
    first = max(_PLACEHOLDERS, parts["text_config"]["vocab_size"])
    tokens = {
        key: first + number
        for number, key in enumerate(base.to_dict())
        if re.fullmatch(r"\w+_token_(id|index)", key) and "pad" not in key
    }
    made = kind(**{**parts, **tokens, **others})
    if whole == "gemma3n":  # whose own tower is timm's: another one in its place, embeddings after those of text
        tower = {name: value for name, value in _TOWER.items() if name in SiglipVisionConfig().to_dict()}
        sizes: Any = {**tower, "vocab_size": 8, "vocab_offset": VOCAB, "rms_norm_eps": 1e-6}
        vars(made)["vision_config"] = SiglipVisionConfig(**sizes)
        made.audio_config.vocab_size, made.audio_config.vocab_offset = 8, VOCAB + 8
    return made
