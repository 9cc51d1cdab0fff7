"""The loss of a Trainer's step: Trainer's own, or the session's loss in chunks if that is the same number."""

from __future__ import annotations

from functools import partial
from typing import Any

import transformers
from transformers.loss.loss_utils import ForCausalLMLoss

from lengthwise.models import has_balance_loss, has_own_logits
from lengthwise.session.loss_checks import KnownShare, ShareInChunks
from lengthwise.session.losses import ComputeLoss
from lengthwise.session.model import hugging_face_model
from lengthwise.session.row_batch import rows_of
from lengthwise.session.source import PlannedStep


def loss_of(trainer: Any, planned: PlannedStep, normalizer: float) -> ComputeLoss | None:
    """Return Trainer's loss of a step, or None if the session's own is the same.

    normalizer: divisor of the sum over the tokens.
    """
    if is_next_tokens(trainer) and rows_of(planned).is_plain:
        return None
    known = KnownShare if trainer._takes_whole_logits() else ShareInChunks
    kind = known if trainer._divides_by_items() else partial
    found = kind(trainer._share_of_loss, normalizer=normalizer)
    if isinstance(found, KnownShare):
        found.labels_alone = _counts_labels_alone(trainer)
    return found


def is_next_tokens(trainer: Any) -> bool:
    """Return whether a Trainer's loss is the next token's cross entropy of Trainer and Hugging Face's models.

    It is not if the loss, `compute_loss`, the model's `forward` or a hook on it is the user's, with smoothed labels, or
    with a balance loss.
    """
    model: Any = hugging_face_model(trainer.model)
    return (
        getattr(trainer.compute_loss, "__func__", None) is transformers.Trainer.compute_loss
        and trainer.compute_loss_func is None
        and trainer.label_smoother is None
        and _is_of_library(model)
        and not has_balance_loss(model.config)
    )


def _counts_labels_alone(trainer: Any) -> bool:
    """Return whether a loss of Trainer or TRL leaves out tokens without a label: it may be that of the user's model."""
    by_trainer = trainer.label_smoother is not None or not trainer._takes_whole_logits()
    return by_trainer or _is_of_library(hugging_face_model(trainer.model))


def _is_of_library(model: Any) -> bool:
    """Return whether a model's `forward` and loss are Hugging Face's."""
    return not has_own_logits(model) and model.loss_function is ForCausalLMLoss
