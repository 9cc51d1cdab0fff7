"""Every call of a transport once, with numbers that say what came: over gloo, over NCCL, and with one in its place."""

from __future__ import annotations

import torch
from torch import Tensor

from lengthwise.comm import Transport

_ELEMENTS, _HOPS, _CALLS = 1 << 16, 4, 6


def pass_around(transport: Transport, device: torch.device, dtype: torch.dtype = torch.float32) -> None:
    """Send from each rank to the next, some work under way, and compare what comes."""
    rank, ranks = transport.rank, transport.world_size
    for hop in range(_HOPS):
        transport.phase = f"{dtype}, hop {hop}"
        sent, room = (_full(value, device, dtype) for value in (rank + hop, -1))
        pending = transport.exchange([(sent, (rank + 1) % ranks)], [(room, (rank - 1) % ranks)])
        some = torch.randn(512, 512, device=device)
        _ = some @ some
        pending.wait()
        assert bool((room == float((rank - 1) % ranks + hop)).all()), (dtype, hop, room[:3])


def check_collectives(transport: Transport, device: torch.device) -> None:
    """Call every collective, some of them under way at once, wait for these from the last to the first, and compare."""
    rank, ranks = transport.rank, transport.world_size
    transport.phase = "collectives"
    total = _full(1, device)
    transport.all_reduce(total)
    assert bool((total == ranks).all())
    pieces, everyone = ([torch.empty(size, device=device) for _ in range(_CALLS)] for size in (2, 2 * ranks))
    sources = [torch.arange(2.0 * ranks, device=device) + n for n in range(_CALLS)]
    pending = [transport.reduce_scatter_async(*each) for each in zip(pieces, sources, strict=True)]
    pending += [transport.all_gather_async(all_, source[:2]) for all_, source in zip(everyone, sources, strict=True)]
    del sources  # what is under way is kept for it
    for each in (*reversed(pending), *pending):
        each.wait()
    for n, (piece, all_) in enumerate(zip(pieces, everyone, strict=True)):
        assert piece.tolist() == [ranks * (2.0 * rank + n), ranks * (2.0 * rank + 1 + n)]
        assert all_.tolist() == [float(n), 1.0 + n] * ranks
    transport.reduce_scatter(pieces[0], _full(rank, device)[: 2 * ranks])
    transport.all_gather(everyone[0], _full(rank, device)[:2])
    assert pieces[0].tolist() == [sum(range(ranks))] * 2
    assert everyone[0].tolist() == [float(each) for each in range(ranks) for _ in range(2)]
    last = _full(rank, device)
    transport.broadcast(last, ranks - 1)
    assert bool((last == ranks - 1).all())


def _full(value: float, device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.full((_ELEMENTS,), float(value), device=device, dtype=dtype)
