"""Work beside pieces: the end of a step, and the gathers and sums of sharded parameters in a wave; and overhead."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lengthwise.cost.links import Numbers

_SHORT_STEP, _SHORT_STEP_ON_CPU = 0.05, 1.0  # seconds of arithmetic below which overhead takes longer


def is_mostly_overhead(step_seconds: float, *, on_gpus: bool) -> bool:
    """Return whether a step has so little work that no cost says how long it takes."""
    return step_seconds < (_SHORT_STEP if on_gpus else _SHORT_STEP_ON_CPU)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """The costs of a step's end.

    update_seconds: seconds of the optimizer's update of all parameters, of which each of W ranks does 1 / W.
    clear_seconds: seconds of work that every rank does for itself.
    reduced_bytes_per_second: rate of the collectives, per rank; by default that of the links.
    node_bytes_per_second: rate of a node's links in collectives, where rings have less of it.
    """

    update_seconds: float = 0.0
    clear_seconds: float = 0.0
    reduced_bytes_per_second: float | None = None
    node_bytes_per_second: float = 0.0

    def seconds(self, reduced_bytes: float, ranks: int, link_bytes_per_second: float) -> float:
        """Return the seconds of a step's end that reduces and gathers `reduced_bytes` per rank."""
        rate = self.reduced_bytes_per_second or link_bytes_per_second
        return reduced_bytes * (ranks - 1) / ranks / rate + self.update_seconds / ranks + self.clear_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Seconds in which sharded parameters and gradients travel in one wave, as `engine.wave_order` posts them.

    gather_seconds, reduce_seconds: seconds of one of `layers` layers. rest_...: seconds of units gathered before the
    first layer and summed after it. head_...: seconds of a head gathered while the last layer runs, and summed as that
    runs backward; 0 if the head belongs to the rest, as a tied head does, or FSDP2's root.

    While a layer computes, the next is gathered and the previous one summed. So a wave of L layers, each of f and b
    seconds on the slowest rank, takes for gathers g and sums r

        forward   rest + g + (L - 1) max(f, g) + max(f, head)
        backward  g + max(b, head + g) + (L - 2) max(b, r + g) + max(b, r) + r + rest
    """

    layers: int
    gather_seconds: float
    reduce_seconds: float
    rest_gather_seconds: float = 0.0
    rest_reduce_seconds: float = 0.0
    head_gather_seconds: float = 0.0
    head_reduce_seconds: float = 0.0

    def wave_seconds(self, forward: Numbers, backward: Numbers) -> Numbers:
        """Return the seconds of waves whose slowest ranks compute this long; arrays have one entry per wave."""
        layers, g, r = self.layers, self.gather_seconds, self.reduce_seconds
        f, b = forward / layers, backward / layers
        there = self.rest_gather_seconds + g + (layers - 1) * np.maximum(f, g) + np.maximum(f, self.head_gather_seconds)
        if layers == 1:
            back = g + np.maximum(b, self.head_reduce_seconds)
        else:
            back = g + np.maximum(b, self.head_reduce_seconds + g) + (layers - 2) * np.maximum(b, r + g)
            back = back + np.maximum(b, r)
        return there + back + r + self.rest_reduce_seconds
