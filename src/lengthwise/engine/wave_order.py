"""The order of the collectives of a wave in which all ranks gather and reduce parameters unit by unit; no torch.

A unit is gathered and reduced at once: the embedding; each decoder layer; the last norm and the head. All ranks run
every wave, and what they post depends on the model alone: never on tokens, recomputation, chunks of the loss, routing
or gradients that are missing.

    forward   entering unit u posts gather(u + 1), after gather(0) for the first
    backward  entering layer u posts reduce(u + 1), then gather(u - 1), after gather(u) for the last layer
    end       posts the reduces that are left

So one strict queue a rank completes all calls, whatever rings lie between (docs/decisions/sharding-by-units.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

GATHER, REDUCE = "gather", "reduce"
END = -1  # in place of a unit: the end of a backward


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitKind:
    """How a unit takes part in a wave.

    again: it is freed after its forward, and gathered again before its backward, as a layer is. stays: it is kept from
    its forward to the end of its backward. Neither: its backward needs no values. trains: it has gradients.
    """

    name: str
    again: bool = False
    stays: bool = False
    trains: bool = True


class UnitCall(NamedTuple):
    """A gather or a reduce of a unit, by its number."""

    kind: str
    unit: int


class CallKey(NamedTuple):
    """Which collective of a run this is: the same on all ranks, and increasing on each.

    entry: counts the units that a pass has entered. number: counts calls of one entry. kind, unit: the call, in words.
    """

    wave: int
    is_backward: bool
    entry: int
    number: int
    kind: str
    unit: str

    def __str__(self) -> str:
        """Return where in a run it is."""
        return f"wave {self.wave}, {'backward' if self.is_backward else 'forward'}, {self.kind} of {self.unit}"


def forward_calls(units: Sequence[UnitKind]) -> list[list[UnitCall]]:
    """Return what is posted where forward enters each unit."""
    calls = [[UnitCall(GATHER, number)] for number in range(len(units))]
    return [calls[0] + (calls[1] if calls[1:] else []), *calls[2:], *([[]] if calls[1:] else [])]


def backward_calls(units: Sequence[UnitKind]) -> list[tuple[int, list[UnitCall]]]:
    """Return what is posted where backward enters each unit that is gathered again, in its order, and at the `END`."""
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
