"""AdamW on this rank's slice of the masters, with the gradient clipped by its norm over all ranks."""

from __future__ import annotations

import torch

from lengthwise.comm import Transport
from lengthwise.config import OptimizerConfig
from lengthwise.engine.replicated import FlatParameters


class ShardedAdamW:
    """torch's AdamW over the slice of each rank; elementwise, so the cut changes no result."""

    def __init__(self, flat: FlatParameters, config: OptimizerConfig, transport: Transport) -> None:
        self._flat, self._config, self._transport = flat, config, transport
        groups: dict[bool, list[torch.nn.Parameter]] = {}
        for start, stop, decayed in flat.shard_segments():
            segment = torch.nn.Parameter(flat.masters[start:stop])
            segment.grad = flat.grad_shard[start:stop]
            groups.setdefault(decayed, []).append(segment)
        self._adamw = None
        if groups:  # more ranks than parameters leave a rank without any
            self._adamw = torch.optim.AdamW(
                [
                    {"params": segments, "weight_decay": config.weight_decay if decayed else 0.0}
                    for decayed, segments in groups.items()
                ],
                lr=config.lr,
                betas=config.betas,
                eps=config.eps,
            )

    def reduce(self) -> float:
        """Sum gradients over all ranks; return their global norm, before clipping."""
        squares = self._flat.reduce_gradients().double().square().sum().reshape(1)
        self._transport.all_reduce(squares)
        return squares.sqrt().item()

    def update(self, lr: float, norm: float) -> None:
        """Clip the gradients of global norm `norm`, update this rank's slice, publish."""
        limit = self._config.max_grad_norm
        if limit is not None:  # the formula of torch.nn.utils.clip_grad_norm_
            self._flat.grad_shard.mul_(min(1.0, limit / (norm + 1e-6)))
        if self._adamw is not None:
            for group in self._adamw.param_groups:
                group["lr"] = lr
            self._adamw.step()
        self._flat.publish()
