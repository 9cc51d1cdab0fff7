"""What a step's end asks of a model's parameters, however they and their gradients lie over the ranks.

Forward and backward ask nothing here: they use the model's own parameters. Whoever implements this makes these hold a
layer's values when its forward runs, and moves gradients on from them, by views or by hooks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import NoReturn, Protocol

import torch
from torch import Tensor, nn

from lengthwise.core.errors import ModelRefused
from lengthwise.engine.flat_layout import FlatLayout
from lengthwise.models.text_part import whole_model

MASTER_WEIGHTS = "master_weights"


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """A run of parameters that this rank updates: master weights and gradients, both (entries,), in fp32 or wider.

    `start`: where it begins in the rank's `state`. `decayed`: whether weight decay applies, as it does to parameters
    of two or more dimensions.
    """

    start: int
    weights: Tensor
    gradient: Tensor
    decayed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedParameters:
    """Where the parameters that all ranks train lie in the `state` of all ranks, as checkpoints know them.

    rank: of this one in the layout of its own parameters.
    """

    layout: FlatLayout
    names: Sequence[str]
    shapes: Sequence[tuple[int, ...]]
    rank: int


class Parameters(Protocol):
    """The trainable parameters of a model on one rank.

    layout: where the entries of each parameter, as `names` has them, lie in the `state` of all ranks.
    master_weights, grad_shard: this rank's exact parameters, and what `reduce_gradients` returns, (entries,) each; the
    first may be in the host's memory, the second is where the model runs.
    saved: where the parameters that all ranks train lie, those of other stages too.
    ranks_in_step: how many neighbouring ranks gather and sum together in every pass, so that each of them takes part in
    all microbatches of the others; 1: none do.
    """

    layout: FlatLayout
    master_weights: Tensor
    grad_shard: Tensor
    ranks_in_step: int
    saved: SavedParameters

    @property
    def names(self) -> Sequence[str]:
        """The names of the parameters, in the order of the layout."""
        ...

    @property
    def shapes(self) -> Sequence[tuple[int, ...]]:
        """Their shapes."""
        ...

    def shards(self) -> Sequence[Shard]:
        """Return what the optimizer of this rank updates in place; none where a rank has no parameters."""
        ...

    def reducing_early(self) -> AbstractContextManager[None]:
        """Sum gradients while the backward inside the block makes them, where that is on.

        The block is this rank's last backward of a step, and it has no transfer left in this step.
        """
        ...

    def begin_reducing(self) -> None:
        """Begin the sum of what is left of the gradients, where early sums are on: before any other collective."""
        ...

    def reduce_gradients(self) -> Tensor:
        """Sum the gradients of all ranks into the shards; return those of this rank, (entries,). Collective."""
        ...

    def gather_gradients(self) -> dict[str, Tensor]:
        """Return the reduced gradient of every parameter, by name; for checks, not for training. Collective."""
        ...

    def clear_gradients(self) -> None:
        """Set the gradients of this rank to zero."""
        ...

    def keep_sum(self) -> None:
        """Let the next backward add to the gradients that are summed and not cleared."""
        ...

    def attach_gradients(self) -> None:
        """See that the model has the parameters that were made, and these their gradients.

        Raises:
            ModelRefused: somebody replaced, moved or froze some.
        """
        ...

    def detach_gradients(self) -> None:
        """Leave the model's own gradients to others, without any, until they are attached again."""
        ...

    def publish(self) -> None:
        """Make the updated master weights of all ranks the values that forward reads. Collective.

        They may still be on their way: a forward of the model waits for what it reads, all else for `published`.
        """
        ...

    def published(self) -> None:
        """Wait until all values are there: before a transfer, and before they are read outside of a forward."""
        ...

    def free(self) -> None:
        """Free the values that a pass has left gathered: what somebody wrote there would be lost."""
        ...

    def whole_on_first(self, *, trained_only: bool) -> AbstractContextManager[None]:
        """See that the model of rank 0 has whole parameters inside the block, to be saved. Collective.

        trained_only: those that train; the others may be anything.
        """
        ...

    def publish_bytes(self) -> int:
        """Count the bytes that `publish` needs beside what is kept."""
        ...

    def tensors(self) -> Sequence[Tensor]:
        """Return all tensors that are kept from step to step."""
        ...

    def read_by_forward(self) -> Sequence[Tensor]:
        """Return what forward reads the values of all parameters from, those that do not train as well."""
        ...

    def state(self) -> Mapping[str, Tensor]:
        """Return what this rank alone holds of the parameters and cannot be computed anew, by name: (entries,) each."""
        ...


def shards_of(
    layout: FlatLayout, rank: int, shapes: Sequence[tuple[int, ...]], weights: Tensor, gradient: Tensor
) -> list[Shard]:
    """Cut what a rank updates, (entries,) each, where weight decay changes.

    Unused entries after a parameter go with it: a part is then of whole vectors of a CPU, and which entries it has
    changes no rounding.
    """
    segments = list[tuple[int, bool]]()  # where one begins
    for run in layout.runs(rank):
        decayed = len(shapes[run.parameter]) >= 2
        if not segments or segments[-1][1] != decayed:
            segments.append((run.start, decayed))
    stops = [*(start for start, _ in segments[1:]), len(weights)]
    return [
        Shard(start=start, weights=weights[start:stop], gradient=gradient[start:stop], decayed=decayed)
        for (start, decayed), stop in zip(segments, stops, strict=False)  # one stop without segments
    ]


def refuse_parts(model: nn.Module, is_whole: Callable[[], bool]) -> None:
    """Let a model whose parameters lie over the ranks refuse what goes by whole ones, unless `is_whole` says it is."""

    def refuse(what: str) -> None:
        if not is_whole():
            where, expected = f"model.{what}", "a model with whole parameters: here they lie over the ranks"
            remedy = f"Call the session's {what}, or its save_pretrained, on all ranks; load weights before it."
            raise ModelRefused(where, expected=expected, got=type(model).__name__, remedy=remedy)

    model.register_state_dict_pre_hook(lambda *_: refuse("state_dict"))
    model.register_load_state_dict_pre_hook(lambda *_: refuse("load_state_dict"))

    def refuse_copy(_protocol: object) -> NoReturn:
        raise pickled(model)

    for each in (model, whole_model(model)):
        vars(each)["__reduce_ex__"] = refuse_copy


def pickled(module: nn.Module) -> ModelRefused:
    """Say that a model that ranks train was to be pickled, as torch.save does, and where it is a part, copies do."""
    remedy = "Call session.save_pretrained or session.state_dict on all ranks, or make a copy before the session."
    name = type(module).__name__
    return ModelRefused(f"model {name}", expected="no torch.save, or copy of a rank's part", got="one", remedy=remedy)


def brought(values: Tensor, dtype: torch.dtype, device: torch.device, staged: Tensor | None = None) -> Tensor:
    """Return master weights in `dtype` where the model runs; the host's are cast there, and sent from pinned memory.

    staged: memory of the host, of as many entries in `dtype`, that keeps what is sent; None: some is taken for it.
    """
    if staged is None and values.device.type == device.type:
        return values.to(dtype)
    if staged is None:
        staged = torch.empty(values.shape, dtype=dtype, pin_memory=device.type != "cpu")
    return staged.copy_(values).to(device, non_blocking=True)


def largest_magnitude(parameters: Parameters) -> Tensor:
    """Return the largest magnitude in the state of this rank, (), on its device; NaN where one is NaN."""
    return torch.stack([torch.linalg.vector_norm(each, float("inf")) for each in parameters.state().values()]).max()
