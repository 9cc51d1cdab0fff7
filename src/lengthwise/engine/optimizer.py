"""AdamW on this rank's shards of the master weights, with the gradient clipped by its norm; its learning rate."""

from __future__ import annotations

import math

import torch

from lengthwise.comm import Transport
from lengthwise.config import OptimizerConfig
from lengthwise.engine.parameters import Parameters


class ShardedAdamW:
    """torch's AdamW over the shards of each rank; elementwise, so how they are cut changes no result."""

    def __init__(self, parameters: Parameters, config: OptimizerConfig, transport: Transport) -> None:
        self._parameters, self._config, self._transport = parameters, config, transport
        groups: dict[bool, list[torch.nn.Parameter]] = {}
        for shard in parameters.shards():
            weights = torch.nn.Parameter(shard.weights)
            weights.grad = shard.gradient
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
            )

    def reduce(self) -> float:
        """Sum gradients over all ranks; return their global norm, before clipping."""
        squares = self._parameters.reduce_gradients().double().square().sum().reshape(1)
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
