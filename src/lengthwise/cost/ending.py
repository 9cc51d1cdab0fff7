"""What ranks do together beside pieces: the end of a step, and the gathers and sums of sharded parameters in a wave."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lengthwise.cost.links import Numbers


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """The step's end of one rank.

    update_seconds: of the optimizer's update of all parameters, of which W ranks do 1 / W each.
    clear_seconds: of what every rank does for itself, however many there are.
    reduced_bytes_per_second: how fast collectives move what a rank reduces and gathers; None: as fast as the links.
    """

    update_seconds: float = 0.0
    clear_seconds: float = 0.0
    reduced_bytes_per_second: float | None = None

    def seconds(self, reduced_bytes: float, ranks: int, link_bytes_per_second: float) -> float:
        """Return the seconds of a step's end that reduces and gathers so many bytes a rank."""
        rate = self.reduced_bytes_per_second or link_bytes_per_second
        return reduced_bytes * (ranks - 1) / ranks / rate + self.update_seconds / ranks + self.clear_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Seconds in which sharded parameters and gradients travel in one wave, as `engine.wave_order` posts them.

    gather_seconds, reduce_seconds: of one of `layers` layers. rest: of what is gathered before the first layer, and
    summed after it. head: of a head that is gathered while the last layer runs, and summed as that runs backward; 0
    where it belongs to the rest, as what is tied does, or FSDP2's root.

    A layer is gathered and the one before it summed while another computes, so a wave of L layers, each of f and b
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
        """Return how long waves take whose slowest ranks compute so long in all layers; arrays: an entry a wave."""
        layers, g, r = self.layers, self.gather_seconds, self.reduce_seconds
        f, b = forward / layers, backward / layers
        there = self.rest_gather_seconds + g + (layers - 1) * np.maximum(f, g) + np.maximum(f, self.head_gather_seconds)
        if layers == 1:
            back = g + np.maximum(b, self.head_reduce_seconds)
        else:
            back = g + np.maximum(b, self.head_reduce_seconds + g) + (layers - 2) * np.maximum(b, r + g)
            back = back + np.maximum(b, r)
        return there + back + r + self.rest_reduce_seconds
