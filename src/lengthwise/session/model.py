"""Check that a session can run a model by a plan, with all problems in one message."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from lengthwise.core.errors import LengthwiseError, ModelRefused, raise_problems
from lengthwise.engine.units import FreedParameter
from lengthwise.models import (
    DTYPES,
    check_model_config,
    check_recompute,
    has_balance_loss,
    has_dropout,
    left_alone,
    trained_towers,
    whole_model,
    wrapped_layers,
)
from lengthwise.models.model_stage import PassedThrough
from lengthwise.models.modules import modules_of
from lengthwise.models.quantized import problems_of
from lengthwise.models.rope import has_length_rope

_OF_EMBEDDINGS = {
    "max_norm": "which changes weights in forward, on the rank of a token alone",
    "scale_grad_by_freq": "which divides by counts of a microbatch",
    "sparse": "whose gradients are no plain tensors",
}
PRECISIONS = {dtype: name for name, dtype in DTYPES.items()}


def hugging_face_model(model: nn.Module) -> Any:
    """Return the Hugging Face model under peft's wrap; the adapters are in it."""
    unwrap: Any = getattr(model, "get_base_model", None) if hasattr(model, "peft_config") else None
    return model if unwrap is None else unwrap()


def num_words(model: Any) -> int:
    """Return the number of rows of a model's input embedding, under adapters too."""
    return len(model.get_input_embeddings().weight)


def check_session_model(model: Any, recompute: str, *, trains: bool = True) -> torch.dtype:
    """Check a model, all problems in one message; return the dtype of most entries that train, or of all."""
    where, problems = f"model {type(model).__name__}", list[LengthwiseError]()

    def refuse(expected: str, got: str, remedy: str) -> None:
        problems.append(ModelRefused(where, expected=expected, got=got, remedy=remedy))

    if not hasattr(model, "config") or not hasattr(model, "get_decoder"):
        remedy = "Give the model itself, not a wrapper of DDP or torch.compile."
        raise ModelRefused(where, expected="a Hugging Face causal language model", got="none", remedy=remedy)
    config = whole_model(model).config
    for check in (lambda: check_model_config(config), lambda: check_recompute(model, recompute)):
        try:
            check()
        except LengthwiseError as error:
            problems.append(error)
    dtypes = _dtypes(model, trains=trains)
    problems += _problems_of_dtypes(where, dtypes)
    if any(layer.gradient_checkpointing for layer in wrapped_layers(model)):
        remedy = "Call model.gradient_checkpointing_disable(), and give Session recompute='layer'."
        refuse("activation checkpointing by the plan alone", "a model with gradient checkpointing enabled", remedy)
    drops = getattr(getattr(config, "vision_config", None), "attention_dropout", 0)
    if drops and trained_towers(model):  # by torch's own generator, so a block that runs again would drop others
        remedy = "Load the model with attention_dropout 0 in its vision_config, or freeze the tower."
        refuse("a tower that trains without dropout in its attention", f"attention_dropout {drops}", remedy)
    if any(isinstance(parameter, FreedParameter) for parameter in model.parameters()):
        remedy = "Use that session, or load the model again."
        refuse("parameters with values", "parameters that another session has sharded", remedy)
    if any(isinstance(module, PassedThrough) for module in model.modules()):
        refuse("a whole model", "one stage that a session has kept", "Use that session, or load the model again.")
    for key, why in _OF_EMBEDDINGS.items():
        if any(getattr(module, key, None) for module in modules_of(model) if isinstance(module, nn.Embedding)):
            remedy = f"Make the embedding without {key}."
            refuse(f"embeddings without {key}, {why}", f"one with {key}", remedy)
    problems += problems_of(model, where)
    raise_problems(problems)
    return max(dtypes, key=lambda dtype: dtypes[dtype].entries)


def check_trained_dtype(model: nn.Module) -> None:
    """Check the dtypes of the trainable parameters, if there are any yet."""
    if dtypes := _dtypes(model, trains=True):
        raise_problems(_problems_of_dtypes(f"model {type(model).__name__}", dtypes))


class _OfDtype(NamedTuple):
    """Parameters of a dtype: number of their entries, and the name of one."""

    entries: int
    name: str


def _dtypes(model: nn.Module, *, trains: bool) -> dict[torch.dtype, _OfDtype]:
    """Return the dtypes of the trainable parameters, or of all if the model does not train."""
    found = dict[torch.dtype, _OfDtype]()
    for name, each in model.named_parameters():
        if each.requires_grad or (not trains and each.is_floating_point()):
            before = found[each.dtype].entries if each.dtype in found else 0
            found[each.dtype] = _OfDtype(before + each.numel(), name)
    return found


def _problems_of_dtypes(where: str, dtypes: Mapping[torch.dtype, _OfDtype]) -> list[LengthwiseError]:
    if dtypes and dtypes.keys() <= PRECISIONS.keys():
        return []
    expected = "trainable parameters in float32, bfloat16 and float64"
    found = sorted(f"{str(each).removeprefix('torch.')} (as {of.name})" for each, of in dtypes.items())
    remedy = "Convert the model, model.to(dtype)."
    got = ", ".join(found) or "no trainable parameter"
    return [ModelRefused(where, expected=expected, got=got, remedy=remedy)]


def can_share_prefixes(model: Any) -> bool:
    """Return whether a prefix computed once gives rows the same result as computed for every row.

    It does not with random numbers, router losses and rotations of whole rows.
    """
    return not (has_length_rope(model) or has_dropout(model) or has_balance_loss(model.config))


def towers_sentence(model: Any) -> str | None:
    """Name the parameters of towers that train, or those that would in a plain loop; return None if there are none."""
    kind = type(model).__name__
    if towers := trained_towers(model):
        names = " and ".join(name for name, each in model.named_children() if each in towers)
        number = sum(own.numel() for each in towers for own in each.parameters() if own.requires_grad)
        where = f"{kind}: {number:,} parameters of {names} train by rows with images"
        return f"{where}; if all rows are text, freeze them, and save their gradients' memory"
    named = {name: each for name, each in left_alone(model).items() if each.requires_grad}
    if not named:
        return None
    number = sum(each.numel() for each in named.values())
    return f"{kind}: its text part trains; the other {number:,} parameters stay as they are"


def refuse_balance(model: Any, what: str) -> None:
    """Refuse a model with a balance loss of routers, which this loss would not count."""
    if has_balance_loss(model.config):
        remedy = "Set output_router_logits to False in the model's config, or use loss=."
        got = f"{type(model).__name__} with output_router_logits"
        raise ModelRefused(what, expected="a model without a balance loss", got=got, remedy=remedy)
