"""Name the layers of a model that a plan would compute wrongly; for docs/families.md also what support would need.

The modules of the model on the meta device are compared with the kinds below, by class name; what no kind knows is
reported by its attention layer, as not proved yet.
"""

from __future__ import annotations

import inspect
import re
from typing import Any

from torch import nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

from lengthwise.core.errors import ConfigError, ModelRefused
from lengthwise.core.trained import USE_OTHERS, family_refusal, towers
from lengthwise.models.load import build_skeleton
from lengthwise.models.mixers import runs_by_plan
from lengthwise.models.text_part import has_towers, text_config

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
"""Families whose default config is of more than text, or cannot be built: what keeps their text part out."""

_ALIBI = ("alibi: scores with a bias that grows with distance", _BIAS)
KINDS = {
    r"Vision|Siglip|CLIP|Audio|ImageEmbed|Perceiver": ("a tower for images or sound", _TOWER),
    r"^Mamba2Mixer$": (
        "a layer that does not get forward's keyword arguments, which this family's causal language model drops",
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
    r"Indexer$|Compressor$": ("sparse attention that chooses keys of the whole sequence by scores of its own", _SPARSE),
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
"""Class names of a kind of layer (a regular expression): what it is, what it would need. The first that fits counts."""

ONLY_WITH = {
    r"^FalconAttention$": "alibi",
    r"^Llama4TextAttention$": "attention_chunk_size",
}
"""The config key without which layers of such names are not of that kind."""


_Reason = tuple[str, str, str]
"""Where it is, what it is, what support would need."""


def refused_model(config: Any) -> list[ModelRefused]:
    """Name what is known to be wrong under a plan in a model of no listed family; at least one refusal comes back."""
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
    """List what is wrong in a model of no listed family: where it is, what it is, what support would need."""
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
    except ConfigError as error:  # whatever a model that nobody proved does here is reported, not raised
        what = f"a family without a proof; its layers cannot be listed ({error.got[:160]})"
        return [("model config: model_type", what, _PROOF.format(model_type=config.model_type))]
    return _layers_of_kinds(model, config) or [_unproved(model, config)]


def _layers_of_kinds(model: nn.Module, config: Any) -> list[_Reason]:
    """List the first layer of each kind and their number; parts of a matched layer count as it."""
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
    """Return the first attention layer that is computed in a way of its own, or is not proved yet."""
    attentions = [found for found in model.named_modules() if re.search("Attention|MLA", type(found[1]).__name__)]
    path, module = attentions[0] if attentions else ("model", model)
    place = _place(path or "model", module, len(attentions))
    if "ALL_ATTENTION_FUNCTIONS" in inspect.getsource(type(module)):
        return place, "a family without a proof", _PROOF.format(model_type=config.model_type)
    return place, "attention that does not use transformers' attention interface", _INTERFACE


def _place(path: str, module: nn.Module, count: int) -> str:
    return f"{path} ({type(module).__name__})" + (f", one of {count}" if count > 1 else "")
