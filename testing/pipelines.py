"""Pipelines on strict in-process ranks: how far their gradients are from one process with plain Hugging Face."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch

from lengthwise.attention import AttentionNeeds, choose_kernel
from lengthwise.comm import Mesh, Transport
from lengthwise.core.plan import Plan
from lengthwise.engine.batch import StepBatch
from lengthwise.engine.byte_watch import LiveBytes
from lengthwise.engine.offloading import Offloading
from lengthwise.engine.step import RankResult, StepContext, run_part
from lengthwise.models import DTYPES, ModelStage, keep_double, score_cap
from lengthwise.offload import ActivationStore
from lengthwise.program.stage_program import cut_layers
from lengthwise.run.verify import gradient_differences, relative_difference
from testing.families import Difference, reference
from testing.laid import stage_parameters
from testing.plans import in_turn
from testing.strict import StrictWorld

CPU = torch.device("cpu")


def as_pipeline(plan: Plan, stages: int, virtual: int = 1, *, recompute: Sequence[str] = ("none",)) -> Plan:
    """Return a plan whose ranks are replicas of so many stages; microbatches take kinds of recomputation in turn."""
    requires = tuple(sorted({*plan.requires, "pipeline"}))
    schedule = {"kind": "pipeline", "stages": stages, "virtual": virtual}
    return replace(in_turn(plan, recompute=recompute), schedule=schedule, requires=requires)


def pipeline_difference(
    pair: dict[str, torch.nn.Module], plan: Plan, lengths: Sequence[int], *, precision: str = "fp64", **options: Any
) -> Difference:
    """Run a plan of kind `pipeline` on threads as ranks, and the plain model in one; return how far apart they are."""
    batch, expected = reference(pair["plain"], tuple(lengths), precision)
    results = run_pipeline(pair["planned"], plan, batch, precision=precision, **options)
    loss = sum(each.done.loss_sum for each in results) / batch.loss_tokens
    assert set(results[0].gradients) == set(expected.gradients)
    differences = gradient_differences(results[0].gradients, expected.gradients)
    return Difference(
        loss=relative_difference(loss, expected.loss),
        router_loss=relative_difference(sum(each.done.router_loss for each in results), expected.router_loss),
        gradient=max(float("inf") if each != each else each for each in differences.values()),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineRank:
    """What a rank of a pipeline did; `gradients` of the whole model on rank 0. peak_bytes: of its step, if watched."""

    done: RankResult
    gradients: dict[str, torch.Tensor]
    peak_bytes: int


def run_pipeline(
    planned_model: torch.nn.Module,
    plan: Plan,
    batch: StepBatch,
    *,
    precision: str = "fp64",
    make_store: Callable[[int], ActivationStore] | None = None,
    watches: bool = False,
    around: Callable[[Transport], Transport] = lambda transport: transport,
    **options: Any,
) -> list[PipelineRank]:
    """Run a plan of kind `pipeline` on threads as ranks. make_store: of a rank, for what the plan offloads."""
    dtype, stages = DTYPES[precision], plan.schedule["stages"]

    def work(transport: Transport) -> PipelineRank:
        model: Any = copy.deepcopy(planned_model)
        mesh, layers = Mesh(around(transport), stages), [1.0] * model.config.num_hidden_layers
        chunks = cut_layers(layers, stages * plan.schedule["virtual"])
        stage = ModelStage(model, chunks, stages=stages, stage=mesh.stage)
        parameters = stage_parameters(stage, mesh, dtype=dtype)
        kernel = choose_kernel(CPU, AttentionNeeds(capped=score_cap(model.config) is not None))
        offloading = None if make_store is None else Offloading(model, kernel, make_store(transport.rank))
        before = (*model.parameters(), *(each.grad for each in model.parameters() if each.grad is not None))
        with keep_double(dtype), LiveBytes(*before) if watches else nullcontext() as live:
            context = StepContext(
                stage.model,
                mesh,
                kernel,
                chunks=stage.own,
                name="step",
                parameters=parameters,
                offloading=offloading,
                **options,
            )
            done = run_part(plan, batch, context)
        if offloading is not None:
            offloading.store.close()
        parameters.reduce_gradients()
        peak = 0 if live is None else live.peak_bytes
        return PipelineRank(done=done, gradients=parameters.gather_gradients(), peak_bytes=peak)

    ranks: list[Any] = StrictWorld(plan.ranks * stages).run(work)
    return ranks
