"""Runs this rank's microbatches of a planned step, the model attending by the plan while they do."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lengthwise.attention import BlockKernel
from lengthwise.comm import Transport
from lengthwise.config import OffloadConfig
from lengthwise.engine.activations import Offloading, start_offloading
from lengthwise.engine.objective import Objective
from lengthwise.engine.replicated import FlatParameters
from lengthwise.engine.step import RankResult, run_plan
from lengthwise.models import Computing, DropoutKey, choose_model_kernel
from lengthwise.models.adapter import attending_by_plan
from lengthwise.session.losses import Autocasting, TokenValues
from lengthwise.session.model import refuse_balance
from lengthwise.session.rows import RowBatch
from lengthwise.session.source import PlannedStep
from lengthwise.session.values import Gathered, Per, ValuesOfTokens


@dataclass(kw_only=True)
class Microbatches:
    """What every pass of a session computes with.

    dtype: of the parameters. autocast: of mixed precision; None: that of a surrounding torch.autocast, if any.
    offload: of activations, as in a run file.
    """

    model: nn.Module
    transport: Transport
    computing: Computing
    device: torch.device
    dtype: torch.dtype
    autocast: torch.dtype | None
    seed: int
    offload: OffloadConfig | None = None
    _offloading: Offloading | None = field(default=None, init=False)
    _kernels: dict[torch.dtype, BlockKernel] = field(default_factory=dict, init=False)

    def run(
        self,
        planned: PlannedStep,
        objective: Objective,
        name: str,
        *,
        step: int,
        parameters: FlatParameters | None = None,
    ) -> RankResult:
        """Run them forward, and backward where `parameters` are given to take the gradients. Collective."""
        dtype, kind = self.autocast, self.device.type
        if dtype is None and torch.is_autocast_enabled(kind):
            dtype = torch.get_autocast_dtype(kind)
        if dtype is not None:
            objective = Autocasting(inner=objective, device=self.device, dtype=dtype)
        # Only forwards are cast, by the objective: backward follows what they did.
        kernel = self.kernel(dtype or self.dtype)
        if self._offloading is None:  # the parameters lie where they will
            where = f"rank {self.transport.rank}"
            self._offloading = start_offloading(self.offload, self.model, kernel, where=where)
        with self.attending(), torch.autocast(kind, enabled=False):
            return run_plan(
                self.model,
                planned.plan,
                planned.batch,
                self.transport,
                kernel,
                name=name,
                train=parameters is not None,
                objective=objective,
                parameters=parameters,
                offloading=self._offloading,
                dropout=DropoutKey(seed=self.seed, step=step),
            )

    def gather(
        self, planned: PlannedStep, values: TokenValues, per: Per, name: str, *, step: int
    ) -> tuple[Gathered, RankResult]:
        """Run them forward, and sum over the ranks what `values` gives of their tokens. Collective."""
        refuse_balance(self.model, "values")
        wide = torch.promote_types(self.dtype, torch.float32)
        gathered = Gathered(rows_of(planned), per, wide, self.device)
        work = self.run(planned, ValuesOfTokens(gathered=gathered, values=values), name, step=step)
        self.transport.phase = f"{name}, sum of the values"
        widths = shared(self.transport, [-1.0 if gathered.sums is None else float(gathered.sums[:1].numel())])[:, 0]
        if gathered.sums is None:  # no microbatch here: as many a slot as the others have
            shape = (int(widths.max()),) if widths.max() > 1 else ()
            gathered.sums = torch.zeros(gathered.num_slots, *shape, dtype=wide, device=self.device)
        self.transport.all_reduce(gathered.sums)
        return gathered, work

    @property
    def config(self) -> Any:
        """The model's config."""
        return self.model.config

    def attending(self) -> AbstractContextManager[None]:
        """Let the model attend by the plan inside."""
        return attending_by_plan(self.model)

    def close(self) -> None:
        """Close the store of offloaded activations."""
        if self._offloading is not None:
            self._offloading.store.close()

    def kernel(self, dtype: torch.dtype) -> BlockKernel:
        """Return the attention kernel for queries and keys of this dtype."""
        if dtype not in self._kernels:
            config = self.model.config
            self._kernels[dtype] = choose_model_kernel(config, self.computing, self.device, dtype=dtype)
        return self._kernels[dtype]


def shared(transport: Transport, numbers: list[float]) -> Tensor:
    """Return the numbers of all ranks, (ranks, numbers), in fp64. Collective."""
    rows = torch.empty(transport.world_size * len(numbers), dtype=torch.float64)
    transport.all_gather(rows, torch.tensor(numbers, dtype=torch.float64))
    return rows.view(-1, len(numbers))


def rows_of(planned: PlannedStep) -> RowBatch:
    """Return the rows of a step that a session planned."""
    assert isinstance(planned.batch, RowBatch), "who planned it"
    return planned.batch
