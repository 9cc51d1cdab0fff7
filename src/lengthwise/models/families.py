"""Which models are proved equal to plain Hugging Face, and what in their config stops a run before it starts.

A family joins `FAMILIES` when `tests/models/test_models_families.py` holds for it; `make families` tries all there are.
Everything else is refused by name: a part that we do not know could mix documents of a pack, or need its neighbours on
another rank, and would be silently wrong.
"""

from __future__ import annotations

from typing import Any

from lengthwise.core.errors import ModelRefused, raise_problems
from lengthwise.models.router import router_problems

FAMILIES = (
    "apertus",
    "arcee",
    "cohere",
    "cohere2",
    "ernie4_5",
    "ernie4_5_moe",
    "exaone4",
    "flex_olmo",
    "gemma",
    "gemma3_text",
    "glm",
    "glm4",
    "gpt_neox",
    "gpt_oss",
    "granite",
    "granitemoe",
    "helium",
    "hunyuan_v1_dense",
    "internlm3",
    "llama",
    "minimax_m2",
    "ministral",
    "ministral3",
    "mistral",
    "mixtral",
    "nanochat",
    "olmo",
    "olmo2",
    "olmo3",
    "olmoe",
    "phi",
    "phi3",
    "qwen2",
    "qwen2_moe",
    "qwen3",
    "qwen3_moe",
    "seed_oss",
    "smollm3",
    "starcoder2",
)

LAYER_TYPES = ("full_attention", "sliding_attention")

# Config keys with one of these words make a layer draw random numbers; ranks would draw different ones.
RANDOM_WORDS = ("dropout", "pdrop", "jitter", "layerdrop", "drop_path")

# RoPE kinds whose frequencies do not depend on how long the sequence at hand is.
STATIC_ROPE = ("default", "linear", "llama3", "yarn")


def check_model_config(config: Any) -> None:
    """Refuse a Hugging Face config that has a part which a plan would compute wrongly.

    Raises:
        ModelRefused: all reasons at once.
    """
    problems = []

    def refuse(where: str, expected: str, got: object, remedy: str) -> None:
        problems.append(ModelRefused(f"model config: {where}", expected=expected, got=str(got), remedy=remedy))

    if config.model_type not in FAMILIES:
        refuse(
            "model_type",
            f"a family proved equal to plain Hugging Face ({', '.join(FAMILIES)})",
            config.model_type,
            "Use one of these families; others follow as they are proved.",
        )
    for key, value in config.to_dict().items():
        if value and any(word in key for word in RANDOM_WORDS):
            refuse(key, "0 (what is drawn at random in training is not supported yet)", value, f"Set {key} to 0.")
    if getattr(config, "is_causal", None) is False or getattr(config, "use_bidirectional_attention", None):
        refuse(
            "is_causal",
            "causal attention (each token sees those before it)",
            "bidirectional",
            "Use a causal language model.",
        )
    for where, kind in rope_kinds(config):
        if kind not in STATIC_ROPE:
            refuse(
                where,
                f"one whose frequencies do not depend on the length at hand ({', '.join(STATIC_ROPE)})",
                kind,
                "Use one of these, or another model.",
            )
    unknown = sorted(set(getattr(config, "layer_types", None) or ()) - set(LAYER_TYPES))
    if unknown:
        refuse(
            "layer_types",
            f"layers of {' or '.join(LAYER_TYPES)}",
            ", ".join(unknown),
            "Such layers need state from the tokens before them, wherever those are; use another model.",
        )
    if getattr(config, "quantization_config", None) is not None:
        refuse("quantization_config", "none", "a quantised model", "Use the model's full-precision weights.")
    problems += router_problems(config)
    raise_problems(problems)


def rope_kinds(config: Any) -> list[tuple[str, str]]:
    """List (config path, RoPE kind): one for the model, or one for each kind of layer where they differ."""
    rope = getattr(config, "rope_parameters", None) or {}
    nested = {f"rope_parameters.{name}": each for name, each in rope.items() if isinstance(each, dict)}
    return [
        (f"{where}.rope_type", each.get("rope_type", "default"))
        for where, each in (nested or {"rope_parameters": rope}).items()
    ]
