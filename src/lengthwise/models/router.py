"""The balance loss of a model's routers over all tokens of a global batch, the same under every plan.

It is Hugging Face's `load_balancing_loss_func` over all layers' rows: E x sum over experts e of f_e x P_e, with f_e =
choices of e / rows and P_e = mean probability. f is counted over the batch first (`program.step_program`), then every
row adds E x sum of f_e x p_e / rows. Switch Transformer (arXiv 2101.03961), equations 4 to 6. A model with towers has
the loss if its own class adds it; the config of its text part decides.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from lengthwise.core.errors import ModelRefused
from lengthwise.core.files import read_package_json
from lengthwise.models.model_source import build_skeleton
from lengthwise.models.text_part import has_towers, text_config

# Families with Hugging Face's common balance loss, of text and with towers; tests/run/test_run_router.py checks them.
ROUTER_FAMILIES: tuple[str, ...] = tuple(read_package_json("lengthwise.core", "families.json")["with_balance_loss"])


def coefficient_key(model_type: str) -> str:
    """Return the config key of a family's coefficient of the balance loss."""
    return "aux_loss_coef" if model_type == "jetmoe" else "router_aux_loss_coef"


def coefficient_of(config: Any) -> float:
    """Return the coefficient of the balance loss that a config asks for."""
    part = text_config(config)
    return getattr(part, coefficient_key(part.model_type))


def experts_of(model: Any) -> tuple[int, int]:
    """Return (experts, experts chosen per row), by which the model's class computes its balance loss."""
    return _of(model, "num_experts"), _of(model, "num_experts_per_tok")


def _of(model: Any, key: str) -> int:
    return getattr(model, key) if hasattr(model, key) else getattr(model.config, key)


def has_balance_loss(config: Any) -> bool:
    """Return whether the config asks for the balance loss."""
    return bool(getattr(text_config(config), "output_router_logits", False))


@contextmanager
def without_balance_loss(model: Any) -> Iterator[None]:
    """Ask for no balance loss inside the block, for passes that return no loss."""
    part = text_config(model.config)
    asked = has_balance_loss(model.config)
    if asked:
        part.output_router_logits = False
    try:
        yield
    finally:
        if asked:
            part.output_router_logits = True


def asked_coefficient(model: Any) -> float | None:
    """Return the coefficient of the balance loss that a model's config asks for now, or None if it asks for none."""
    part = text_config(model.config)
    return getattr(part, coefficient_key(part.model_type), None) if has_balance_loss(model.config) else None


def count_choices(model: Any, router_logits: Sequence[Tensor]) -> Tensor:
    """Count how often rows (tokens, experts) choose each expert, and the rows: (experts + 1,), int64."""
    device = next(model.parameters()).device
    experts, chosen_of_row = experts_of(model)
    counts = torch.zeros(experts + 1, dtype=torch.int64, device=device)
    for logits in map(Tensor.detach, router_logits):
        # As in Hugging Face's loss: by probabilities in the logits' dtype, whatever the router itself uses.
        chosen = torch.softmax(logits, dim=-1).topk(chosen_of_row, dim=-1).indices.flatten()
        counts.scatter_add_(0, chosen, torch.ones_like(chosen))  # bincount would wait for the device
        counts[-1] += len(logits)
    return counts


class RouterBalance:
    """The balance loss of one step, from the choices of all rows of the global batch."""

    def __init__(self, model: Any, counts: Tensor) -> None:
        """Take `count_choices` of every row, summed over all ranks."""
        self.coefficient = coefficient_of(model.config)
        self._num_rows = counts[-1]  # stays on the device
        # In fp32 as in Hugging Face, also under fp64, where the division would otherwise differ by 6e-8.
        self._frequency = counts[:-1].float() / self._num_rows

    def share(self, router_logits: Sequence[Tensor]) -> Tensor:
        """Return these rows' part of the loss, differentiable, in fp32 or wider; all parts sum to the loss."""
        return self.share_of(sum_probabilities(router_logits))

    def share_of(self, probabilities: Tensor) -> Tensor:
        """Return the part of rows whose `sum_probabilities` these are."""
        mean = probabilities / self._num_rows
        return len(mean) * (self._frequency * mean).sum()


def sum_probabilities(router_logits: Sequence[Tensor]) -> Tensor:
    """Sum the probabilities of each expert over rows of at least one layer: (experts,), in fp32 or wider."""
    return torch.stack([_wide(torch.softmax(logits, dim=-1)).sum(0) for logits in router_logits]).sum(0)


def router_problems(config: Any) -> list[ModelRefused]:
    """List the problems of the balance loss that a config asks for."""
    part, switch = text_config(config), "output_router_logits"
    inside = "text_config." if has_towers(config) else ""
    if not has_balance_loss(config):
        if not getattr(config, switch, False):
            return []
        remedy = f"Set {inside}{switch} to true, or remove {switch}."
        return [_refused(switch, f"{inside}{switch}, which Hugging Face reads", "true beside text_config", remedy)]
    key = coefficient_key(part.model_type)
    coefficient = getattr(part, key, None)
    remedy = f"Set {inside}{switch} to false in the model's config.json, or TRL's {key} to 0."
    if config.model_type not in ROUTER_FAMILIES:
        where, got = switch, f"true in {config.model_type}"
        if part.model_type in ROUTER_FAMILIES:
            got += ", whose class in Hugging Face adds no balance loss"
        expected = f"false, or a family whose balance loss is known ({', '.join(ROUTER_FAMILIES)})"
    elif not isinstance(coefficient, int | float) or not math.isfinite(coefficient):
        where, got = key, str(coefficient)
        expected, remedy = "a finite number, the coefficient of the balance loss", f"Give the number. {remedy}"
    elif not has_router(model := build_skeleton(config), model):
        where, expected, got = switch, "a layer with a router", "dense layers only"
    else:
        return []
    return [_refused(inside + where, expected, got, remedy)]


def _refused(where: str, expected: str, got: str, remedy: str) -> ModelRefused:
    return ModelRefused(f"model config: {where}", expected=expected, got=got, remedy=remedy)


def has_router(model: Any, part: torch.nn.Module) -> bool:
    """Return whether a part of a model has a router."""
    recorders = model.get_decoder()._can_record_outputs["router_logits"]
    routers = tuple(each.target_class for each in (recorders if isinstance(recorders, list) else [recorders]))
    return any(isinstance(module, routers) for module in part.modules())


def _wide(probabilities: Tensor) -> Tensor:
    return probabilities.to(torch.promote_types(probabilities.dtype, torch.float32))
