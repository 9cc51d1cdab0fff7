"""Which model families this version trains, by a Hugging Face config alone: no torch, no transformers.

A family joins `families.json` when `tests/models/test_models_families.py` holds for it. What else a config may say that
a plan cannot compute, and in which layer, `lengthwise.models` says where transformers is installed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from lengthwise.core.errors import ModelRefused
from lengthwise.core.files import read_package_json

_PROVED = read_package_json("lengthwise.core", "families.json")
FAMILIES: tuple[str, ...] = tuple(_PROVED["equal_to_plain"])
WITH_TOWERS: Mapping[str, tuple[str, ...]] = {name: tuple(texts) for name, texts in _PROVED["with_towers"].items()}
"""Models with towers for images or sounds, and the families of the text parts that they are proved with."""
_INSIDE: tuple[str, ...] = tuple(_PROVED["inside_others"])  # text parts that are no models of their own
LAYER_TYPES = ("full_attention", "sliding_attention")
USE_OTHERS = "Not supported yet: train it with plain TRL or Transformers"

_TOWERS = re.compile(r"\w*(vision|image|audio|speech|vq)\w*_config")
_LAYER_KEYS = ("layer_types", "layers_block_type")


def towers(config: Mapping[str, Any]) -> list[str]:
    """Return the keys of a config's towers for images and sounds."""
    return [key for key in config if _TOWERS.fullmatch(key)]


def text_part(config: Mapping[str, Any]) -> str | None:
    """Return the family of the text part of a model with towers, or None where it lacks one of the two."""
    text, is_whole = config.get("text_config"), config.get("model_type") in WITH_TOWERS or towers(config)
    return str(text.get("model_type")) if is_whole and isinstance(text, Mapping) else None


def family_refusal(config: Mapping[str, Any], where: str) -> ModelRefused | None:
    """Return why this version does not train a config's family, or the text part of one with towers; or None."""
    family, text = config.get("model_type"), text_part(config)
    part = config if text is None else config["text_config"]
    known = FAMILIES if text is None else {*FAMILIES, *_INSIDE} & {*WITH_TOWERS.get(str(family), ())}
    kinds = {str(kind) for key in _LAYER_KEYS for kind in _listed(part.get(key))} - set(LAYER_TYPES)
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
