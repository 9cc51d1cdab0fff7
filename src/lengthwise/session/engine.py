"""What both doors share: planned steps of a model on this rank, whoever's loop it is, and whoever updates it.

The transport, the steps planned ahead, the microbatches of one, and the numbers of all ranks at its end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from lengthwise.attention import BlockKernel
from lengthwise.comm import Mesh, Transport, share_first, share_numbers
from lengthwise.config import OffloadConfig
from lengthwise.core.shape import UNCUT
from lengthwise.cost import logits_at_once, shape_from_config
from lengthwise.engine.batch import StepBatch
from lengthwise.engine.measuring import WHOLE_MODEL, Casting, Seen
from lengthwise.engine.objective import NextToken, Objective
from lengthwise.engine.offloading import Offloading, start_offloading
from lengthwise.engine.parameters import Parameters
from lengthwise.engine.pipeline import Pipeline
from lengthwise.engine.step import RankResult, StepContext, run_part
from lengthwise.models import Computing, DropoutKey, choose_mixers, choose_model_kernel, text_config, whole_model
from lengthwise.models.adapter import attending_by_plan
from lengthwise.models.computing import Layers
from lengthwise.session.source import PlanAhead, PlannedStep, StepPlanner


@dataclass(kw_only=True)
class Engine:
    """Runs planned steps.

    planner: of rank 0; None elsewhere. num_heads: of attention, which plans may split. dtype: of the parameters.
    autocast: of mixed precision; None: that of a surrounding torch.autocast, if any. logits_at_once: that a loss
    makes; None: all. seed: of dropout. offload: of activations, as in a run file. parameters: that take the gradients,
    once they are there; None: nothing trains. pipeline: of which this rank is a stage; None: it has the whole model.
    layers: how the model computes in planned passes alone; None: as it does anyhow. measured: small passes that ran.
    """

    model: nn.Module
    transport: Transport
    planner: StepPlanner | None
    num_heads: int
    timeout_seconds: float
    computing: Computing
    device: torch.device
    dtype: torch.dtype
    logits_at_once: int | None
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
        """The model's config, with that of its towers, if it has some."""
        return whole_model(self.model).config

    def steps(self, batches: Iterator[StepBatch], planner: StepPlanner | None = None) -> PlanAhead:
        """Return the steps of these batches, planned ahead, the same on all ranks; planner: in place of its own."""
        return PlanAhead(
            batches,
            planner or self.planner,
            self.transport,
            timeout_seconds=self.timeout_seconds,
            num_heads=self.num_heads,
            cut=UNCUT if self.pipeline is None else self.pipeline.cut,
        )

    @property
    def num_parameters(self) -> int:
        """Count the parameters of the whole model."""
        if self.pipeline is not None:
            return self.pipeline.stage.num_parameters
        return sum(parameter.numel() for parameter in self.model.parameters())

    @property
    def is_cut(self) -> bool:
        """Whether a rank has a part of the model between steps."""
        parameters = self.parameters
        return self.pipeline is not None or (parameters is not None and parameters.ranks_in_step > 1)

    def part(self) -> dict[str, Any]:
        """Return the place of this rank and what of the model it has, as a step and its small passes take them."""
        if self.pipeline is None:
            return {"mesh": Mesh(self.transport, 1), "chunks": WHOLE_MODEL}
        return {"mesh": self.pipeline.mesh, "chunks": self.pipeline.stage.own}

    def next_token(self, batch: StepBatch, divisor: float | None = None) -> Objective:
        """Return the next token's loss: its sum over a batch by `divisor`; None: by what the batch weighs."""
        weight = batch.loss_weight if divisor is None else divisor
        return NextToken(batch=batch, divisor=weight, logits_at_once=self.logits_at_once)

    def run(self, planned: PlannedStep, name: str, *, step: int, train: bool, objective: Objective) -> RankResult:
        """Run this rank's microbatches forward, and backward to `train`. Collective."""
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
        """Return the sum over all ranks of what an objective gives, without gradients. Collective."""
        own = self.run(planned, name, step=step, train=False, objective=objective)
        return sum(self.each_rank(own.loss_sum))

    def planned(self, batch: StepBatch, name: str, planner: StepPlanner | None = None) -> PlannedStep:
        """Return a batch with its plan. Collective. name: of the step, in words. planner: as for `steps`."""
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
        """Let the model attend by the plan, and compute as asked, inside."""
        with attending_by_plan(self.model), nullcontext() if self.layers is None else self.layers.put_inside():
            yield

    def kernel(self, dtype: torch.dtype, say: Callable[[str], None] | None = None) -> BlockKernel:
        """Return the attention kernel for queries and keys of this dtype; say which it is, and others, when chosen.

        Collective the first time, between steps: a kernel that is wrong on one rank is used by none.
        """
        if dtype not in self._kernels:
            agree = partial(share_first, self.transport)
            found = choose_model_kernel(self.config, self.computing, self.device, dtype=dtype, say=say, agree=agree)
            self._kernels[dtype] = found
            choose_mixers(self.model, self.transport, self.device, dtype=dtype, say=say)
        return self._kernels[dtype]

    def cast_dtype(self) -> torch.dtype | None:
        """Return the dtype that forwards are cast to, by a surrounding torch.autocast where none was asked for."""
        kind = self.device.type
        if self.autocast is None and torch.is_autocast_enabled(kind):
            return torch.get_autocast_dtype(kind)
        return self.autocast

    def casting(self) -> Casting:
        """Return what makes the autocast of a forward, as it would be now, for a pass that is measured."""
        dtype = self.cast_dtype()
        return nullcontext if dtype is None else partial(_casting_anew, self.device.type, dtype)

    def start_offloading(self) -> None:
        """Open the store of offloaded activations, where there is one; the parameters lie where they will.

        Raises:
            MemoryShortage: it cannot be opened.
        """
        if self._offloading is None:
            where, kernel = f"rank {self.transport.rank}", self.kernel(self.cast_dtype() or self.dtype)
            self._offloading = start_offloading(self.offload, self.model, kernel, where=where, casting=self.casting())

    def close(self) -> None:
        """Close the store of offloaded activations."""
        if self._offloading is not None:
            self._offloading.store.close()


def engine_of(model: Any, transport: Transport, *, chunked: bool, **how: Any) -> Engine:
    """Return what runs planned steps of a Hugging Face model, or of the stages of one.

    chunked: whether a loss makes logits in chunks. how: of `Engine`.
    """
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
    """Cast a forward, the weights too: inside another autocast, which may be off, casts of before would be kept."""
    torch.clear_autocast_cache()
    try:
        with torch.autocast(kind, dtype=dtype):
            yield
    finally:
        torch.clear_autocast_cache()
