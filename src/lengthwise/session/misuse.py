"""What a method of a session is given and called in that it cannot use, refused before anything is done with it."""

from __future__ import annotations

import torch

from lengthwise.core.errors import ConfigError


def refuse_modes(what: str, cast: torch.dtype | None) -> None:
    """Refuse a method that trains inside of a block in which nothing can. cast: dtype of mixed precision, if any.

    Raises:
        ConfigError: torch records no gradients, or would cast to fp16.
    """
    if torch.is_inference_mode_enabled() or not torch.is_grad_enabled():
        got = "torch.inference_mode" if torch.is_inference_mode_enabled() else "torch.no_grad"
        remedy = "Call it outside of that block, or use evaluate."
        raise ConfigError(what, expected="gradients to be enabled", got=got, remedy=remedy)
    if cast == torch.float16:
        expected, got = "no torch.autocast, or one to bfloat16", "one to float16"
        raise ConfigError(what, expected=expected, got=got, remedy="fp16 needs a loss scale; use bfloat16.")
