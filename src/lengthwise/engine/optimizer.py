"""The optimizer on this rank's shards of the master weights, with the gradient clipped by its norm.

Those of torch that compute each entry by itself, and Lion: how parameters are cut into shards changes no result. Nor of
bitsandbytes, whose states of 8 bits share a scale in blocks of entries: no shard ends inside of one (`block_of`); and
whether a parameter is so short that its states are in fp32 is said by the whole of it, as bitsandbytes does.

The norm goes over the shards in parts, a 64th of them at a time, so that what it needs beside them is small. So does
the update, or it is fused: one kernel for all of a shard, which clips, too, and needs nothing beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from threading import Lock
from typing import Any

import torch
from torch import Tensor, nn

from lengthwise.comm import Transport
from lengthwise.config import OptimizerConfig
from lengthwise.config.optimizer import FUSED, IN_8_BIT
from lengthwise.engine.flat_layout import FlatLayout
from lengthwise.engine.lion import Lion
from lengthwise.engine.norm import clip_factor, gradient_norm, part_of
from lengthwise.engine.parameters import MASTER_WEIGHTS, Parameters, Shard

_MOMENTS = ("exp_avg", "exp_avg_sq")
_KINDS: Mapping[str, Callable[..., Any]] = {
    "adamw": torch.optim.AdamW,
    "adam": torch.optim.Adam,
    "sgd": torch.optim.SGD,
    "adagrad": torch.optim.Adagrad,
    "rmsprop": torch.optim.RMSprop,
    "nadam": torch.optim.NAdam,
    "radam": torch.optim.RAdam,
    "lion": Lion,
}
_BLOCK = 256  # entries of one scale in bitsandbytes
SHORT = 4096  # entries below which a parameter has states of fp32 there, its `min_8bit_size`
_ALONE = Lock()  # bitsandbytes on CPUs rounds with another thread's table where two do it at once
_IN_FP32 = "_fp32"  # of such states, after bitsandbytes' name
_UNCOUNTED = ("sgd", "lion")  # whose update does not depend on the number of the step
_TEMPORARIES = {"adamw": 2}  # of a part's size in an update that is not fused
_MOST_TEMPORARIES = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """What an optimizer keeps: a number for each `entries`, that starts from `start`. dtype: None, that of weights.

    is_short: it is kept of parameters of fewer than `SHORT` entries alone (`FlatLayout.short_runs`).
    """

    start: float = 0.0
    dtype: torch.dtype | None = None
    entries: int = 1
    is_short: bool = False

    def number(self, layout: FlatLayout, rank: int) -> int:
        """Return how many numbers of it a rank has."""
        if self.is_short:
            return sum(run.stop - run.start for run, _ in layout.short_runs(rank, SHORT))
        return -(-layout.shard_entries // self.entries)

    def made(self, weights: Tensor, number: int) -> Tensor:
        """Return so many numbers as they start for weights (entries,)."""
        return torch.full((number,), self.start, dtype=self.dtype or weights.dtype, device=weights.device)

    def within(self, tensor: Tensor, start: int, stop: int) -> Tensor:
        """Return what of it is of the entries [start, stop); `start` begins a block."""
        return tensor[start // self.entries : -(-stop // self.entries)]


def states_of(config: OptimizerConfig) -> dict[str, State]:
    """Return what an optimizer keeps of each entry, as torch or bitsandbytes names it."""
    if config.name in IN_8_BIT:
        numbers = (1, 2) if config.name == "adamw_8bit" else (1,)
        kept = {
            "state{}": State(dtype=torch.uint8),
            "absmax{}": State(dtype=torch.float32, entries=_BLOCK),
            "state{}" + _IN_FP32: State(dtype=torch.float32, is_short=True),
        }
        return {name.format(number): state for number in numbers for name, state in kept.items()}
    if config.name == "adagrad":
        return {"sum": State(start=config.initial_accumulator_value or 0.0)}
    names = {"sgd": (), "rmsprop": ("square_avg",), "lion": ("exp_avg",)}.get(config.name, _MOMENTS)
    names = (*names, *["momentum_buffer"] * bool(config.momentum), *["grad_avg"] * bool(config.centered))
    return dict.fromkeys(names, State())


def block_of(config: OptimizerConfig) -> int:
    """Return how many entries of a parameter, from its first on, no shard may divide."""
    return _BLOCK if config.name in IN_8_BIT else 1


class ShardedOptimizer:
    """An optimizer over the shards of each rank.

    Its states are made at once: what does not fit shows before the first step.
    """

    def __init__(self, parameters: Parameters, config: OptimizerConfig, transport: Transport) -> None:
        self._parameters, self._config, self._transport = parameters, config, transport
        self._updates = 0
        groups: dict[bool, list[torch.nn.Parameter]] = {}
        shards, own = parameters.shards(), parameters.state()[MASTER_WEIGHTS]
        self._kept = states_of(config)
        layout, rank = parameters.layout, transport.rank
        self._states = {name: each.made(own, each.number(layout, rank)) for name, each in self._kept.items()}
        self.short = [name for name, each in self._kept.items() if each.is_short]
        self._short_runs = [*layout.short_runs(rank, SHORT)] if self.short else []
        states_of_part: dict[torch.nn.Parameter, dict[str, Tensor]] = {}
        block = block_of(config)
        self._part = -(-part_of(sum(len(shard.weights) for shard in shards)) // block) * block
        on_gpu = any(shard.weights.is_cuda for shard in shards)
        self.fused = on_gpu and config.name in FUSED if config.fused is None else config.fused
        for shard in shards:
            at_once = len(shard.weights) if self.fused else self._part
            for first, last, place in self._pieces(shard, at_once):
                within = slice(first - shard.start, last - shard.start)
                weights = torch.nn.Parameter(shard.weights[within])
                weights.grad = shard.gradient[within]
                states_of_part[weights] = self._states_of(first, last, place)
                groups.setdefault(shard.decayed, []).append(weights)
        self._weights = [each for group in groups.values() for each in group]
        self._optimizer: Any = None  # whose divisor of gradients, which GradScaler sets, has no type
        if groups:  # more ranks than parameters leave a rank without any
            self._optimizer = self._make(groups)
            counts_on = own.device if self.fused else torch.device("cpu")
            for weights, states in states_of_part.items():  # what it would make itself in its first step
                self._optimizer.state[weights] = {**self._counts(counts_on), **states}

    def _pieces(self, shard: Shard, at_once: int) -> Iterator[tuple[int, int, int | None]]:
        """Yield what of a shard is updated at once: (start, stop), and of a short parameter where its states lie."""
        first, stop, block = shard.start, shard.start + len(shard.weights), block_of(self._config)
        for run, place in self._short_runs:
            if shard.start <= run.start < stop:
                yield from (
                    (start, min(start + at_once, run.start), None) for start in range(first, run.start, at_once)
                )
                yield run.start, run.stop, place
                first = -(-run.stop // block) * block
        yield from ((start, min(start + at_once, stop), None) for start in range(first, stop, at_once))

    def _states_of(self, first: int, last: int, place: int | None) -> dict[str, Tensor]:
        """Return what is kept of a piece, by the names that the optimizer has for it."""
        if place is not None:
            within = slice(place, place + last - first)
            return {name.removesuffix(_IN_FP32): self._states[name][within] for name in self.short}
        kept = {name: each for name, each in self._kept.items() if name not in self.short}
        return {name: each.within(self._states[name], first, last) for name, each in kept.items()}

    def _make(self, groups: Mapping[bool, list[torch.nn.Parameter]]) -> Any:
        """Make torch's optimizer of no parameters, as some would make states of theirs, then give it these."""
        config = self._config
        if config.name in IN_8_BIT:
            made: Any = _of_bitsandbytes(config)
        else:
            options: dict[str, Any] = {"fused": self.fused} if config.name in FUSED else {}
            if config.name != "lion":
                options["foreach"] = False  # which would need as much as all of the shards
            made = _KINDS[config.name]([torch.zeros(1)], lr=config.lr, **config.arguments, **options)
        made.param_groups.clear()
        made.state.clear()
        for decayed, weights in groups.items():
            made.add_param_group({"params": weights, "weight_decay": config.weight_decay if decayed else 0.0})
        return made

    def _counts(self, device: torch.device) -> dict[str, Any]:
        """Return what is counted for each parameter, before the first step, and what its states are read with."""
        if self._config.name in IN_8_BIT:
            maps: dict[str, Tensor] = self._optimizer.name2qmap
            maps.update({name: each.to(self._weights[0].device) for name, each in maps.items()})
            return {"step": 0, "qmap1": maps["dynamic"], "qmap2": maps["udynamic"]}
        if self._config.name in _UNCOUNTED:
            return {}
        step = {"step": torch.zeros((), dtype=torch.float32, device=device)}
        return {**step, "mu_product": torch.ones(())} if self._config.name == "nadam" else step

    def state(self) -> dict[str, Tensor]:
        """Return the states of this rank, by name, each as `states_of` says, in the places of `Parameters.state`."""
        return self._states

    def go_on_from(self, step: int) -> None:
        """Count updates from `step` on: so many were made before a checkpoint."""
        self._updates = step
        product = _mu_product(self._config, step) if self._config.name == "nadam" else None
        for state in self._optimizer.state.values() if self._optimizer is not None else ():
            if isinstance(state.get("step"), int):
                state["step"] = step
            elif "step" in state:
                state["step"].fill_(step)
            if product is not None:
                state["mu_product"].copy_(product)

    def reduce(self) -> float:
        """Sum gradients over all ranks; return their global norm, before clipping. Collective."""
        return self.norm(self._parameters.reduce_gradients())

    def norm(self, gradients: Tensor) -> float:
        """Return the global norm of gradients of which each rank has its (entries,). Collective."""
        return gradient_norm(gradients, self._transport)

    def update(self, lr: float, norm: float) -> None:
        """Clip the gradients of global norm `norm`, update this rank's shards, publish. Collective."""
        self.step(lr, norm)
        self._parameters.publish()

    def step(self, lr: float, norm: float) -> None:
        """Clip the gradients of global norm `norm` and update this rank's shards."""
        self._updates += 1
        if self._optimizer is not None:
            self._clip(norm)
            for group in self._optimizer.param_groups:
                group["lr"] = lr
            with _ALONE if self._config.name in IN_8_BIT else nullcontext():
                self._optimizer.step()

    def _clip(self, norm: float) -> None:
        """Scale gradients of global norm `norm` as torch.nn.utils.clip_grad_norm_ does, or have the kernel do it."""
        limit = self._config.max_grad_norm
        if limit is None:
            return
        factor = clip_factor(limit, norm)
        if self.fused and self._weights[0].dtype == torch.float32:  # the kernel's divisor is fp32, and fp64 is wider
            self._optimizer.grad_scale = torch.full((), 1 / factor, device=self._weights[0].device)
            return
        for weights in self._weights:
            assert weights.grad is not None, "gradients are views, which nothing sets to None"
            weights.grad.mul_(factor)

    @contextmanager
    def rehearsing(self) -> Iterator[None]:
        """Let updates inside the block change nothing, to the bit, of gradients and lr 0.

        After the first step this takes a copy of the states in the host's memory.
        """
        before = self._updates
        kept = {name: each.to("cpu", copy=True) for name, each in self._states.items()} if before else {}
        yield
        for name, each in self._states.items():
            each.copy_(kept[name]) if before else each.fill_(self._kept[name].start)
        self.go_on_from(before)

    def rehearse(self) -> None:
        """Run the end of a step that changes nothing; gradients must be zero. Collective."""
        with self.rehearsing():
            self.update(0.0, self.reduce())


def kept_bytes(model: nn.Module, parameters: Parameters, config: OptimizerConfig) -> int:
    """Count the bytes of a rank from step to step: of the model, its gradients and masters, and optimizer states."""
    there = (*model.parameters(), *model.buffers(), *parameters.tensors())
    storages = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in there}
    weights, layout = parameters.state()[MASTER_WEIGHTS], parameters.layout
    states = (
        max(each.number(layout, rank) for rank in range(layout.world_size)) * (each.dtype or weights.dtype).itemsize
        for each in states_of(config).values()
    )
    return sum(storages.values()) + sum(states)


def step_end_bytes(parameters: Parameters, config: OptimizerConfig) -> int:
    """Count the bytes that the end of a step needs beside that: for the norm, for the update, and to publish it."""
    weights = [each.weights for each in parameters.shards()]
    entries = sum(map(len, weights))
    part = min(part_of(entries), max(map(len, weights), default=0))
    wide = weights[0].element_size() if weights else 0
    update = _TEMPORARIES.get(config.name, _MOST_TEMPORARIES) * wide * part
    return max(2 * 8 * part, update, parameters.publish_bytes())


def _of_bitsandbytes(config: OptimizerConfig) -> Any:
    """Make an optimizer of bitsandbytes, which updates with the states that it finds: in 8 bits or in fp32."""
    import bitsandbytes

    kind = {"adamw_8bit": bitsandbytes.optim.AdamW8bit, "lion_8bit": bitsandbytes.optim.Lion8bit}[config.name]
    return kind([torch.nn.Parameter(torch.zeros(1))], lr=config.lr, **config.arguments)


def _mu_product(config: OptimizerConfig, step: int) -> Tensor:
    """Return what NAdam's product of momenta is after `step` steps, (), in the order that torch multiplies in."""
    assert config.betas is not None, config
    assert config.momentum_decay is not None, config
    product = torch.ones(())
    for number in range(1, step + 1):
        product *= config.betas[0] * (1.0 - 0.5 * 0.96 ** (number * config.momentum_decay))
        if not product:
            break
    return product
