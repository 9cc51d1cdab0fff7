"""AdamW on this rank's shards of the master weights, with the gradient clipped by its norm; its learning rate.

Norm and update go over the shards in parts, a 64th of them at a time: what they need beside it is small.
"""

from __future__ import annotations

import math

import torch
from torch import nn

from lengthwise.comm import Transport
from lengthwise.config import OptimizerConfig
from lengthwise.engine.parameters import Parameters

_MOMENTS = 2  # of AdamW, which its first step makes
_PARTS = 64  # of a rank's parameters
_LEAST_PART = 1 << 16  # entries; shorter parts cost more in launches than they save


class ShardedAdamW:
    """torch's AdamW over the shards of each rank; elementwise, so how they are cut changes no result."""

    def __init__(self, parameters: Parameters, config: OptimizerConfig, transport: Transport) -> None:
        self._parameters, self._config, self._transport = parameters, config, transport
        groups: dict[bool, list[torch.nn.Parameter]] = {}
        shards = parameters.shards()
        self._part = part_of(sum(len(shard.weights) for shard in shards))
        for shard in shards:
            for part, gradient in zip(
                *(each.split(self._part) for each in (shard.weights, shard.gradient)), strict=True
            ):
                weights = torch.nn.Parameter(part)
                weights.grad = gradient
                groups.setdefault(shard.decayed, []).append(weights)
        self._weights = [each for group in groups.values() for each in group]
        self._adamw = None
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
            )

    def reduce(self) -> float:
        """Sum gradients over all ranks; return their global norm, before clipping."""
        parts = self._parameters.reduce_gradients().split(self._part)
        squares = torch.stack([part.double().square().sum() for part in parts]).sum().reshape(1)
        self._transport.all_reduce(squares)
        return squares.sqrt().item()

    def update(self, lr: float, norm: float) -> None:
        """Clip the gradients of global norm `norm`, update this rank's shards, publish."""
        limit = self._config.max_grad_norm
        if limit is not None:  # the formula of torch.nn.utils.clip_grad_norm_
            for weights in self._weights:
                assert weights.grad is not None, "gradients are views, which nothing sets to None"
                weights.grad.mul_(min(1.0, limit / (norm + 1e-6)))
        if self._adamw is not None:
            for group in self._adamw.param_groups:
                group["lr"] = lr
            self._adamw.step()
        self._parameters.publish()


def part_of(entries: int) -> int:
    """Return how many entries of a shard of so many are updated at a time."""
    return max(_LEAST_PART, -(-entries // _PARTS))


def kept_bytes(model: nn.Module, parameters: Parameters) -> int:
    """Count the bytes of a rank from step to step: of the model, its gradients and masters, and of AdamW's moments."""
    there = (*model.parameters(), *model.buffers(), *parameters.tensors())
    storages = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in there}
    return sum(storages.values()) + moment_bytes(parameters)


def moment_bytes(parameters: Parameters) -> int:
    """Count the bytes of AdamW's moments on this rank, which its first step makes."""
    return _MOMENTS * sum(each.weights.nbytes for each in parameters.shards())


def step_end_bytes(model: nn.Module, parameters: Parameters) -> int:
    """Count the bytes that the end of a step needs beside that: for the norm, for the update, and to publish it."""
    weights = [each.weights for each in parameters.shards()]
    entries = sum(map(len, weights))
    part = min(part_of(entries), max(map(len, weights), default=0))
    narrow, wide = (next(iter(each)).element_size() for each in (model.parameters(), weights or [torch.zeros(0)]))
    return max(2 * 8 * part, 2 * wide * part, narrow * entries if narrow != wide else 0)


def learning_rate(config: OptimizerConfig, step: int, num_steps: int) -> float:
    """Return the learning rate of `step`, counted from 1.

    Warm-up multiplies by min(1, step / warmup_steps). After it, linear and cosine fall from the peak towards 0, which
    they would reach one step after the last: no step of a run has learning rate 0.
    """
    warmup = min(1.0, step / config.warmup_steps) if config.warmup_steps else 1.0
    if config.schedule == "constant":
        return config.lr * warmup
    progress = max(0, step - 1 - config.warmup_steps) / max(1, num_steps - config.warmup_steps)
    remaining = 1 - progress if config.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
    return config.lr * warmup * remaining
