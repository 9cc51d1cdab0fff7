"""Pipelines on strict in-process ranks: how far their gradients are from one process with plain Hugging Face."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from lengthwise.attention import choose_kernel
from lengthwise.comm import Mesh, Transport
from lengthwise.core.plan import Plan
from lengthwise.engine.pipeline import run_stage
from lengthwise.engine.stage_parameters import StageParameters
from lengthwise.models import DTYPES, ModelStage, keep_double
from lengthwise.program.stage_program import cut_layers
from lengthwise.run.verify import gradient_differences, relative_difference
from testing.families import Difference, reference
from testing.strict import StrictWorld

CPU = torch.device("cpu")


def as_pipeline(plan: Plan, stages: int, virtual: int = 1, *, recompute: Sequence[str] = ("none",)) -> Plan:
    """Return a plan whose ranks are replicas of so many stages; microbatches take kinds of recomputation in turn."""
    return replace(
        plan,
        schedule={"kind": "pipeline", "stages": stages, "virtual": virtual},
        requires=tuple(sorted({*plan.requires, "pipeline"})),
        microbatches=tuple(
            replace(each, recompute=recompute[number % len(recompute)]) for number, each in enumerate(plan.microbatches)
        ),
    )


def pipeline_difference(
    pair: dict[str, torch.nn.Module],
    plan: Plan,
    lengths: Sequence[int],
    *,
    precision: str = "fp64",
    **options: Any,
) -> Difference:
    """Run a plan of kind `pipeline` on threads as ranks, and the plain model in one; return how far apart they are."""
    batch, expected = reference(pair["plain"], tuple(lengths), precision)
    dtype, stages = DTYPES[precision], plan.schedule["stages"]

    def work(transport: Transport) -> tuple[float, float, dict[str, torch.Tensor]]:
        model: Any = copy.deepcopy(pair["planned"])
        mesh, layers = Mesh(transport, stages), [1.0] * model.config.num_hidden_layers
        chunks = cut_layers(layers, stages * plan.schedule["virtual"])
        stage = ModelStage(model, chunks, stages=stages, stage=mesh.stage)
        parameters = StageParameters(stage, mesh, dtype=dtype)
        with keep_double(dtype):
            done = run_stage(
                stage, plan, batch, mesh, choose_kernel(CPU), name="step", parameters=parameters, **options
            )
        parameters.reduce_gradients()
        return done.loss_sum, done.router_loss, parameters.gather_gradients()

    results: list[Any] = StrictWorld(plan.ranks * stages).run(work)
    loss = sum(each[0] for each in results) / batch.loss_tokens
    assert set(results[0][2]) == set(expected.gradients)
    differences = gradient_differences(results[0][2], expected.gradients)
    return Difference(
        loss=relative_difference(loss, expected.loss),
        router_loss=relative_difference(sum(each[1] for each in results), expected.router_loss),
        gradient=max(float("inf") if each != each else each for each in differences.values()),
    )
