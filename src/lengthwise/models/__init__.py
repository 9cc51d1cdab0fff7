"""Run Hugging Face causal language models by a plan, and refuse by name models that a plan would compute wrongly."""

from lengthwise.models.adapter import (
    LogitsAtOnce,
    model_log_probabilities,
    model_loss,
    model_router_logits,
    plain_output,
    run_chunk,
    run_layers,
)
from lengthwise.models.adapter_kinds import check_adapters
from lengthwise.models.checkpointing import apply_policy, check_recompute, wrapped_layers
from lengthwise.models.computing import (
    Computing,
    attention_needs,
    check_computing,
    choose_layers,
    choose_model_kernel,
)
from lengthwise.models.double import keep_double
from lengthwise.models.dropout import (
    DropoutKey,
    NoDropout,
    drawing,
    has_dropout,
    stop_dropping,
)
from lengthwise.models.families import FAMILIES, check_model_config, largest_head_dim, position_limit, score_cap
from lengthwise.models.image_features import run_tower, seeing
from lengthwise.models.image_kinds import IMAGE_FAMILIES
from lengthwise.models.images import image_reader, refuse_image_files, sees_images, trains_on_images
from lengthwise.models.lora import build_adapted, check_lora, save_adapter
from lengthwise.models.loss import has_own_logits, has_own_loss, loss_by, token_loss, token_losses
from lengthwise.models.loss_choice import choose_losses
from lengthwise.models.mixer_choice import choose_mixers
from lengthwise.models.mixer_layers import has_states, mixing_of
from lengthwise.models.model_files import copy_processor, save_model
from lengthwise.models.model_source import (
    DTYPES,
    ModelSource,
    build_model,
    check_weights,
    count_parameters,
    find_model,
    plain_attention,
)
from lengthwise.models.model_stage import WHOLE, Chunk, ModelStage, check_cut
from lengthwise.models.router import (
    ROUTER_FAMILIES,
    RouterBalance,
    coefficient_key,
    coefficient_of,
    count_choices,
    experts_of,
    has_balance_loss,
    sum_probabilities,
    without_balance_loss,
)
from lengthwise.models.text_part import left_alone, placeholders, text_config, text_part, trained_towers, whole_model

__all__ = [
    "DTYPES",
    "FAMILIES",
    "IMAGE_FAMILIES",
    "ROUTER_FAMILIES",
    "WHOLE",
    "Chunk",
    "Computing",
    "DropoutKey",
    "LogitsAtOnce",
    "ModelSource",
    "ModelStage",
    "NoDropout",
    "RouterBalance",
    "apply_policy",
    "attention_needs",
    "build_adapted",
    "build_model",
    "check_adapters",
    "check_computing",
    "check_cut",
    "check_lora",
    "check_model_config",
    "check_recompute",
    "check_weights",
    "choose_layers",
    "choose_losses",
    "choose_mixers",
    "choose_model_kernel",
    "coefficient_key",
    "coefficient_of",
    "copy_processor",
    "count_choices",
    "count_parameters",
    "drawing",
    "experts_of",
    "find_model",
    "has_balance_loss",
    "has_dropout",
    "has_own_logits",
    "has_own_loss",
    "has_states",
    "image_reader",
    "keep_double",
    "largest_head_dim",
    "left_alone",
    "loss_by",
    "mixing_of",
    "model_log_probabilities",
    "model_loss",
    "model_router_logits",
    "placeholders",
    "plain_attention",
    "plain_output",
    "position_limit",
    "refuse_image_files",
    "run_chunk",
    "run_layers",
    "run_tower",
    "save_adapter",
    "save_model",
    "score_cap",
    "seeing",
    "sees_images",
    "stop_dropping",
    "sum_probabilities",
    "text_config",
    "text_part",
    "token_loss",
    "token_losses",
    "trained_towers",
    "trains_on_images",
    "whole_model",
    "without_balance_loss",
    "wrapped_layers",
]
