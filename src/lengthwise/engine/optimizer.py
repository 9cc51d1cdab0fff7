"""The optimizer of a run on this rank's shards of the master weights.

Those of torch that compute each entry by itself, and Lion: how parameters are cut into shards changes no result.

The update is fused where torch has one kernel for all of a shard, on the CPU as on GPUs: it reads and writes each entry
once, clips, too, and needs nothing beside it. Else it goes over the shards in parts, a 64th of them at a time, so that
what it needs beside them is small.

Offloaded, master weights and states are in the host's memory, and the update runs there: the rank's sum of gradients is
copied there once a step, and `Parameters.publish` brings the new values back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from lengthwise.comm import Transport
from lengthwise.config import OptimizerConfig
from lengthwise.engine.lion import Lion
from lengthwise.engine.norm import clip_factor, part_of, reduce_gradients
from lengthwise.engine.parameters import MASTER_WEIGHTS, Parameters

_KINDS: Mapping[str, Callable[..., Any]] = {
    "adamw": torch.optim.AdamW,
    "adam": torch.optim.Adam,
    "sgd": torch.optim.SGD,
    "lion": Lion,
}
_COUNTED = ("adamw", "adam")  # whose update depends on the number of the step
FUSED = ("adamw", "adam", "sgd")  # of which torch has one kernel for a whole update
_TEMPORARIES = {"adamw": 2}  # of a part's size in an update that is not fused
_MOST_TEMPORARIES = 6
_MOST_AT_ONCE = 1 << 30  # entries that a fused kernel takes: some have counted them in 32 bits


class ShardedOptimizer:
    """An optimizer over the shards of each rank.

    Its states are made at once: what does not fit shows before the first step. fused: None: where `FUSED` has it. Of an
    offloaded one `parameters` have their master weights on the host.
    """

    def __init__(
        self, parameters: Parameters, config: OptimizerConfig, transport: Transport, *, fused: bool | None = None
    ) -> None:
        self.parameters, self._config, self._transport = parameters, config, transport
        self._updates = 0
        groups: dict[bool, list[torch.nn.Parameter]] = {}
        shards, own = parameters.shards(), parameters.state()[MASTER_WEIGHTS]
        self._states = {name: torch.empty_like(own).zero_() for name in config.states}  # takes the memory
        summed = gradients = parameters.grad_shard
        if config.offload:
            assert own.device.type == "cpu", own.device
            gradients = torch.empty(summed.shape, dtype=summed.dtype, pin_memory=summed.is_cuda)
        self._gradients = gradients
        states_of_part: dict[torch.nn.Parameter, dict[str, Tensor]] = {}
        self._part = part_of(sum(len(shard.weights) for shard in shards))
        self.fused = config.name in FUSED if fused is None else fused
        for shard in shards:
            at_once = _MOST_AT_ONCE if self.fused else self._part
            within = slice(shard.start, shard.start + len(shard.weights))
            beside = (gradients[within], *(state[within] for state in self._states.values()))
            for part, gradient, *states in zip(
                *(each.split(at_once) for each in (shard.weights, *beside)), strict=True
            ):
                weights = torch.nn.Parameter(part)
                weights.grad = gradient
                states_of_part[weights] = dict(zip(self._states, states, strict=True))
                groups.setdefault(shard.decayed, []).append(weights)
        self._weights = [each for group in groups.values() for each in group]
        self._optimizer: Any = None  # whose divisor of gradients, which GradScaler sets, has no type
        if groups:  # more ranks than parameters leave a rank without any
            self._optimizer = self._make(groups)
            counts_on = own.device if self.fused else torch.device("cpu")
            for weights, states in states_of_part.items():  # what torch's own would make in its first step
                self._optimizer.state[weights] = {**self._counts(counts_on), **states}

    def _make(self, groups: Mapping[bool, list[torch.nn.Parameter]]) -> Any:
        """Make torch's optimizer of no parameters, as some would make states of theirs, then give it these."""
        config = self._config
        options: dict[str, Any] = {"fused": self.fused} if config.name in FUSED else {}
        if config.name != "lion":
            options["foreach"] = False  # which would need as much as all of the shards
        made = _KINDS[config.name]([torch.zeros(1)], lr=config.lr or 0.0, **config.arguments, **options)
        made.param_groups.clear()
        made.state.clear()
        for decayed, weights in groups.items():
            made.add_param_group({"params": weights, "weight_decay": config.weight_decay if decayed else 0.0})
        return made

    def _counts(self, device: torch.device) -> dict[str, Tensor]:
        """Return what torch counts for each parameter, before the first step."""
        return {"step": torch.zeros((), dtype=torch.float32, device=device)} if self._config.name in _COUNTED else {}

    def state(self) -> dict[str, Tensor]:
        """Return the states of this rank, by name: (entries,) each, in the places of `Parameters.state`."""
        return self._states

    def go_on_from(self, step: int) -> None:
        """Count updates from `step` on: so many were made before a checkpoint."""
        self._updates = step
        for state in self._optimizer.state.values() if self._optimizer is not None else ():
            if "step" in state:
                state["step"].fill_(step)

    def scale_gradients(self, factor: float) -> None:
        """Multiply this rank's gradients, or have the kernel of the next update do it."""
        if self.fused and self._weights and self._weights[0].dtype == torch.float32:
            # The kernel's divisor is fp32, and fp64 is wider.
            self._optimizer.grad_scale = torch.full((), 1 / factor, device=self._weights[0].device)
        else:
            self.parameters.grad_shard.mul_(factor)

    def collecting(self) -> AbstractContextManager[None]:
        """Return a block whose backwards add to the gradients, as all do."""
        return nullcontext()

    def zero_grad(self) -> None:
        """Clear the gradients of this rank."""
        self.parameters.clear_gradients()

    def pending_bytes(self) -> tuple[int, int]:
        """Count the bytes of states that are yet to be made, none, and those that a step's end needs for a while."""
        return 0, step_end_bytes(self.parameters, self._config)

    def update(self, lr: float) -> None:
        """Update this rank's shards."""
        self._updates += 1
        if self._gradients is not self.parameters.grad_shard:
            self._gradients.copy_(self.parameters.grad_shard)  # which waits for it
        if self._optimizer is not None:
            for group in self._optimizer.param_groups:
                group["lr"] = lr
            self._optimizer.step()
            self._optimizer.grad_scale = None

    def step(self, lr: float) -> None:
        """Update this rank's shards, publish them, and clear the gradients. Collective."""
        self.update(lr)
        self.parameters.publish()
        self.parameters.clear_gradients()

    def end_step(self, lr: float) -> float:
        """Reduce, clip as the config says, and step, outside of any loop; return the norm before. Collective."""
        norm, limit = reduce_gradients(self.parameters, self._transport), self._config.max_grad_norm
        if limit is not None:
            self.scale_gradients(clip_factor(limit, norm))
        self.step(lr)
        return norm

    @contextmanager
    def rehearsing(self) -> Iterator[None]:
        """Let updates inside the block change nothing, to the bit, of gradients and lr 0.

        After the first step this takes a copy of the states in the host's memory.
        """
        before = self._updates
        kept = {name: each.to("cpu", copy=True) for name, each in self._states.items()} if before else {}
        yield
        for name, each in self._states.items():
            each.copy_(kept[name]) if before else each.zero_()
        self.go_on_from(before)

    def rehearse(self) -> None:
        """Run the end of a step that changes nothing; gradients must be zero. Collective."""
        with self.rehearsing():
            self.end_step(0.0)


def kept_bytes(model: nn.Module, parameters: Parameters, config: OptimizerConfig) -> int:
    """Count the bytes of a rank from step to step: of the model, its gradients and masters, and optimizer states.

    Where the optimizer is offloaded, without what is in the host's memory.
    """
    there = (*model.parameters(), *model.buffers(), *parameters.tensors())
    storages = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in there}
    exact = parameters.state()[MASTER_WEIGHTS]
    return sum(storages.values()) + (-1 if config.offload else len(config.states)) * exact.nbytes


def step_end_bytes(parameters: Parameters, config: OptimizerConfig) -> int:
    """Count the bytes that the end of a step needs beside that: for the norm, for the update, and to publish it."""
    weights = [each.weights for each in parameters.shards()]
    entries = sum(map(len, weights))
    part = min(part_of(entries), max(map(len, weights), default=0))
    wide = weights[0].element_size() if weights else 0
    update = 0 if config.offload else _TEMPORARIES.get(config.name, _MOST_TEMPORARIES) * wide * part
    return max(2 * 8 * part, update, parameters.publish_bytes())
