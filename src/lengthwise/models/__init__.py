"""Makes a Hugging Face causal language model obey a plan, and refuses by name what a plan would compute wrongly."""

from lengthwise.models.adapter import model_loss, plain_logits, token_loss
from lengthwise.models.double import keep_double
from lengthwise.models.families import FAMILIES, check_model_config
from lengthwise.models.load import (
    DTYPES,
    ModelSource,
    build_model,
    find_model,
    plain_attention,
    save_model,
)

__all__ = [
    "DTYPES",
    "FAMILIES",
    "ModelSource",
    "build_model",
    "check_model_config",
    "find_model",
    "keep_double",
    "model_loss",
    "plain_attention",
    "plain_logits",
    "save_model",
    "token_loss",
]
