"""Run planned steps of a model on this rank, in a user's loop as in `lengthwise train`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from lengthwise.attention import BlockKernel
from lengthwise.comm import Mesh, Transport, share_numbers
from lengthwise.config import OffloadConfig
from lengthwise.core.shape import UNCUT
from lengthwise.cost import logits_at_once, shape_from_config
from lengthwise.engine.batch import StepBatch
from lengthwise.engine.measuring import WHOLE_MODEL, Casting, Seen
from lengthwise.engine.objective import NextToken, Objective
from lengthwise.engine.offloading import Offloading, start_offloading
from lengthwise.engine.parameters import Parameters
from lengthwise.engine.stage_messages import Pipeline
from lengthwise.engine.step import RankResult, StepContext, run_part
from lengthwise.models import (
    Computing,
    DropoutKey,
    choose_losses,
    choose_mixers,
    choose_model_kernel,
    text_config,
    whole_model,
)
from lengthwise.models.adapter import attending_by_plan
from lengthwise.models.computing import Layers
from lengthwise.session.source import PlanAhead, PlannedStep, StepPlanner


@dataclass(kw_only=True)
class Engine:
    """Runs planned steps.

    planner: function that plans a step, on rank 0 once the session plans. num_heads: number of attention heads, which
    plans may split. dtype: dtype of the parameters. autocast: dtype of mixed precision; None leaves it to a surrounding
    torch.autocast. logits_at_once: logits per loss chunk, None for all. seed: seed of dropout. offload: settings of
    activation offloading. parameters: owner of the parameters and gradients, None if nothing trains. pipeline: this
    rank's pipeline, None if the rank runs the whole model. layers: forwards that planned passes use in place of the
    model's own. measured: results of small passes, by key.
    """

    model: nn.Module
    transport: Transport
    num_heads: int
    timeout_seconds: float
    computing: Computing
    device: torch.device
    dtype: torch.dtype
    logits_at_once: int | None
    planner: StepPlanner | None = None
    autocast: torch.dtype | None = None
    seed: int = 0
    offload: OffloadConfig | None = None
    parameters: Parameters | None = None
    pipeline: Pipeline | None = None
    layers: Layers | None = None
    measured: dict[object, Seen] = field(default_factory=dict)
    _offloading: Offloading | None = field(default=None, init=False)
    _kernels: dict[torch.dtype, BlockKernel] = field(default_factory=dict, init=False)

    @property
    def config(self) -> Any:
        """Config of the whole model, towers included."""
        return whole_model(self.model).config

    def steps(self, batches: Iterator[StepBatch], planner: StepPlanner | None = None) -> PlanAhead:
        """Plan the steps of batches ahead, the same on all ranks. planner: planner in place of the engine's own."""
        planner, cut = planner or self.planner, UNCUT if self.pipeline is None else self.pipeline.cut
        seconds, heads = self.timeout_seconds, self.num_heads
        return PlanAhead(batches, planner, self.transport, timeout_seconds=seconds, num_heads=heads, cut=cut)

    @property
    def num_parameters(self) -> int:
        """Count the parameters of the whole model."""
        if self.pipeline is not None:
            return self.pipeline.stage.num_parameters
        return sum(parameter.numel() for parameter in self.model.parameters())

    @property
    def is_cut(self) -> bool:
        """Whether a rank has only a part of the model between steps."""
        parameters = self.parameters
        return self.pipeline is not None or (parameters is not None and parameters.ranks_in_step > 1)

    def part(self) -> dict[str, Any]:
        """Return this rank's place in the mesh and its chunks of the model, as arguments of a `StepContext`."""
        if self.pipeline is None:
            return {"mesh": Mesh(self.transport, 1), "chunks": WHOLE_MODEL}
        return {"mesh": self.pipeline.mesh, "chunks": self.pipeline.stage.own}

    def next_token(self, batch: StepBatch, divisor: float | None = None) -> Objective:
        """Return the next-token loss: a batch's sum, divided by `divisor` (by default the batch's loss weight)."""
        weight = batch.loss_weight if divisor is None else divisor
        return NextToken(batch=batch, divisor=weight, logits_at_once=self.logits_at_once)

    def run(self, planned: PlannedStep, name: str, *, step: int, train: bool, objective: Objective) -> RankResult:
        """Run this rank's microbatches forward and, if `train`, backward. Collective."""
        kind, dtype = self.device.type, self.cast_dtype()
        kernel = self.kernel(dtype or self.dtype)
        self.start_offloading()
        if self._offloading is not None:
            self._offloading.begin_step()
        context = StepContext(
            **self.part(),
            model=self.model,
            kernel=kernel,
            name=name,
            train=train,
            objective=objective,
            offloading=self._offloading,
            parameters=self.parameters,
            dropout=DropoutKey(seed=self.seed, step=step),
            autocast=dtype,
        )
        # Only forwards are cast: backward follows what they did.
        with self.attending(), torch.autocast(kind, enabled=False):
            result = run_part(planned.plan, planned.batch, context)
        if not train and self.parameters is not None:
            self.parameters.free()
        return result

    def summed_loss(self, name: str, planned: PlannedStep, objective: Objective, *, step: int) -> float:
        """Return the objective summed over all ranks, without gradients. Collective."""
        own = self.run(planned, name, step=step, train=False, objective=objective)
        return sum(self.each_rank(own.loss_sum))

    def planned(self, batch: StepBatch, name: str, planner: StepPlanner | None = None) -> PlannedStep:
        """Plan one batch. Collective. name: the step's name in messages. planner: in place of the engine's own."""
        steps = self.steps(iter([batch]), planner)
        try:
            planned = steps.next(name)
        finally:
            steps.close()
        assert planned is not None, "it has one batch"
        return planned

    def each_rank(self, number: float) -> list[float]:
        """Return the number of each rank. Collective."""
        return share_numbers(self.transport, [number])[:, 0].tolist()

    @contextmanager
    def attending(self) -> Iterator[None]:
        """Let the model attend by the plan, and compute with the chosen layers, inside the block."""
        with attending_by_plan(self.model), nullcontext() if self.layers is None else self.layers.put_inside():
            yield

    def kernel(self, dtype: torch.dtype, say: Callable[[str], None] | None = None) -> BlockKernel:
        """Return the attention kernel for queries and keys of a dtype.

        The first call for a dtype is collective and chooses it: no rank uses a kernel that is wrong on one rank. `say`
        then prints which kernels are used, and why not others.
        """
        if dtype not in self._kernels:
            how = {"dtype": dtype, "say": say, "transport": self.transport}
            found = choose_model_kernel(self.config, self.computing, self.device, **how)
            self._kernels[dtype] = found
            choose_mixers(self.model, self.transport, self.device, dtype=dtype, say=say)
            choose_losses(self.model, self.transport, self.device, dtype=dtype, computing=self.computing, say=say)
        return self._kernels[dtype]

    def cast_dtype(self) -> torch.dtype | None:
        """Return the dtype that forwards are cast to: the one asked for, or a surrounding torch.autocast's."""
        kind = self.device.type
        if self.autocast is None and torch.is_autocast_enabled(kind):
            return torch.get_autocast_dtype(kind)
        return self.autocast

    def casting(self) -> Casting:
        """Return a context manager for the autocast of a forward, for passes that measure memory."""
        dtype = self.cast_dtype()
        return nullcontext if dtype is None else partial(_casting_anew, self.device.type, dtype)

    def start_offloading(self) -> None:
        """Open the store of offloaded activations, if there is one; call it when the parameters are laid out.

        Raises:
            MemoryShortage: there is no room for the store.
        """
        if self._offloading is None:
            where, kernel = f"rank {self.transport.rank}", self.kernel(self.cast_dtype() or self.dtype)
            self._offloading = start_offloading(self.offload, self.model, kernel, where=where, casting=self.casting())

    def close(self) -> None:
        """Close the store of offloaded activations, if there is one."""
        if self._offloading is not None:
            self._offloading.store.close()


def engine_of(model: Any, transport: Transport, *, chunked: bool, **how: Any) -> Engine:
    """Make the engine of a Hugging Face model. chunked: True for losses by chunks. how: fields of `Engine`."""
    config: Any = model.config
    words, on_gpus = text_config(config).vocab_size, how["device"].type == "cuda"
    return Engine(
        model=model,
        transport=transport,
        num_heads=shape_from_config(config.to_dict()).heads,
        logits_at_once=logits_at_once(words, on_gpus=on_gpus) if chunked else None,
        **how,
    )


@contextmanager
def _casting_anew(kind: str, dtype: torch.dtype) -> Iterator[None]:
    """Cast a forward, weights included: a cache of an outer autocast would otherwise keep earlier casts."""
    torch.clear_autocast_cache()
    try:
        with torch.autocast(kind, dtype=dtype):
            yield
    finally:
        torch.clear_autocast_cache()
