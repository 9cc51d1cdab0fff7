"""How fast the transports of an emulation are, measured before it: the links and the step's end of its simulator.

All ranks send to the next one and receive from the one before, at a common time, messages of some sizes; then they
reduce and gather parts of the parameters. A line through the medians is latency and rate. Nothing of what is emulated
afterwards has one of these sizes, which `refuse_measured` asserts.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from lengthwise.cost import Cost, Link

MESSAGE_FLOATS = (5_003, 20_011, 80_021, 320_009, 1_280_023)
PARAMETER_SHARES = (0.3, 0.7)
_REPEATS, _LEAD_SECONDS = 9, 0.005


def measured_links(transport: Any, cost: Cost) -> Cost:
    """Measure on all ranks; return the costs with these links, the same on every rank."""
    ranks = transport.world_size
    seconds: dict[float, float] = {}
    for floats in MESSAGE_FLOATS:
        sent, received = torch.ones(floats), torch.ones(floats)
        target, source = (transport.rank + 1) % ranks, (transport.rank - 1) % ranks

        def pass_on(sent: Any = sent, received: Any = received, target: int = target, source: int = source) -> None:
            transport.exchange([(sent, target)], [(received, source)]).wait()

        seconds[4.0 * floats] = _median_seconds(transport, pass_on)
    link = fitted_link(seconds, cost.layers)
    rates = []
    for share in PARAMETER_SHARES:
        mine = torch.ones(max(1, int(share * cost.reduced_bytes / 8 / ranks)))
        everyone = torch.ones(mine.numel() * ranks)

        def end(mine: Any = mine, everyone: Any = everyone) -> None:
            transport.reduce_scatter(mine, everyone)
            transport.all_gather(everyone, mine)

        rates.append(8 * everyone.numel() * (ranks - 1) / ranks / _median_seconds(transport, end))
    ending = replace(cost.ending, reduced_bytes_per_second=statistics.mean(rates))
    return replace(cost, near=link, far=link, ending=ending, uplink_bytes_per_second=float("inf"))


def fitted_link(seconds: Mapping[float, float], layers: int) -> Link:
    """Fit latency and rate to seconds by bytes, every size by its relative error."""
    sizes, took = np.array(list(seconds)), np.array(list(seconds.values()))
    terms = np.stack([np.ones_like(sizes), sizes], axis=1) / took[:, None]
    latency, of_byte = np.maximum(0.0, np.linalg.lstsq(terms, np.ones_like(took), rcond=None)[0])
    return Link(bytes_per_second=1 / max(float(of_byte), 1e-15), hop_seconds=float(latency) * layers)


def refuse_measured(floats: Collection[int]) -> None:
    """Assert that none of the messages that are emulated is of a size that was measured."""
    same = set(MESSAGE_FLOATS) & set(floats)
    assert not same, f"emulated messages of {sorted(same)} floats, from which the links were measured"


def _median_seconds(transport: Any, work: Callable[[], None]) -> float:
    """Return the median over repeats and ranks of what one of them takes from a common start; the first is left out."""
    took = torch.zeros(_REPEATS + 1, transport.world_size, dtype=torch.float64)
    for repeat in range(_REPEATS + 1):
        ready = torch.zeros(transport.world_size, dtype=torch.float64)
        ready[transport.rank] = time.monotonic()
        transport.all_reduce(ready)
        start = float(ready.max()) + _LEAD_SECONDS
        time.sleep(max(0.0, start - time.monotonic()))
        work()
        took[repeat, transport.rank] = time.monotonic() - start
    transport.all_reduce(took)
    return float(took[1:].median())
