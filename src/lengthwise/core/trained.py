"""The model families that this version trains, by a Hugging Face config alone: no torch, no transformers.

A family joins `families.json` when `tests/models/test_models_families.py` holds for it. If transformers is installed,
`lengthwise.models` refuses everything else in a config that a plan cannot compute.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from lengthwise.core.errors import ModelRefused
from lengthwise.core.files import read_package_json

_LISTED = read_package_json("lengthwise.core", "families.json")
FAMILIES: tuple[str, ...] = tuple(_LISTED["equal_to_plain"])
UNGATED: tuple[str, ...] = tuple(_LISTED["ungated"])
"""Families whose MLPs have two matrices and no gate."""
WITH_TOWERS: Mapping[str, tuple[str, ...]] = {name: tuple(texts) for name, texts in _LISTED["with_towers"].items()}
"""Models with towers for images or sounds, and the text families with which tests prove them."""
_INSIDE: tuple[str, ...] = tuple(_LISTED["inside_others"])  # families that occur only as text parts
LAYER_TYPES = ("full_attention", "sliding_attention")
MIXERS_OF = {"hybrid": 2, "moe": 0, "mlp": 0}  # token mixers in a decoder layer, by its kind (1 in others)
USE_OTHERS = "Not supported yet: train it with plain TRL or Transformers"

_OLDER = {"mamba": "linear_attention", "attention": "full_attention"}  # names in older configs
_EVERY: Mapping[str, int] = dict.fromkeys(
    ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next", "olmo_hybrid"), 4
)  # one in so many layers attends
_OF_PATTERN = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
_TOWERS = re.compile(r"\w*(vision|image|audio|speech|vq)\w*_config")
_LAYER_KEYS = ("layer_types", "layers_block_type")


def layer_types(family: object) -> tuple[str, ...]:
    """Return the kinds of layers of a family that a plan computes exactly as plain Hugging Face does."""
    others = (kind for kind, families in _LISTED["other_layers"].items() if family in families)
    return (*LAYER_TYPES, *others)


def layer_kinds(config: Mapping[str, Any], layers: int) -> list[str]:
    """Return the kind of each layer of a config.json; full attention if the config does not say.

    layers: number of layers by the config; a pattern of letters (nemotron_h) overrides it.
    """
    family = config.get("model_type")
    for key in _LAYER_KEYS:
        if _listed(config.get(key)):
            return [_OLDER.get(str(kind), str(kind)) for kind in config[key]]
    if pattern := config.get("hybrid_override_pattern"):
        return [_OF_PATTERN.get(letter, "full_attention") for letter in str(pattern)]
    own = "conv" if family in _LISTED["other_layers"]["conv"] else "linear_attention"
    if family in _LISTED["other_layers"]["hybrid"]:
        return ["hybrid"] * layers
    if family not in (*_LISTED["other_layers"]["linear_attention"], *_LISTED["other_layers"]["conv"]):
        return ["full_attention"] * layers
    kimi = config.get("linear_attn_config")
    attending: Any = next((config[key] for key in ("attn_layer_indices", "full_attn_idxs") if config.get(key)), None)
    if isinstance(kimi, Mapping):
        attending = [number - 1 for number in kimi.get("full_attn_layers", ())]
    every = config.get("full_attention_interval") or config.get("layer_group_size") or _EVERY.get(str(family))
    if attending is None:
        attending = range(every - 1, layers, every) if every else ()
    return ["full_attention" if number in attending else own for number in range(layers)]


def towers(config: Mapping[str, Any]) -> list[str]:
    """Return the keys of a config's towers for images and sounds."""
    return [key for key in config if _TOWERS.fullmatch(key)]


def text_part(config: Mapping[str, Any]) -> str | None:
    """Return the text family of a model with towers, or None if it has no towers or no text part."""
    text, is_whole = config.get("text_config"), config.get("model_type") in WITH_TOWERS or towers(config)
    return str(text.get("model_type")) if is_whole and isinstance(text, Mapping) else None


def family_refusal(config: Mapping[str, Any], where: str) -> ModelRefused | None:
    """Return the error for a family, or text part of a model with towers, that is not trained, else None."""
    family, text = config.get("model_type"), text_part(config)
    part = config if text is None else config["text_config"]
    known = FAMILIES if text is None else {*FAMILIES, *_INSIDE} & {*WITH_TOWERS.get(str(family), ())}
    kinds = {_OLDER.get(str(kind), str(kind)) for key in _LAYER_KEYS for kind in _listed(part.get(key))}
    kinds -= set(layer_types(part.get("model_type")))
    if family is None or (part["model_type"] in known and not kinds):
        return None
    got = str(family)
    if found := towers(config):
        got += f", a model of more than text ({', '.join(found)})"
    if text is not None:
        got += f", whose text part is {text}"
    if kinds:
        got += f" with layers of {', '.join(sorted(kinds))}"
    expected, remedy = "a model that this version trains (docs/families.md)", f"{USE_OTHERS}."
    return ModelRefused(where, expected=expected, got=got, remedy=remedy)


def _listed(value: object) -> list[Any]:
    return value if isinstance(value, list) else []
