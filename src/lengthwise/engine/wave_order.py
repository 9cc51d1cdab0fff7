"""The order of a wave's collectives, in which all ranks gather and reduce parameters unit by unit; no torch.

Units are the embedding, the decoder layers, and the last norm with the head. All ranks run every wave, and their calls
depend on the model alone, not on tokens, recomputation, chunks of the loss, routing or missing gradients.

    forward   entering unit u posts gather(u + 1), after gather(0) for the first
    backward  entering layer u posts reduce(u + 1), then gather(u - 1), after gather(u) for the last layer
    end       posts the remaining reduces

So a strict queue on every rank completes all calls, with any rings in between (docs/decisions/sharding-by-units.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

GATHER, REDUCE = "gather", "reduce"
END = -1  # stands for the end of a backward, in place of a unit


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitKind:
    """The role of a unit in a wave.

    again: True if freed after its forward and gathered again before its backward, as layers are. stays: True if kept
    from its forward to the end of its backward. With neither its backward needs no values. trains: True with gradients.
    """

    name: str
    again: bool = False
    stays: bool = False
    trains: bool = True


class UnitCall(NamedTuple):
    """A gather or reduce of a unit, by its number."""

    kind: str
    unit: int


class CallKey(NamedTuple):
    """The identity of a collective in a run: the same on all ranks, and increasing.

    entry: number of units that the pass has entered. number: number of the call in its entry. kind, unit: words for
    messages.
    """

    wave: int
    is_backward: bool
    entry: int
    number: int
    kind: str
    unit: str

    def __str__(self) -> str:
        """Return a description for messages."""
        return f"wave {self.wave}, {'backward' if self.is_backward else 'forward'}, {self.kind} of {self.unit}"


def forward_calls(units: Sequence[UnitKind]) -> list[list[UnitCall]]:
    """Return the calls that forward posts when it enters each unit."""
    calls = [[UnitCall(GATHER, number)] for number in range(len(units))]
    return [calls[0] + (calls[1] if calls[1:] else []), *calls[2:], *([[]] if calls[1:] else [])]


def backward_calls(units: Sequence[UnitKind]) -> list[tuple[int, list[UnitCall]]]:
    """Return the calls that backward posts when it enters each unit that is gathered again, and at the `END`."""
    again = [number for number in reversed(range(len(units))) if units[number].again]
    left = [number for number in reversed(range(len(units))) if units[number].trains]
    found: list[tuple[int, list[UnitCall]]] = []
    for place, entered in enumerate(again):
        calls = [UnitCall(GATHER, entered)] if not place else []
        calls += [UnitCall(REDUCE, number) for number in left if number > entered]
        left = [number for number in left if number <= entered]
        calls += [UnitCall(GATHER, number) for number in again[place + 1 : place + 2]]
        found.append((entered, calls))
    return [*found, (END, [UnitCall(REDUCE, number) for number in left])]
