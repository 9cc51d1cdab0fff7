"""The tokens that fit beside what a rank keeps from step to step, by the formulas of `cost.memory`.

Activations of S tokens over d ranks are (alpha S + beta) / d (ByteScale, arXiv 2502.21231, section 5.2). A plan counts
tokens, so the capacity is the largest number whose peak fits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from lengthwise.core.errors import ConfigError
from lengthwise.core.held import kept_ratio, largest
from lengthwise.core.names import counted
from lengthwise.core.plan import RECOMPUTE_KINDS, STRONGER, LayerKinds
from lengthwise.core.shape import UNCUT, LayerCut, ModelShape
from lengthwise.cost.choices import AS_CUT, Choice
from lengthwise.cost.hardware import Hardware
from lengthwise.cost.layout import ModelLayout
from lengthwise.cost.memory import CHUNK_TOKENS_ON_GPUS, StepMemory, logits_at_once

RESERVED = 0.1  # share of device memory: transfers, workspace, fragments
STEP_TOKENS = 128  # capacities are multiples of it


def memory_of(
    shape: ModelShape,
    layout: ModelLayout,
    *,
    dtype_bytes: int,
    on_gpus: bool,
    chunked: bool = True,
    fused_norms: bool = False,
) -> StepMemory:
    """Return the memory of a model's steps in a layout. chunked: True if the loss makes logits in chunks.

    The optimizer is on the host only beside a GPU, whose memory it saves.
    """
    of_layout: Any = {each.name: getattr(layout, each.name) for each in fields(ModelLayout)}
    of_layout["offloads"] &= on_gpus
    return StepMemory(
        **of_layout,
        shape=shape,
        dtype_bytes=dtype_bytes,
        logits_at_once=logits_at_once(shape.vocab, on_gpus=on_gpus) if chunked else None,
        fused_norms=fused_norms,
    )


def step_memory(shape: ModelShape, hardware: Hardware, ranks: int, *, cut: LayerCut = UNCUT) -> StepMemory:
    """Return the memory of steps on a kind of device, with the loss in chunks."""
    return memory_of(
        shape,
        ModelLayout(ranks=ranks, cut=cut),
        dtype_bytes=hardware.compute_dtype_bytes,
        on_gpus=hardware.name != "cpu",
        fused_norms=hardware.fused_norms,
    )


def tokens_within(memory: StepMemory, room: float, choice: Choice = AS_CUT) -> int:
    """Count the tokens whose peak is within `room` bytes, rounded down to a multiple of 128."""
    a_token = memory.saved_bytes(choice.recompute) * kept_ratio(float(choice.offload), memory.shape.layers)
    most = int(max(0.0, room) / a_token / STEP_TOKENS)
    return STEP_TOKENS * largest(lambda some: memory.peak_bytes(some * STEP_TOKENS, choice) <= room, most)


def recompute_capacities(
    memory: StepMemory, hardware: Hardware, *, kinds: Sequence[str] = RECOMPUTE_KINDS
) -> dict[str, int]:
    """Count the tokens of a microbatch on one rank, rounded down to 128, for each kind that leaves room for 128.

    Raises:
        ConfigError: no kind does, because weights and optimizer fill the device.
    """
    room = hardware.device_bytes * (1 - RESERVED)
    held = {kind: tokens_within(memory, room, Choice(recompute=kind)) for kind in kinds}
    if not any(held.values()):
        expected = f"weights, gradients and optimizer that leave room for 128 tokens on a device of {hardware.name}, "
        expected += f"{hardware.device_bytes / 1e9:.0f} GB less {RESERVED:.0%} kept free"
        got = f"{memory.state_bytes() / 1e9:.0f} GB of them on each, {counted(memory.ranks, 'rank')} of "
        got += counted(memory.devices, "device")
        remedy = "{make_room|Use more devices a rank, recompute, or give the capacity}."
        raise ConfigError(f"model {memory.shape.name}", expected=expected, got=got, remedy=remedy)
    return {kind: tokens for kind, tokens in held.items() if tokens}


def mixed_capacity(capacities: Mapping[str, int], tokens: int, layers: int) -> dict[str, int]:
    """Return the mix of two kinds that holds so many tokens with the fewest layers of the stronger, and what it holds.

    A token's bytes are those of the two kinds, by number of layers; they are the inverse of the tokens that fit. Where
    the weaker kind holds no more than a chunk of the loss, the loss may decide what fits, so nothing is mixed. {} also
    if no two kinds hold fewer and more.
    """
    for kind, stronger in STRONGER.items():
        less, more = capacities.get(kind, 0), capacities.get(stronger, 0)
        if CHUNK_TOKENS_ON_GPUS < less < tokens < more:
            for count in range(1, layers):
                held = int(layers / ((layers - count) / less + count / more))
                if held >= tokens:
                    return {str(LayerKinds(kind, stronger, count, layers)): held}
    return {}


def host_share_bytes(hardware: Hardware) -> float:
    """Count the bytes of host memory for one device's offload, while all devices of its node offload."""
    return hardware.host_bytes * (1 - RESERVED) / hardware.ranks_per_node
