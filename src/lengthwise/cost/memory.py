"""Bytes: activations of a token, what training keeps of a parameter, and the tokens that fit beside it.

Activations of S tokens over d ranks are (alpha S + beta) / d (ByteScale, arXiv 2502.21231, section 5.2); alpha counts
the tensors that a decoder layer keeps for its backward, beta, a few numbers a sequence, is left out. Parameters are
those of flat ZeRO-1 (`engine.replicated`). Of the capacity, `loss_bytes` is no part. Estimates, not a profile.
"""

from __future__ import annotations

from collections.abc import Sequence

from lengthwise.core.errors import ConfigError
from lengthwise.core.names import counted
from lengthwise.core.plan import RECOMPUTE_KINDS
from lengthwise.core.shape import ModelShape
from lengthwise.cost.hardware import Hardware

LOGITS_AT_ONCE = 1 << 25  # that the chunked loss makes, tokens x words: 128 MB in fp32; GEMMs of 256 rows at 128K words
_LOGIT_COPIES = 3
PRECISION_BYTES = {"fp64": (8, 8), "fp32": (4, 4), "bf16": (2, 4)}  # of a number of the model, and of sums
RESERVED = 0.1  # of device memory: transfers, workspace, fragments, the loss
_KEPT_BYTES = 2 + 4  # a parameter: bf16 weights and fp32 gradients
_SHARDED_BYTES = 4 + 4 + 8  # master weights, the reduced gradient, AdamW's moments, all fp32


def activation_bytes(shape: ModelShape, recompute: str, dtype_bytes: int) -> float:
    """Count the bytes one token keeps on a device from forward to backward, all layers, one of `RECOMPUTE_KINDS`.

    Where layers are recomputed that is what each of them keeps, and all of one layer while it is computed again.
    """
    keys = 2 * shape.kv_heads * shape.head_dim
    queries = shape.heads * shape.head_dim
    active = shape.intermediate * shape.experts_per_token
    # Norm input and output twice, q, attention output, k, v, and of the MLP gate, up, their product and silu.
    everything = 4 * shape.hidden + 2 * queries + keys + 4 * active
    kept = {
        "none": shape.layers * everything,
        "all_but_attention": shape.layers * (shape.hidden + 2 * queries + keys) + everything,
        "layer": shape.layers * shape.hidden + everything,
    }
    return float(kept[recompute] * dtype_bytes)


def loss_bytes(
    shape: ModelShape, tokens: int, *, narrow: int, wide: int, logits_at_once: int | None, trains_head: bool = True
) -> float:
    """Count the bytes that the loss of a microbatch of `tokens` holds at its peak.

    Three times its logits in `wide` bytes: their log-softmax and two gradients. A chunked loss holds `logits_at_once`
    of them (None: all), the gradients of the hidden states in `narrow` bytes, those of the model's numbers, and of the
    head; when a chunk adds to these, they are there twice and the logits once.
    """
    logits = tokens * shape.vocab
    if logits_at_once is None or logits <= logits_at_once:
        return float(logits * _LOGIT_COPIES * wide)
    head = shape.hidden * shape.vocab * trains_head
    chunk = max(logits_at_once * _LOGIT_COPIES * wide, narrow * (logits_at_once + head))
    return float(chunk + head * wide + tokens * shape.hidden * narrow)


def state_bytes(shape: ModelShape, ranks: int, *, devices: int = 1) -> float:
    """Count the bytes of weights, gradients and the sharded optimizer on one of the `devices` of a rank (ZeRO-1)."""
    return shape.total_params / devices * (_KEPT_BYTES + _SHARDED_BYTES / ranks)


def microbatches_kept(stages: int, virtual: int = 1) -> float:
    """Return of how many microbatches the first stage keeps activations at most: 1F1B, interleaved or not."""
    return stages if virtual == 1 else stages + (stages - 1) / virtual


def capacity_tokens(
    shape: ModelShape, hardware: Hardware, ranks: int, *, recompute: str = "none", devices: int = 1, kept: float = 1.0
) -> int:
    """Count the tokens that one rank of `devices` devices holds in a microbatch, rounded down to 128.

    `kept`: of how many microbatches a device keeps activations at once, see `microbatches_kept`.

    Raises:
        ConfigError: not even 128, because weights and optimizer fill the device.
    """
    states = state_bytes(shape, ranks, devices=devices)
    room = hardware.device_bytes * (1 - RESERVED) - states
    a_token = kept * activation_bytes(shape, recompute, hardware.compute_dtype_bytes)
    tokens = int(room * devices / a_token) // 128 * 128
    if tokens < 128:
        expected = f"weights, gradients and optimizer that leave room for 128 tokens on a device of {hardware.name}, "
        expected += f"{hardware.device_bytes / 1e9:.0f} GB less {RESERVED:.0%} kept free"
        got = f"{states / 1e9:.0f} GB of them on each, {counted(ranks, 'rank')} of {counted(devices, 'device')}"
        remedy = "{make_room|Use more devices a rank, recompute, or give the capacity}."
        raise ConfigError(f"model {shape.name}", expected=expected, got=got, remedy=remedy)
    return tokens


def recompute_capacities(
    shape: ModelShape,
    hardware: Hardware,
    ranks: int,
    *,
    kinds: Sequence[str] = RECOMPUTE_KINDS,
    devices: int = 1,
    kept: float = 1.0,
) -> dict[str, int]:
    """Return `capacity_tokens` for each of these kinds of recomputation for which there is room.

    Raises:
        ConfigError: there is room for none of them.
    """
    found: dict[str, int] = {}
    refused: list[ConfigError] = []
    for kind in kinds:
        try:
            found[kind] = capacity_tokens(shape, hardware, ranks, recompute=kind, devices=devices, kept=kept)
        except ConfigError as error:
            refused.append(error)
    if not found:
        raise refused[-1]
    return found


def host_share_bytes(hardware: Hardware) -> float:
    """Count the bytes that one device may offload to the host's memory while all devices of its node do."""
    return hardware.host_bytes * (1 - RESERVED) / hardware.ranks_per_node
