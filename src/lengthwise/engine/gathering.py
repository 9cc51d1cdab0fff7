"""What lies cut over the ranks by a `FlatLayout`, put together again: a bucket at a time."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from lengthwise.comm import Transport
from lengthwise.engine.flat_layout import FlatLayout


def gathered(
    layout: FlatLayout, shard: Tensor, transport: Transport, *, dtype: torch.dtype | None = None
) -> Iterator[tuple[int, Tensor]]:
    """Yield each parameter's place and what all ranks have of it in their shards, (entries,) each. Collective.

    dtype: to gather them in; None: that of the shard. Those of a bucket are views of one tensor, which the next bucket
    does not touch.
    """
    members: dict[int, list[int]] = {}
    for index, number in enumerate(layout.bucket_of):
        members.setdefault(number, []).append(index)
    for bucket in range(layout.num_buckets):
        place = layout.bucket(bucket)
        own = shard[layout.in_shard(bucket)].to(dtype or shard.dtype)
        whole = torch.empty(place.stop - place.start, dtype=own.dtype, device=own.device)
        transport.all_gather(whole, own)
        for index in members.get(bucket, ()):
            start = layout.starts[index] - place.start
            yield index, whole[start : start + layout.sizes[index]]
