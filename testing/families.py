"""How far a plan is from plain Hugging Face, for a tiny model of any family."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from lengthwise.core.plan import Plan
from lengthwise.engine.batch import StepBatch
from lengthwise.models import DTYPES, LogitsAtOnce, ModelSource, build_model, plain_attention
from lengthwise.run.reference import Reference, plain_gradients
from lengthwise.run.verify import gradient_differences, relative_difference
from testing.sequences import make_batch
from testing.steps import run_step
from testing.tiny import VOCAB, tiny_family_config


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Relative differences from plain Hugging Face, one document at a time: of the losses, and of the worst gradient.

    `router_loss` is 0 where the config asks for no balance loss of the routers.
    """

    loss: float
    gradient: float
    router_loss: float


def build_pair(model_type: str, config: Any) -> dict[str, torch.nn.Module]:
    """Build the planned and the plain model with the same parameters, drawn so that no gradient hides in symmetry."""
    source = ModelSource(name=model_type, config=copy.deepcopy(config), weights=False)
    pair = {
        "plain": build_model(source, seed=3, attention=plain_attention(source)),
        "planned": build_model(source, seed=3),
    }
    return {name: enliven(model) for name, model in pair.items()}


def tiny_model(model_type: str, changes: Mapping[str, Any] | None = None) -> Any:
    """Build a tiny planned model of a family, as that of `build_pair`."""
    config = tiny_family_config(model_type, changes or {})
    return enliven(build_model(ModelSource(name=model_type, config=config, weights=False), seed=3))


def enliven(model: torch.nn.Module) -> torch.nn.Module:
    """Make parameters larger than a fresh model's, and norms other than ones, so that errors show.

    States decay slowly, so that they matter to the end of a sequence: where they are gone after a token, a gradient is
    a sum that cancels, and rounding is all that a comparison sees.
    """
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):
                parameter.sub_(3)
            if parameter.dim() == 1:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.2)
            else:
                parameter.mul_(3)
    return model


def family_difference(
    pair: dict[str, torch.nn.Module],
    plan: Plan,
    lengths: Sequence[int],
    *,
    precision: str,
    logits_at_once: LogitsAtOnce = "auto",
    **how: Any,
) -> Difference:
    """Run a plan by `run_step` and the plain model in one process; return how far apart they are."""
    batch, expected = reference(pair["plain"], tuple(lengths), precision)
    found = run_step(pair["planned"], plan, batch, precision=precision, logits_at_once=logits_at_once, **how)
    differences = gradient_differences(found.gradients, expected.gradients)
    return Difference(
        loss=relative_difference(found.loss, expected.loss),
        router_loss=relative_difference(found.router_loss, expected.router_loss),
        gradient=max(float("inf") if each != each else each for each in differences.values()),
    )


@lru_cache(maxsize=1)  # a pair is asked with one plan after another
def reference(plain: torch.nn.Module, lengths: tuple[int, ...], precision: str) -> tuple[StepBatch, Reference]:
    """Return the batch of these lengths, and what one process gives of it."""
    batch = make_batch(lengths, vocab=VOCAB, seed=1, masked=0.2)
    return batch, plain_gradients(copy.deepcopy(plain), batch.dataset, batch.ids, DTYPES[precision])
