"""The numbers that ranks share at a step's end, as records: one of each rank, the same list on all."""

from __future__ import annotations

from dataclasses import astuple, dataclass
from typing import TypeVar

from lengthwise.comm import Transport, share_numbers

Numbers = TypeVar("Numbers", bound="StepNumbers")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepNumbers:
    """What a rank found in a step; see `RankResult`. Subclasses add numbers of their own."""

    loss_sum: float
    router_loss: float
    busy_seconds: float
    ring_wait_seconds: float


def share_record(transport: Transport, own: Numbers) -> list[Numbers]:
    """Return the numbers of all ranks, in fp64, in the order of the ranks. Collective."""
    names = own.__dataclass_fields__
    rows = share_numbers(transport, [float(value) for value in astuple(own)]).tolist()
    return [type(own)(**dict(zip(names, row, strict=True))) for row in rows]
