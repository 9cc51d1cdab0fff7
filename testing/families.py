"""How far a plan is from plain Hugging Face, for a tiny model of any family."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from lengthwise.attention import choose_kernel
from lengthwise.comm import Transport
from lengthwise.core.plan import Plan
from lengthwise.cost import LOGITS_AT_ONCE
from lengthwise.engine.batch import StepBatch
from lengthwise.engine.replicated import FlatParameters
from lengthwise.engine.sharded import ShardedParameters
from lengthwise.engine.step import run_plan
from lengthwise.models import DTYPES, ModelSource, build_model, keep_double, plain_attention, wrapped_layers
from lengthwise.run.reference import Reference, plain_gradients
from lengthwise.run.verify import gradient_differences, relative_difference
from testing.sequences import make_batch
from testing.strict import StrictWorld
from testing.tiny import VOCAB


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
    for model in pair.values():
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() == 1:
                    parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.2)
                else:
                    parameter.mul_(3)
    return pair


def family_difference(
    pair: dict[str, torch.nn.Module],
    plan: Plan,
    lengths: Sequence[int],
    *,
    precision: str,
    logits_at_once: int | None = LOGITS_AT_ONCE,
    ranks_per_node: int | None = None,
) -> Difference:
    """Run a plan on strict in-process ranks and the plain model in one; return how far apart they are.

    ranks_per_node: parameters lie over the ranks of each node; None: whole on every rank.
    """
    batch, expected = reference(pair["plain"], tuple(lengths), precision)
    dtype = DTYPES[precision]

    def work(transport: Transport) -> tuple[float, float, dict[str, torch.Tensor]]:
        model, cpu = copy.deepcopy(pair["planned"]), torch.device("cpu")
        if ranks_per_node:
            options = {"dtype": dtype, "device": cpu, "layers": wrapped_layers(model)}
            parameters = ShardedParameters(model, transport, ranks_per_node=ranks_per_node, **options)
        else:
            parameters = FlatParameters(model, transport, dtype=dtype)
        options = {"name": "family", "logits_at_once": logits_at_once, "parameters": parameters}
        with keep_double(dtype):
            done = run_plan(model, plan, batch, transport, choose_kernel(cpu), **options)
        parameters.reduce_gradients()
        return done.loss_sum, done.router_loss, parameters.gather_gradients()

    results: list[Any] = StrictWorld(plan.ranks).run(work)
    loss = sum(each[0] for each in results) / batch.loss_tokens
    router_loss = sum(each[1] for each in results)
    differences = gradient_differences(results[0][2], expected.gradients)
    return Difference(
        loss=relative_difference(loss, expected.loss),
        router_loss=relative_difference(router_loss, expected.router_loss),
        gradient=max(float("inf") if each != each else each for each in differences.values()),
    )


@lru_cache(maxsize=1)  # a pair is asked with one plan after another
def reference(plain: torch.nn.Module, lengths: tuple[int, ...], precision: str) -> tuple[StepBatch, Reference]:
    """Return the batch of these lengths, and what one process gives of it."""
    batch = make_batch(lengths, vocab=VOCAB, seed=1, masked=0.2)
    return batch, plain_gradients(copy.deepcopy(plain), batch.dataset, batch.ids, DTYPES[precision])
