"""Models of the tables: the shapes of Llama, drawn at random on the device, and what their steps cost in FLOPs.

MFU = (6 x (parameters - input embedding) x tokens + 6 x layers x heads x head_dim x sum of squared lengths) / seconds /
peak. Recomputation is not counted. 6 of attention: two products forward, four backward, of half the square each.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig

from gpu.place import device_name
from lengthwise.cost import hardware_of_gpu, named_hardware
from lengthwise.models import ModelSource, build_model
from lengthwise.models.adapter import ATTENTION_NAME

# layers, hidden, intermediate, heads, KV heads, head_dim, words
_SHAPES = {
    "llama-1b": (16, 2048, 8192, 32, 8, 64, 128_256),
    "llama-3b": (28, 3072, 8192, 24, 8, 128, 128_256),
    "llama-8b, 8 layers": (8, 4096, 14_336, 32, 8, 128, 128_256),
    "tiny": (2, 32, 64, 4, 2, 8, 256),
    "wide words": (1, 256, 256, 4, 4, 64, 128_256),
    "wide words, tiny": (1, 32, 64, 4, 2, 8, 512),
}


def model_config(name: str) -> Any:
    """Return the Hugging Face config of a shape; input and output embedding are apart, so that MFU is unambiguous."""
    layers, hidden, intermediate, heads, kv_heads, head_dim, words = _SHAPES[name]
    return LlamaConfig(
        vocab_size=words,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=1 << 20,
        bos_token_id=None,
        eos_token_id=None,
        tie_word_embeddings=False,
    )


def model_source(name: str) -> ModelSource:
    """Return the shape as a model without weights."""
    return ModelSource(name=name, config=model_config(name), weights=False)


def draw_model(name: str, device: torch.device, *, attention: str = ATTENTION_NAME) -> nn.Module:
    """Build the model on the device itself, where drawing weights takes no time."""
    with torch.device(device):
        return build_model(model_source(name), seed=0, attention=attention).to(device)


def step_flops(config: Any, parameters: int, lengths: Sequence[int]) -> float:
    """Count the FLOPs of a step as MFU counts them (see above)."""
    embedding = config.vocab_size * config.hidden_size
    squares = float(sum(length**2 for length in lengths))
    attention = 6.0 * config.num_hidden_layers * config.num_attention_heads * config.head_dim * squares
    return 6.0 * (parameters - embedding) * sum(lengths) + attention


def hardware_here(device: torch.device) -> str:
    """Return the named hardware of a device."""
    return hardware_of_gpu(device_name(device))[0] if device.type == "cuda" else "cpu"


def peak_flops_per_second(device: torch.device) -> float:
    """Return the data sheet's rate in bf16 of the hardware that the device's name says."""
    return named_hardware(hardware_here(device)).peak_flops_per_second
