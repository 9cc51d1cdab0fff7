"""Costs with all terms from a model's shape and a hardware description, to plan with before measuring.

A pipeline stage has 1 / p of the layers. Good for comparing plans of one number of stages, not for choosing it.
"""

from __future__ import annotations

from dataclasses import replace

from lengthwise.core.errors import ConfigError
from lengthwise.core.plan import RECOMPUTE_KINDS
from lengthwise.core.shape import LayerCut, ModelShape
from lengthwise.cost.analytic import GRADIENT_BYTES, PASSES, STATE_BYTES, analytic_cost
from lengthwise.cost.capacity import host_share_bytes, step_memory
from lengthwise.cost.hardware import Hardware
from lengthwise.cost.links import Link
from lengthwise.cost.memory import QUANTIZED_BYTES
from lengthwise.cost.passes import PassShares
from lengthwise.cost.terms import Cost

_BACKWARD_ATTENTION = 2.5  # FLOPs of backward over those of forward


def all_terms_cost(
    shape: ModelShape,
    hardware: Hardware,
    *,
    stages: int = 1,
    adapters: int | None = None,
    quantization: str | None = None,
) -> Cost:
    """Return the costs of a model on a kind of device, for ranks of `stages` devices each.

    adapters: number of parameters that train in place of the model's own, which then have no gradients (default: all
    train). quantization: kind of the frozen linear layers, which every pass of a microbatch reads, and writes and reads
    again in the compute type.

    Raises:
        ConfigError: `stages` exceeds the layers.
    """
    if not 1 <= stages <= shape.layers:
        expected = f"1 to the {shape.layers} layers"
        raise ConfigError("stages", expected=expected, got=str(stages), remedy="Choose other {stages}.")
    plain, dtype_bytes = analytic_cost(shape, hardware), hardware.compute_dtype_bytes
    node_link, rings = hardware.node_link_bytes_per_second, hardware.node_ring_bytes_per_second
    memory = replace(step_memory(shape, hardware, 1, cut=LayerCut(stages=stages)), trained=adapters)
    copies = min(hardware.copy_bytes_per_second, hardware.host_copy_bytes_per_second / hardware.ranks_per_node)
    layers, held_keys = shape.num_attention / stages, shape.key_width / stages  # numbers of all layers
    exchanged = 2 * (shape.query_width / stages + held_keys)  # q, out; k, v
    ring_forward = 1 / (2 + GRADIENT_BYTES / dtype_bytes)  # once forward; once more and the gradients backward
    linear, linear_forward = _linear_work(shape, adapters)
    forward = PassShares(
        attention=1 / (1 + _BACKWARD_ATTENTION), linear=linear_forward, ring=ring_forward, exchange=0.5
    )
    return replace(
        plain,
        quadratic_seconds=plain.quadratic_seconds / stages,
        linear_seconds=linear * plain.linear_seconds / stages,
        fixed_seconds=plain.fixed_seconds / stages + _unpacking_seconds(shape, hardware, quantization),
        cut_seconds=plain.cut_seconds / stages,
        block_efficiency=hardware.block_efficiency,
        ring_efficiency=hardware.ring_efficiency,
        forward=forward,
        backward=PassShares(
            attention=_BACKWARD_ATTENTION * forward.attention,
            linear=1 - linear_forward,
            ring=1 - ring_forward,
            exchange=0.5,
        ),
        near=Link(bytes_per_second=min(node_link, rings), hop_seconds=layers * hardware.node_hop_latency_seconds),
        far=Link(bytes_per_second=hardware.link_bytes_per_second, hop_seconds=layers * hardware.hop_latency_seconds),
        ranks_per_node=hardware.ranks_per_node,
        ring_bytes=2 * held_keys * (2 * dtype_bytes + GRADIENT_BYTES),
        exchange_bytes=2 * exchanged * dtype_bytes,
        sweep_bytes=PASSES * STATE_BYTES * shape.map_values * shape.state_layers / stages,
        sweep_messages=PASSES * shape.state_layers / max(1, shape.num_attention),
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        layers=shape.layers // stages,
        copy_bytes={kind: memory.saved_bytes(kind) for kind in RECOMPUTE_KINDS},
        copy_bytes_per_second=copies,
        reduced_bytes=(shape.total_params if adapters is None else adapters) / stages * (GRADIENT_BYTES + dtype_bytes),
        host_bytes=host_share_bytes(hardware) / stages,  # the first stage has activations of this many microbatches
        stages=stages,
        # Neighbouring ranks share nodes stage by stage, so messages between stages go between nodes.
        stage_bytes=float(shape.hidden * dtype_bytes) if stages > 1 else 0.0,
        ending=replace(plain.ending, node_bytes_per_second=node_link if rings < node_link else 0.0),
        uplink_bytes_per_second=hardware.node_uplink_bytes_per_second,
        version=f"all-terms/1 {shape.name} {hardware.name}"
        + (f" pp{stages}" if stages > 1 else "")
        + ("" if adapters is None else f" adapters {adapters}")
        + ("" if quantization is None else f" {quantization}"),
    )


def _linear_work(shape: ModelShape, adapters: int | None) -> tuple[float, float]:
    """Return the linear work over that of a model that trains, and the share of it in forward."""
    if adapters is None:
        return 1.0, 1 / 3
    added = adapters / shape.linear_params
    linear = 2 / 3 + added  # a third makes the weights' gradients
    return linear, (1 + added) / 3 / linear


def _unpacking_seconds(shape: ModelShape, hardware: Hardware, quantization: str | None) -> float:
    """Return the seconds in which all passes of a microbatch make weights of quantized ones, all layers together."""
    if quantization is None:
        return 0.0
    moved = QUANTIZED_BYTES[quantization] + 2 * hardware.compute_dtype_bytes
    return PASSES * shape.quantized_params * moved / hardware.memory_bytes_per_second
