"""The loss of a Trainer's step: Trainer's own, or the session's loss in chunks if that is the same number."""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any

import transformers

from lengthwise.core.errors import ConfigError
from lengthwise.models import coefficient_of, has_balance_loss, has_own_loss, whole_model
from lengthwise.session import StepResult
from lengthwise.session.loss_checks import KnownShare, ShareInChunks
from lengthwise.session.losses import ComputeLoss
from lengthwise.session.model import hugging_face_model
from lengthwise.session.row_batch import rows_of
from lengthwise.session.source import PlannedStep

_LIBRARIES = ("lengthwise.", "transformers.", "trl.")  # TRL gives models a head of its own


def loss_of(trainer: Any, planned: PlannedStep, normalizer: float) -> ComputeLoss | None:
    """Return Trainer's loss of a step, None if the session's own is the same. normalizer: divisor of the sum."""
    if is_next_tokens(trainer) and rows_of(planned).is_plain:
        return None
    if not trainer._divides_by_items():
        return partial(trainer._share_of_loss, normalizer=normalizer)
    known = KnownShare if trainer._takes_whole_logits() else ShareInChunks
    return known(trainer._share_of_loss, normalizer=normalizer).of_labels(is_of_labels(trainer.model))


def is_of_labels(model: Any) -> bool:
    """Return whether a library's loss of a model leaves out tokens without a label.

    It may not if the model's `forward`, a hook on it or its loss function is the user's.
    """
    model = whole_model(hugging_face_model(model))
    forward = getattr(model, "_original_forward", model.forward)  # accelerate wraps it in autocast
    made = (getattr(forward, "__func__", forward), model.loss_function, *model._forward_hooks.values())
    return all(str(getattr(each, "__module__", None)).startswith(_LIBRARIES) for each in made)


def takes_items(model: Any) -> bool:
    """Return whether a library's loss of a model uses num_items_in_batch, also if its class denies it (with towers).

    Trainer would divide the loss of such a model by its number of microbatches, which differ in size here.
    """
    own = hugging_face_model(model)
    forward = getattr(own, "_original_forward", own.forward)
    takes = any(each.kind is each.VAR_KEYWORD for each in inspect.signature(forward).parameters.values())
    return takes and is_of_labels(model)


def is_next_tokens(trainer: Any) -> bool:
    """Return whether a Trainer's loss is the next token's cross entropy of Trainer and Hugging Face's models.

    It is not if the loss, `compute_loss`, the model's `forward` or a hook on it is the user's, or with smoothed labels.
    """
    model: Any = hugging_face_model(trainer.model)
    return (
        getattr(trainer.compute_loss, "__func__", None) is transformers.Trainer.compute_loss
        and trainer.compute_loss_func is None
        and trainer.label_smoother is None
        and not has_own_loss(model)
    )


def balance_of(trainer: Any, result: StepResult) -> float:
    """Return the part of a pass's loss that balances the routers of the trainer's model."""
    if result.router_loss is None:
        return 0.0
    return coefficient_of(hugging_face_model(trainer.model).config) * result.router_loss


def check_division(trainer: Any) -> None:
    """Refuse a loss that is known to be a mean over a microbatch, or that may lack the routers' balance loss."""
    if not trainer.model_accepts_loss_kwargs and trainer.compute_loss_func is None:
        remedy = "Give compute_loss_func, which divides a sum over the tokens by num_items_in_batch."
        got = "a model that takes no num_items_in_batch: its loss is a mean over a microbatch"
        raise ConfigError("model", expected="a loss divided by num_items_in_batch", got=got, remedy=remedy)
    if trainer.loss_is_scaled_for_ga is False:
        got = "loss_is_scaled_for_ga=False, a mean over a microbatch"
        remedy = "Divide a sum over the tokens by num_items_in_batch."
        raise ConfigError("compute_loss", expected="a loss divided by num_items_in_batch", got=got, remedy=remedy)
    if not has_balance_loss(hugging_face_model(trainer.model).config):
        return
    if trainer._divides_by_items() and trainer.label_smoother is None:
        return
    where = "label_smoothing_factor" if trainer._divides_by_items() else "compute_loss"
    expected, got = "the loss of the class, which has the balance loss of the routers", "another, which may lack it"
    remedy = "Set output_router_logits to False in the model's config, with TRL router_aux_loss_coef to 0."
    raise ConfigError(where, expected=expected, got=got, remedy=remedy)
