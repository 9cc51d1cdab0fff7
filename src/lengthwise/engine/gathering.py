"""What lies cut over the ranks by a `FlatLayout`, put together again: a bucket at a time."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import torch
from torch import Tensor

from lengthwise.comm import Transport
from lengthwise.engine.flat_layout import FlatLayout
from lengthwise.engine.parameters import Parameters


def gathered(
    layout: FlatLayout,
    shard: Tensor,
    transport: Transport,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
) -> Iterator[tuple[int, Tensor]]:
    """Yield each parameter's place and what all ranks have of it in their shards, (entries,) each. Collective.

    transport: of the layout's ranks. dtype, device: to gather them in; None: those of the shard. Those of a bucket are
    views of one tensor, which the next bucket does not touch.
    """
    members: dict[int, list[int]] = {}
    for index, number in enumerate(layout.bucket_of):
        members.setdefault(number, []).append(index)
    order = layout.ranks_in_order()
    order = None if order == sorted(order) else order
    for bucket in range(layout.num_buckets):
        place = layout.bucket(bucket)
        own = shard[layout.in_shard(bucket)].to(device or shard.device, dtype or shard.dtype)
        whole = torch.empty(place.stop - place.start, dtype=own.dtype, device=own.device)
        transport.all_gather(whole, own)
        if order is not None:
            whole = whole.view(layout.world_size, -1)[order].view(-1)
        for index in members.get(bucket, ()):
            start = layout.starts[index] - place.start
            yield index, whole[start : start + layout.sizes[index]]


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
