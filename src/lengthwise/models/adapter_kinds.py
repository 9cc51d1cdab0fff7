"""The kinds of peft's adapters that a plan trains as peft alone does, and the obstacles of other kinds.

A plan packs tokens of several sequences, runs the Hugging Face model inside peft's, and sums gradients itself. So an
adapter must compute each token from that token alone, without random numbers of its own, inside the model's layers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import Any

from torch import nn

from lengthwise.core.errors import ModelRefused, raise_problems

# Compared with plain peft, layer kind by layer kind: tests/session/test_session_adapters.py
SAME_AS_PEFT = frozenset(
    (
        *("ADAPTION_PROMPT", "BEFT", "BOFT", "C3A", "DEFT", "DELORA", "FOURIERFT", "FROD", "GLORA", "GRALORA", "HIRA"),
        *("HRA", "IA3", "LN_TUNING", "LOHA", "LOKR", "LORA", "MISS", "OFT", "PEANUT", "RANDLORA", "ROAD", "SHIRA"),
        *("SUPERTUNING", "TINYLORA", "TRAINABLE_TOKENS", "UNILORA", "VBLORA", "VERA", "WAVEFT"),
    )
)
_VIRTUAL = "virtual tokens before each sequence, which a plan does not count"
_NOT_COMPARED = "no comparison with plain peft yet"
_OTHERWISE = {
    "ADALORA": "a loss of its own, and ranks that change between steps",
    "LILY": "a router that takes the mean over all tokens of a microbatch",
    "OSF": "hooks that change the gradients of a whole parameter",
    "POLY": "a task of each sequence",
    "PVERA": "random numbers that depend on the microbatch",
    "SHADOW": "a second model beside the layers",
    "XLORA": "a second pass over each sequence",
}
_OF_LORA = {
    "alora_invocation_tokens": "adapters that begin at a token of each sequence",
    "layer_replication": "layers that share their number",
    "use_qalora": _NOT_COMPARED,
    "target_modules_to_tie": "adapters of input and output embeddings that are views of each other",
}


def check_adapters(model: nn.Module) -> None:
    """Refuse adapters of peft that a plan would not train as peft does; models without adapters pass.

    Raises:
        ModelRefused, Problems: an adapter is of another kind; one message has all.
    """
    given: Any = model
    adapters = getattr(given, "peft_config", None)
    if isinstance(adapters, dict):
        raise_problems(
            [
                ModelRefused(
                    f"model: adapter {name}",
                    expected="an adapter that computes each token by itself, inside the model's layers",
                    got=got,
                    remedy=remedy,
                )
                for name, config in adapters.items()
                for got, remedy in _obstacles(config)
            ]
        )


def _obstacles(config: Any) -> Iterator[tuple[str, str]]:
    kind = str(getattr(config.peft_type, "value", config.peft_type))
    if kind not in SAME_AS_PEFT:
        why = _VIRTUAL if config.is_prompt_learning else _OTHERWISE.get(kind, _NOT_COMPARED)
        yield f"{kind} ({why})", "Use another kind, for example LoRA on linear layers and embeddings."
        return
    for name, value in vars(config).items():
        if kind == "LORA":
            why = _OF_LORA.get(name) or (_NOT_COMPARED if name in _variants(config) else None)
        else:
            why = "random numbers that depend on the microbatch" if "dropout" in name else None
        if value and why:
            key = "ensure_weight_tying" if name == "target_modules_to_tie" else name
            yield f"{kind} with {key} ({why})", f"Remove {key} from the adapter's config."


def _variants(config: Any) -> frozenset[str]:
    """Return the config's keys that choose a variant of LoRA, except DoRA's."""
    tagged = (each.name for each in fields(config) if each.metadata.get("is_lora_variant"))
    return frozenset(tagged) - {"use_dora"}
