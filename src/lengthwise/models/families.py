"""Which models are proved equal to plain Hugging Face, and what in their config stops a run before it starts.

A family joins `FAMILIES` when `tests/models/test_parity.py` holds for it. Everything else is refused by name: a part
that we do not know could mix documents of a pack, or need its neighbours on another rank, and would be silently wrong.
"""

from __future__ import annotations

from typing import Any

from lengthwise.core.errors import ModelRefused, raise_problems

FAMILIES = ("llama", "mistral", "qwen3")

# RoPE kinds whose frequencies do not depend on how long the sequence at hand is.
STATIC_ROPE = ("default", "linear", "llama3", "yarn")


def check_model_config(config: Any, *, longest_tokens: int) -> None:
    """Refuse a Hugging Face config that has a part which a plan would compute wrongly.

    `longest_tokens` is the longest sequence of the run: a sliding window at least that long changes nothing.

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
        if ("dropout" in key or key.endswith("pdrop")) and value:
            refuse(key, "0 (dropout is not supported yet)", value, f"Set {key} to 0 in the model's config.json.")
    if getattr(config, "is_causal", None) is False:
        refuse("is_causal", "true (each token sees those before it)", False, "Use a causal language model.")
    rope = getattr(config, "rope_parameters", None) or {}
    rope_type = rope.get("rope_type", "default")
    if rope_type not in STATIC_ROPE:
        refuse(
            "rope_parameters.rope_type",
            f"one whose frequencies do not depend on the length at hand ({', '.join(STATIC_ROPE)})",
            rope_type,
            "Use one of these, or another model.",
        )
    window = active_window(config)
    if window is not None and window < longest_tokens:
        refuse(
            "sliding_window",
            f"none, or at least the longest sequence of the run ({longest_tokens} tokens)",
            window,
            "Set sliding_window to null, or keep longer sequences out with max_tokens and too_long: skip.",
        )
    if getattr(config, "quantization_config", None) is not None:
        refuse("quantization_config", "none", "a quantised model", "Use the model's full-precision weights.")
    raise_problems(problems)


def active_window(config: Any) -> int | None:
    """Return the sliding window that at least one layer of the model uses, or None."""
    window = getattr(config, "sliding_window", None)
    layer_types = getattr(config, "layer_types", None)
    if layer_types is not None and not any("sliding" in kind for kind in layer_types):
        return None
    return window
