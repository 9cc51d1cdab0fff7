"""What lies cut over the ranks as parameters do, put together on rank 0, and taken from what is whole."""

from __future__ import annotations

from collections import deque

from torch import Tensor

from lengthwise.comm import Transport
from lengthwise.engine.parameters import Parameters
from lengthwise.engine.slices import gathered


def gather_to_first(parameters: Parameters, shard: Tensor, transport: Transport) -> dict[str, Tensor]:
    """Return what all ranks have in their shards, (entries,) each, by parameter, on the host of rank 0. Collective.

    It takes a bucket at a time; {} on other ranks.
    """
    found = gathered(parameters.layout, shard, transport, device=parameters.grad_shard.device)
    if transport.rank:
        deque(found, maxlen=0)
        return {}
    names, shapes = parameters.names, parameters.shapes
    return {names[index]: each.view(shapes[index]).to("cpu", copy=True) for index, each in found}


def set_master_weights(parameters: Parameters, rank: int, place: int, whole: Tensor) -> None:
    """Set this rank's part of a parameter to that of `whole`, (entries,); `publish` makes it the model's."""
    for run in parameters.layout.runs(rank):
        if run.parameter == place:
            parameters.master_weights[run.start : run.stop].copy_(whole[run.entry : run.entry + run.stop - run.start])
