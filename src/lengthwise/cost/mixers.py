"""Sizes of layers that mix tokens without attention, from a Hugging Face config: gated delta rule, KDA, Mamba 2, conv.

Costs need their parameters in matrix products, FLOPs of scans, numbers in the map of a state, and numbers kept for
backward. FLOPs of a scan in chunks of c tokens, per head with a state (k, v): 6 k v to read and update it, and
4 c (k + v) inside a chunk.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from lengthwise.core.trained import MIXERS_OF

_CHUNK = 64  # tokens per chunk of delta rules; Mamba 2 has it in its config


def mixers_of(config: Mapping[str, Any], kinds: Sequence[str], hidden: int) -> dict[str, int]:
    """Return the fields of a `ModelShape` for layers of these kinds, or {} if all of them attend."""
    counts = Counter(kinds)
    states, convolutions = counts["linear_attention"] + counts["hybrid"], counts["conv"]
    attending = (
        sum(counts[kind] for kind in counts if MIXERS_OF.get(kind, 1)) - counts["linear_attention"] - convolutions
    )
    if attending == len(kinds) and not states:
        return {}
    sizes = {"mixer_params": 0, "scan_flops": 0, "map_values": 0, "mixer_kept": 0}
    if states:
        sizes = _with_states(config, hidden)
    if convolutions:  # three projections in, a product before and after the convolution, one out
        sizes = {**sizes, "mixer_params": 4 * hidden * hidden, "mixer_kept": 6 * hidden}
    layers = states + convolutions
    scaled = {name: layers * sizes[name] for name in ("mixer_params", "scan_flops", "mixer_kept")}
    return {"attention_layers": attending, "state_layers": states, "map_values": sizes["map_values"], **scaled}


def _with_states(config: Mapping[str, Any], hidden: int) -> dict[str, int]:
    def size(default: int, *keys: str) -> int:
        return next((int(config[key]) for key in keys if config.get(key) is not None), default)

    if any(key in config for key in ("mamba_n_heads", "mamba_num_heads", "ssm_state_size", "mamba_d_state")):
        heads, head = size(128, "mamba_n_heads", "mamba_num_heads"), size(64, "mamba_d_head", "mamba_head_dim")
        state, groups = size(128, "mamba_d_state", "ssm_state_size"), size(1, "mamba_n_groups", "n_groups")
        chunk, inner = size(256, "mamba_chunk_size", "chunk_size"), heads * head
        mixed = inner + 2 * groups * state
        return _sizes(
            params=hidden * (inner + mixed + heads) + inner * hidden,
            heads=heads,
            state=(head, state),
            chunk=chunk,
            of_map=heads,
            kept=2 * mixed + 3 * inner,
        )
    kimi = config.get("linear_attn_config")
    if isinstance(kimi, Mapping) or "linear_num_heads" in config or config.get("model_type") == "bailing_hybrid":
        kimi = kimi if isinstance(kimi, Mapping) else {}
        heads = int(kimi.get("num_heads", size(size(32, "num_attention_heads"), "linear_num_heads")))
        head = int(kimi.get("head_dim", size(128, "linear_head_dim")))
        inner = heads * head
        params, keys, values, key, value = (
            hidden * (4 * inner + 2 * head + heads) + 2 * head * inner,
            inner,
            inner,
            head,
            head,
        )
    else:
        heads, key_heads = size(32, "linear_num_value_heads"), size(16, "linear_num_key_heads")
        key, value = size(128, "linear_key_head_dim"), size(128, "linear_value_head_dim")
        keys, values = key_heads * key, heads * value
        params = hidden * (2 * keys + 3 * values + 2 * heads)
    return _sizes(
        params=params,
        heads=heads,
        state=(key, value),
        chunk=_CHUNK,
        of_map=heads * key * key,
        kept=2 * (2 * keys + values) + 5 * values,
    )


def _sizes(*, params: int, heads: int, state: tuple[int, int], chunk: int, of_map: int, kept: int) -> dict[str, int]:
    first, second = state
    return {
        "mixer_params": params,
        "scan_flops": heads * (6 * first * second + 4 * chunk * (first + second)),
        "map_values": heads * first * second + of_map,
        "mixer_kept": kept,
    }
