"""Lion (arXiv 2302.06675, algorithm 2): the sign of an average of gradients, with decoupled weight decay."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


class Lion(torch.optim.Optimizer):
    """torch has none; its one state is `exp_avg` of each parameter."""

    def __init__(
        self, params: Iterable[Tensor], lr: float, *, betas: tuple[float, float], weight_decay: float = 0.0
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self) -> None:  # pyright: ignore[reportIncompatibleMethodOverride] - without a closure
        """Update every parameter."""
        for group in self.param_groups:
            lr, (beta1, beta2) = group["lr"], group["betas"]
            for weights in group["params"]:
                if weights.grad is None:
                    continue
                state = self.state[weights]
                if not state:
                    state["exp_avg"] = torch.zeros_like(weights)
                average = state["exp_avg"]
                sign = average.lerp(weights.grad, 1 - beta1).sign_()
                weights.mul_(1 - lr * group["weight_decay"]).add_(sign, alpha=-lr)
                average.lerp_(weights.grad, 1 - beta2)
