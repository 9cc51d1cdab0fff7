"""AdamW on this rank's shards of the master weights, with the gradient clipped by its norm.

The norm goes over the shards in parts, a 64th of them at a time, so that what it needs beside them is small. So does
the update, or it is fused: one kernel for all of a shard, which clips, too, and needs nothing beside it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lengthwise.comm import Transport
from lengthwise.config import OptimizerConfig
from lengthwise.engine.parameters import MASTER_WEIGHTS, Parameters

_MOMENTS = ("exp_avg", "exp_avg_sq")  # as torch's AdamW has them
_PARTS = 64  # of a rank's parameters
_LEAST_PART = 1 << 16  # entries; shorter parts cost more in launches than they save


class ShardedAdamW:
    """torch's AdamW over the shards of each rank; elementwise, so how they are cut changes no result.

    Its moments are made at once: what does not fit shows before the first step.
    """

    def __init__(self, parameters: Parameters, config: OptimizerConfig, transport: Transport) -> None:
        self._parameters, self._config, self._transport = parameters, config, transport
        groups: dict[bool, list[torch.nn.Parameter]] = {}
        shards, own = parameters.shards(), parameters.state()[MASTER_WEIGHTS]
        self._moments = {name: torch.empty_like(own).zero_() for name in _MOMENTS}  # written: the memory is there now
        moments_of: dict[torch.nn.Parameter, dict[str, Tensor]] = {}
        self._part = part_of(sum(len(shard.weights) for shard in shards))
        on_gpu = any(shard.weights.is_cuda for shard in shards)
        self.fused = on_gpu if config.fused is None else config.fused
        for shard in shards:
            at_once = len(shard.weights) if self.fused else self._part
            within = slice(shard.start, shard.start + len(shard.weights))
            beside = (shard.gradient, *(each[within] for each in self._moments.values()))
            for part, gradient, *moments in zip(
                *(each.split(at_once) for each in (shard.weights, *beside)), strict=True
            ):
                weights = torch.nn.Parameter(part)
                weights.grad = gradient
                moments_of[weights] = dict(zip(_MOMENTS, moments, strict=True))
                groups.setdefault(shard.decayed, []).append(weights)
        self._weights = [each for group in groups.values() for each in group]
        self._adamw: Any = None  # whose divisor of gradients, which GradScaler sets, has no type
        if groups:  # more ranks than parameters leave a rank without any
            self._adamw = torch.optim.AdamW(
                [
                    {"params": weights, "weight_decay": config.weight_decay if decayed else 0.0}
                    for decayed, weights in groups.items()
                ],
                lr=config.lr,
                betas=config.betas,
                eps=config.eps,
                foreach=False,  # which would need as much as all of the shards
                fused=self.fused,
            )
            counts_on = own.device if self.fused else torch.device("cpu")
            for weights, moments in moments_of.items():  # what torch's AdamW would make in its first step
                count = torch.zeros((), dtype=torch.float32, device=counts_on)
                self._adamw.state[weights] = {"step": count, **moments}

    def state(self) -> dict[str, Tensor]:
        """Return the moments of this rank, by name: (entries,) each, in the places of `Parameters.state`."""
        return self._moments

    def go_on_from(self, step: int) -> None:
        """Count updates from `step` on: so many were made before a checkpoint."""
        for state in self._adamw.state.values() if self._adamw is not None else ():
            state["step"].fill_(step)

    def reduce(self) -> float:
        """Sum gradients over all ranks; return their global norm, before clipping. Collective."""
        return self.norm(self._parameters.reduce_gradients())

    def norm(self, gradients: Tensor) -> float:
        """Return the global norm of gradients of which each rank has its (entries,). Collective."""
        parts = gradients.split(self._part)
        norms = [torch.linalg.vector_norm(part, dtype=torch.float64) for part in parts]
        squares = torch.stack(norms).square().sum().reshape(1)
        self._transport.all_reduce(squares)
        return squares.sqrt().item()

    def update(self, lr: float, norm: float) -> None:
        """Clip the gradients of global norm `norm`, update this rank's shards, publish. Collective."""
        self.step(lr, norm)
        self._parameters.publish()

    def step(self, lr: float, norm: float) -> None:
        """Clip the gradients of global norm `norm` and update this rank's shards."""
        if self._adamw is not None:
            self._clip(norm)
            for group in self._adamw.param_groups:
                group["lr"] = lr
            self._adamw.step()

    def _clip(self, norm: float) -> None:
        """Scale gradients of global norm `norm` as torch.nn.utils.clip_grad_norm_ does, or have the kernel do it."""
        limit = self._config.max_grad_norm
        if limit is None:
            return
        factor = min(1.0, limit / (norm + 1e-6))
        if self.fused and self._weights[0].dtype == torch.float32:  # the kernel's divisor is fp32, and fp64 is wider
            self._adamw.grad_scale = torch.full((), 1 / factor, device=self._weights[0].device)
            return
        for weights in self._weights:
            assert weights.grad is not None, "gradients are views, which nothing sets to None"
            weights.grad.mul_(factor)

    @contextmanager
    def rehearsing(self) -> Iterator[None]:
        """Let updates inside the block change nothing, to the bit: before the first step, of gradients and lr 0."""
        counts = [state["step"] for state in self._adamw.state.values()] if self._adamw is not None else []
        assert not any(counts), "moments that are not zero would fade"
        yield
        for count in counts:
            count.zero_()

    def rehearse(self) -> None:
        """Run the end of a step that changes nothing; gradients must be zero. Collective."""
        with self.rehearsing():
            self.update(0.0, self.reduce())


def part_of(entries: int) -> int:
    """Return how many entries of a shard of so many are updated at a time."""
    return max(_LEAST_PART, -(-entries // _PARTS))


def kept_bytes(model: nn.Module, parameters: Parameters) -> int:
    """Count the bytes of a rank from step to step: of the model, its gradients and masters, and of AdamW's moments."""
    there = (*model.parameters(), *model.buffers(), *parameters.tensors())
    storages = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in there}
    return sum(storages.values()) + moment_bytes(parameters)


def moment_bytes(parameters: Parameters) -> int:
    """Count the bytes of AdamW's moments on this rank."""
    return len(_MOMENTS) * parameters.state()[MASTER_WEIGHTS].nbytes


def step_end_bytes(parameters: Parameters) -> int:
    """Count the bytes that the end of a step needs beside that: for the norm, for the update, and to publish it."""
    weights = [each.weights for each in parameters.shards()]
    entries = sum(map(len, weights))
    part = min(part_of(entries), max(map(len, weights), default=0))
    wide = weights[0].element_size() if weights else 0
    return max(2 * 8 * part, 2 * wide * part, parameters.publish_bytes())
