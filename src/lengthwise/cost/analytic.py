"""Costs from FLOPs and bytes, to plan with before measuring.

Forward and backward together, for a sequence of s tokens over all layers:

    linear     6 FLOPs per token and active matrix parameter (2 forward, 4 backward), and 3 times a scan's forward
    attention  7 s^2 x heads x head_dim FLOPs per layer: two products forward and five backward, of half the square each
    ring       K and V of a token once forward, in the compute type; backward once more, and dK and dV in fp32
    sweep      for a layer with states, if a sequence is cut: a map in fp32 per round, in both passes (here of one
               sequence per piece); its scan then takes half as long again
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from lengthwise.core.shape import ModelShape
from lengthwise.cost.hardware import Hardware
from lengthwise.cost.links import Floats
from lengthwise.cost.plain import plain_cost
from lengthwise.cost.terms import Cost

GRADIENT_BYTES = 4  # dK and dV are summed in fp32 as they travel
STATE_BYTES = 4  # states and maps are fp32
SCAN_CUT = 0.5  # a scan that also returns its map takes 1.5 times as long (measured on CPUs, benchmarks/families.py)
PASSES = 2  # forward and backward each go once around the ring, and each make a sweep


def analytic_cost(shape: ModelShape, hardware: Hardware) -> Cost:
    """Return the costs of a model on a kind of device, for ranks of one device each."""
    linear_flops, attention_flops = flops_coefficients(shape)
    kv_values = 2 * shape.key_width
    ring_bytes = kv_values * (PASSES * hardware.compute_dtype_bytes + GRADIENT_BYTES)
    peak = hardware.peak_flops_per_second
    sweep = hardware.hop_latency_seconds + STATE_BYTES * shape.map_values / hardware.link_bytes_per_second
    return plain_cost(
        quadratic_seconds=attention_flops / (peak * hardware.attention_efficiency),
        linear_seconds=linear_flops / (peak * hardware.linear_efficiency),
        fixed_seconds=shape.layers * hardware.layer_launch_seconds,
        ring_seconds=ring_bytes / hardware.link_bytes_per_second,
        hop_seconds=PASSES * (shape.num_attention * hardware.hop_latency_seconds + shape.state_layers * sweep),
        cut_seconds=SCAN_CUT * scan_flops(shape) / (peak * hardware.linear_efficiency),
        windows=shape.window_shares,
        couples_layers=True,
        version=f"analytic/1 {shape.name} {hardware.name}",
    )


def step_flops(shape: ModelShape, lengths: Sequence[int]) -> float:
    """Return the model's FLOPs of a step, forward and backward, without masked and recomputed work, as in MFU."""
    linear_flops, attention_flops = flops_coefficients(shape)
    counting = Cost(quadratic_seconds=attention_flops, linear_seconds=linear_flops, windows=shape.window_shares)
    return float(counting.compute_seconds(np.array(lengths, dtype=np.int64)).sum())


def layer_flops(layers: Sequence[ModelShape], lengths: Sequence[int]) -> tuple[list[float], float]:
    """Return the FLOPs of each layer (`layer_shapes`) of a model, and those of the head, as in `step_flops`."""
    attention, linear, head = _flops_of_layers(layers, lengths)
    return (attention + linear).tolist(), head


def layer_seconds(
    cost: Cost, layers: Sequence[ModelShape], lengths: Sequence[int], *, capacity: int
) -> tuple[list[float], float, float]:
    """Return the seconds of each layer (`layer_shapes`), of embedding and head, in packs of `capacity` tokens.

    Each layer gets its share of the FLOPs of attention and of other work. If the costs do not price embedding and head
    apart, the head gets its share of the FLOPs without attention.
    """
    attention_flops, linear_flops, head_flops = _flops_of_layers(layers, lengths)
    numbers, tokens = np.array(lengths, dtype=np.int64), float(np.sum(lengths))
    stages = max(1, cost.stages)
    whole = stages * float(cost.compute_seconds(numbers).sum())
    without = replace(cost, quadratic_seconds=0.0, fixed_seconds=1.0)  # above 0, as a Cost needs; not counted below
    linear = stages * float(without.compute_seconds(numbers).sum())
    embedding, head = cost.embedding_seconds * tokens, cost.head_seconds * tokens
    if not cost.head_seconds:
        head = stages * cost.linear_seconds * tokens * head_flops / (linear_flops.sum() + head_flops)
    launches = stages * cost.fixed_seconds * tokens / capacity
    seconds = (whole - linear) * _shares(attention_flops) + launches / len(layers)
    seconds += max(0.0, linear - embedding - head) * _shares(linear_flops)
    return seconds.tolist(), embedding, head


def _flops_of_layers(layers: Sequence[ModelShape], lengths: Sequence[int]) -> tuple[Floats, Floats, float]:
    """Return the FLOPs of each layer's attention, of the rest of each, and of the head."""
    numbers, tokens = np.array(lengths, dtype=np.float64), float(np.sum(lengths))
    head = 6.0 * layers[0].hidden * layers[0].vocab
    linear, quadratic = np.array([flops_coefficients(shape) for shape in layers]).T
    seen = {
        windows: float(Cost(linear_seconds=1.0, windows=windows).seen_pairs(numbers).sum())
        for windows in {shape.window_shares for shape in layers}
    }
    pairs = np.array([seen[shape.window_shares] for shape in layers])
    return quadratic * pairs, (linear - head) * tokens, head * tokens


def _shares(values: Floats) -> Floats:
    return values / max(float(values.sum()), 1e-300)


def flops_coefficients(shape: ModelShape) -> tuple[float, float]:
    """Return the FLOPs per token of everything but attention, and per squared token of attention."""
    linear = 6.0 * shape.linear_params + scan_flops(shape)
    return linear, (1 + 2.5) * 2.0 * shape.query_width


def scan_flops(shape: ModelShape) -> float:
    """Return the FLOPs per token of all scans, forward and backward together."""
    return 3.0 * shape.scan_flops
