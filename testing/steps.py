"""A step of any plan on strict in-process ranks: its losses, its gradients, and what was offloaded."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lengthwise.attention import AttentionNeeds, BlockKernel, choose_kernel
from lengthwise.comm import Mesh, Transport
from lengthwise.core.plan import Plan
from lengthwise.engine.batch import StepBatch
from lengthwise.engine.offloading import Offloading
from lengthwise.engine.step import StepContext, run_part
from lengthwise.models import DTYPES, keep_double, score_cap, wrapped_layers
from testing.laid import freed_parameters, whole_parameters
from testing.strict import StrictWorld

CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What all ranks of a step found together; `loss` is a mean over tokens."""

    loss: float
    router_loss: float
    gradients: dict[str, Tensor]
    offloaded_bytes: int

    def has_bits_of(self, other: Step) -> bool:
        """Whether losses and gradients are the same to the bit."""
        same = all(torch.equal(self.gradients[name], each) for name, each in other.gradients.items())
        return same and (self.loss, self.router_loss) == (other.loss, other.router_loss)


def run_step(
    model: torch.nn.Module,
    plan: Plan,
    batch: StepBatch,
    *,
    precision: str = "fp64",
    kernel: BlockKernel | None = None,
    make_store: Callable[[], Any] | None = None,
    ranks_per_node: int | None = None,
    around: Callable[[Transport], Transport] = lambda transport: transport,
    **options: Any,
) -> Step:
    """Run a plan on copies of a model, and gather what the ranks found.

    ranks_per_node: parameters lie over the ranks of each node; None: whole on every rank. make_store: where activations
    go that the plan offloads. `around` changes the transport of a rank.
    """
    dtype, kernel = (
        DTYPES[precision],
        kernel or choose_kernel(CPU, AttentionNeeds(capped=score_cap(model.config) is not None)),
    )

    def work(transport: Transport) -> Any:
        transport, own = around(transport), copy.deepcopy(model)
        if ranks_per_node:
            how = {"device": CPU, "layers": wrapped_layers(own), "ranks_per_node": ranks_per_node}
            parameters = freed_parameters(own, transport, dtype=dtype, **how)
        else:
            parameters = whole_parameters(own, transport, dtype=dtype)
        own_options = {"name": "test", "parameters": parameters, **options}
        if make_store is not None:
            own_options["offloading"] = Offloading(own, kernel, make_store())
        with keep_double(dtype):
            done = run_part(plan, batch, StepContext(own, Mesh(transport, 1), kernel, **own_options))
        parameters.reduce_gradients()
        return done, parameters.gather_gradients()

    results: list[Any] = StrictWorld(plan.ranks).run(work)
    return Step(
        loss=sum(done.loss_sum for done, _ in results) / max(1, batch.loss_tokens),
        router_loss=sum(done.router_loss for done, _ in results),
        offloaded_bytes=sum(done.offloaded_bytes for done, _ in results),
        gradients=results[0][1],
    )
