"""Costs with all terms from a model's shape and a hardware description, to plan with before measuring.

Tensor parallelism divides arithmetic, heads and their bytes, and adds two exposed all-reduces per layer and pass; a
pipeline stage has 1 / p of the layers. Good for comparing plans of one mesh, not for choosing t and p.
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
from lengthwise.cost.passes import PassShares
from lengthwise.cost.terms import Cost

_ALL_REDUCES = 2  # per layer and pass: after attention and after the MLP
_BACKWARD_ATTENTION = 2.5  # FLOPs of backward over those of forward


def all_terms_cost(
    shape: ModelShape, hardware: Hardware, *, tensor: int = 1, stages: int = 1, adapters: int | None = None
) -> Cost:
    """Return the costs of a model on a kind of device, for ranks of `tensor` x `stages` devices each.

    adapters: number of parameters that train in place of the model's own, which then have no gradients (default: all
    train).

    Raises:
        ConfigError: `tensor` does not divide the heads or fit a node, or `stages` exceeds the layers.
    """
    _check_mesh(shape, hardware, tensor, stages)
    plain, dtype_bytes, devices = analytic_cost(shape, hardware), hardware.compute_dtype_bytes, tensor * stages
    node_link, layers = hardware.node_link_bytes_per_second, shape.num_attention / stages
    memory = replace(step_memory(shape, hardware, 1, tensor=tensor, cut=LayerCut(stages=stages)), trained=adapters)
    copies = min(hardware.copy_bytes_per_second, hardware.host_copy_bytes_per_second / hardware.ranks_per_node)
    reduced_hidden = 2 * (tensor - 1) / tensor * shape.hidden * dtype_bytes  # of an all-reduce, bytes per token
    tensor_bytes = 2 * _ALL_REDUCES * shape.layers * reduced_hidden
    held_kv = max(1, -(-shape.kv_heads // tensor))
    held_keys = held_kv * (shape.key_width / shape.kv_heads) / stages  # numbers of all layers
    exchanged = 2 * (shape.query_width / tensor / stages + held_keys)  # q, out; k, v
    ring_forward = 1 / (2 + GRADIENT_BYTES / dtype_bytes)  # once forward; once more and the gradients backward
    linear, linear_forward = 1.0, 1 / 3
    if adapters is not None:  # a third of the linear work makes the weights' gradients
        added = adapters / shape.linear_params
        linear = 2 / 3 + added
        linear_forward = (1 + added) / 3 / linear
    forward = PassShares(
        attention=1 / (1 + _BACKWARD_ATTENTION), linear=linear_forward, ring=ring_forward, exchange=0.5
    )
    return replace(
        plain,
        quadratic_seconds=plain.quadratic_seconds / devices,
        linear_seconds=linear * plain.linear_seconds / devices + tensor_bytes / stages / node_link,
        fixed_seconds=plain.fixed_seconds / stages,
        cut_seconds=plain.cut_seconds / devices,
        block_efficiency=hardware.block_efficiency,
        forward=forward,
        backward=PassShares(
            attention=_BACKWARD_ATTENTION * forward.attention,
            linear=1 - linear_forward,
            ring=1 - ring_forward,
            exchange=0.5,
        ),
        near=Link(bytes_per_second=node_link, hop_seconds=layers * hardware.node_hop_latency_seconds),
        far=Link(bytes_per_second=hardware.link_bytes_per_second, hop_seconds=layers * hardware.hop_latency_seconds),
        ranks_per_node=max(1, hardware.ranks_per_node // tensor),
        ring_bytes=2 * held_keys * (2 * dtype_bytes + GRADIENT_BYTES),
        exchange_bytes=2 * exchanged * dtype_bytes,
        sweep_bytes=PASSES * STATE_BYTES * shape.map_values * shape.state_layers / tensor / stages,
        sweep_messages=PASSES * shape.state_layers / max(1, shape.num_attention),
        heads=shape.heads // tensor,
        kv_heads=held_kv,
        layers=max(1, shape.layers // stages),
        copy_bytes={kind: memory.saved_bytes(kind) for kind in RECOMPUTE_KINDS},
        copy_bytes_per_second=copies,
        reduced_bytes=(shape.total_params if adapters is None else adapters) / devices * (GRADIENT_BYTES + dtype_bytes),
        host_bytes=host_share_bytes(hardware) / stages,  # the first stage has activations of this many microbatches
        stages=stages,
        # Neighbouring ranks share nodes stage by stage, so messages between stages go between nodes.
        stage_bytes=shape.hidden / tensor * dtype_bytes if stages > 1 else 0.0,
        uplink_bytes_per_second=hardware.node_uplink_bytes_per_second / tensor,
        version=f"all-terms/1 {shape.name} {hardware.name}"
        + (f" tp{tensor} pp{stages}" if devices > 1 else "")
        + ("" if adapters is None else f" adapters {adapters}"),
    )


def _check_mesh(shape: ModelShape, hardware: Hardware, tensor: int, stages: int) -> None:
    if tensor < 1 or shape.heads % tensor or tensor > hardware.ranks_per_node:
        expected = f"a divisor of the {shape.heads} heads, at most the {hardware.ranks_per_node} devices of a node"
        raise ConfigError("tensor", expected=expected, got=str(tensor), remedy="Choose another {tensor}.")
    if not 1 <= stages <= shape.layers:
        expected = f"1 to the {shape.layers} layers"
        raise ConfigError("stages", expected=expected, got=str(stages), remedy="Choose other {stages}.")
