"""What was measured on a device: the one input of costs that are fitted to a machine instead of taken from a table."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurements:
    """What one thread of a machine does, and what the machine has.

    linear_flops_per_second, attention_flops_per_second: in the precision of the run, forward and backward.
    copy_bytes_per_second: read and written, of large tensors. draw_per_second: normal random numbers.
    layer_seconds: what a layer costs however few tokens it has, forward and backward.
    process_bytes: what a process holds before any model. memory_bytes: of the machine; None: not known.
    """

    cores: int
    linear_flops_per_second: float
    attention_flops_per_second: float
    copy_bytes_per_second: float
    draw_per_second: float
    layer_seconds: float
    process_bytes: float
    memory_bytes: float | None
