"""Name the layers of a model that a plan would compute wrongly, and what it would take to have them.

The model is built on the meta device (its structure, no weights: a second or two, only for a model that is refused) and
its modules are held against the kinds below, by class name. What no kind knows is reported by its attention layer:
such a family may be exact and waits for its proof.
"""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM

from lengthwise.core.errors import ModelRefused

_STATE = "the layer's state passed on between the ranks of a ring, and cleared where a document of a pack begins"
_HALO = "the tokens just before a shard fetched from the rank that holds them, and none across documents of a pack"
_TOWER = "what the tower says of an image or sound placed with the tokens of its sequence, on the ranks that hold them"
_TOWER_CONFIGS = "vision|image|audio|speech|vq_config"
_ENCODER = "cross-attention over an encoder's states on every rank of a ring, and positions from outside"
_INTERFACE = "an attention that transformers' AttentionInterface can replace, with positions from outside"
_CHUNKS = "blocks that stop at the border of a chunk"
_SPARSE = "those scores of all keys, wherever they are, before attention, and blocks that follow the choice"
_PROOF = (
    "a proof: `python benchmarks/families.py {model_type}` compares it with plain Hugging Face; "
    "where that holds, add the name to lengthwise.models.FAMILIES"
)

NEEDED_BY_SOFTCAP = "a block kernel with the cap and its gradient"
NEEDED_BY_KIND = {
    **dict.fromkeys(("linear_attention", "mamba", "recurrent", "hybrid"), _STATE),
    "conv": _HALO,
    "chunked_attention": _CHUNKS,
    "minimax_m3_sparse": _SPARSE,
}
"""What a layer of another kind would need, by its name in a config's `layer_types`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerKind:
    """A kind of layer: `name` matches its class (a regular expression); if given, config key `key` must be set."""

    name: str
    what: str
    needed: str
    key: str = ""

    def has(self, module: nn.Module, config: Any) -> bool:
        """Return whether the module is of this kind."""
        return re.search(self.name, type(module).__name__) is not None and bool(
            not self.key or getattr(config, self.key, None)
        )


KINDS = (
    LayerKind(name=r"Vision|Siglip|CLIP|Audio|ImageEmbed|Perceiver", what="a tower for images or sound", needed=_TOWER),
    LayerKind(
        name=r"Delta(Net|Attention)|Lightning",
        what="linear attention, whose state runs through the whole sequence",
        needed=_STATE,
    ),
    LayerKind(name=r"Mamba\d?(Mixer|Layer)?$|Mixer$", what="a Mamba layer (a selective state space)", needed=_STATE),
    LayerKind(
        name=r"RecurrentBlock|RwkvSelfAttention|LSTMLayer",
        what="a recurrent layer, whose state runs through the whole sequence",
        needed=_STATE,
    ),
    LayerKind(name=r"ShortConv|CCAProjection|^Conv1d$", what="a convolution over neighbouring tokens", needed=_HALO),
    LayerKind(
        name=r"Indexer$|Compressor$",
        what="sparse attention that chooses keys of the whole sequence by scores of its own",
        needed=_SPARSE,
    ),
    LayerKind(
        name=r"CrossAttention$|DecoderWrapper$",
        what="a decoder made for the states of an encoder",
        needed=_ENCODER,
    ),
    LayerKind(
        name=r"Attention$",
        key="attn_logit_softcapping",
        what="scores that are capped by tanh (softcap)",
        needed=NEEDED_BY_SOFTCAP,
    ),
    LayerKind(
        name=r"^(Bloom|Mpt)Attention$",
        what="alibi: scores with a bias that grows with distance",
        needed="a block kernel that adds the bias, by the tokens' places in their sequence",
    ),
    LayerKind(
        name=r"^FalconAttention$",
        key="alibi",
        what="alibi: scores with a bias that grows with distance",
        needed="a block kernel that adds the bias, by the tokens' places in their sequence",
    ),
    LayerKind(
        name=r"^(CpmAntSegmentPositionEmbedding|XLNetRelativeAttention|InklingAttention|Inkling2Attention)$",
        what="scores with a learned bias for each distance",
        needed="a block kernel that adds the bias, by the tokens' places in their sequence, and its gradient",
    ),
    LayerKind(
        name=r"(Bert\w*|Electra|Ernie|Roberta\w*|Data2VecText|Camembert|RoFormer|Xmod)SelfAttention$|BlockSparse",
        what="attention of a bidirectional encoder, with positions counted in the row",
        needed="causal attention (is_decoder), and positions of each sequence handed to the embedding",
    ),
    LayerKind(
        name=r"^PhimoeTopKRouter$",
        what="a router that draws random numbers in training",
        needed="numbers keyed by the token's sequence and place, the same under every plan",
    ),
    LayerKind(
        name=r"^(StableLm|Nemotron)Attention$",
        what="a layer that does not hand forward's keywords on to its attention",
        needed="another way for the plan to reach the layer",
    ),
    LayerKind(
        name=r"^Llama4TextAttention$", key="attention_chunk_size", what="attention inside chunks", needed=_CHUNKS
    ),
    LayerKind(
        name=r"^DogeAttention$",
        what="attention under a mask that is made from the keys and values",
        needed="that mask for every block, and its gradient",
    ),
    LayerKind(
        name=r"^DiffLlamaAttention$",
        what="two attentions a layer, one taken from the other",
        needed="a count of attentions a layer that is not one, and its proof",
    ),
)


def refused_model(config: Any) -> list[ModelRefused]:
    """Name what is known to be wrong under a plan in a model of no listed family; at least one refusal comes back."""
    entries = [entry for entry in getattr(type(config), "sub_configs", ()) if re.search(_TOWER_CONFIGS, entry)]
    if getattr(config, "is_encoder_decoder", False):
        where, what = "model config: is_encoder_decoder", "an encoder-decoder"
        return [_refusal(config, where, what, _ENCODER)]
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        what = "a family without a causal language model in transformers"
        return [_refusal(config, "model config: model_type", what, "a decoder-only language model")]
    if entries:
        return [_refusal(config, f"model config: {', '.join(entries)}", "a model of more than text", _TOWER)]
    model = _on_meta(config)
    if isinstance(model, Exception):
        return [_refusal(config, "model config: model_type", _unbuilt(model), _PROOF)]
    found = list(_layers_of_kinds(model, config)) or [_unproved(model)]
    return [
        _refusal(config, f"{path} ({name}){f', one of {count}' if count > 1 else ''}", what, needed)
        for path, name, count, what, needed in found
    ]


_Found = tuple[str, str, int, str, str]


def _refusal(config: Any, where: str, what: str, needed: str) -> ModelRefused:
    return ModelRefused(
        f"{config.model_type}: {where}",
        expected="layers that a plan computes exactly (docs/families.md lists the families)",
        got=what,
        remedy=f"Needed: {needed.format(model_type=config.model_type)}.",
    )


def _on_meta(config: Any) -> nn.Module | Exception:
    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(copy.deepcopy(config))
    except Exception as error:  # noqa: BLE001 - whatever a model that nobody proved does here is reported, not raised
        return error


def _unbuilt(error: Exception) -> str:
    said = " ".join(str(error).split()) or type(error).__name__
    return f"a family without a proof; its layers cannot be listed ({said[:160]})"


def _layers_of_kinds(model: nn.Module, config: Any) -> Iterator[_Found]:
    """Yield the first layer of each kind with how many there are; what lies inside a layer that matched is its own."""
    found: dict[str, list[tuple[str, str]]] = {}
    kinds = {kind.what: kind for kind in KINDS}
    inside: str | None = None
    for path, module in model.named_modules():
        if inside is not None and path.startswith(inside):
            continue
        kind = next((kind for kind in KINDS if path and kind.has(module, config)), None)
        if kind is not None:
            inside = f"{path}."
            found.setdefault(kind.what, []).append((path, type(module).__name__))
    for what, places in found.items():
        path, name = places[0]
        yield path, name, len(places), what, kinds[what].needed


def _unproved(model: nn.Module) -> _Found:
    """Return the first attention layer: computed in a way of its own, or only not proved yet."""
    attentions = [
        (path, module) for path, module in model.named_modules() if re.search("Attention|MLA", type(module).__name__)
    ]
    path, module = attentions[0] if attentions else ("", model)
    own = "ALL_ATTENTION_FUNCTIONS" not in inspect.getsource(type(module))
    what = "attention that is computed in a way of its own" if own else "a family without a proof"
    return path or "model", type(module).__name__, len(attentions), what, _INTERFACE if own else _PROOF
