"""Linear layers of bitsandbytes in 4 or 8 bits: a frozen base under adapters, which every rank has whole.

A layer keeps its weight as bytes in the model's parameter, and scales beside it, which are no parameters: they move and
travel with the weight. What a pass computes is bitsandbytes' own. QLoRA: Dettmers et al. 2023 (arXiv 2305.14314).
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from math import ceil
from typing import Any

import torch
from torch import Tensor, nn
from transformers import BitsAndBytesConfig
from transformers.quantizers.auto import AutoHfQuantizer
from transformers.utils.quantization_config import QuantizationMethod

from lengthwise.core.errors import ConfigError, ModelRefused
from lengthwise.cost.memory import QUANTIZED_BYTES

INT8 = "int8"


def layers_of(model: nn.Module) -> Iterator[Any]:
    """Yield the quantized linear layers of a model."""
    for module in model.modules():
        if type(module._parameters.get("weight")).__name__ in ("Params4bit", "Int8Params"):
            yield module


def kind_of(model: nn.Module) -> str | None:
    """Return how a model's linear layers are quantized: nf4, fp4 or int8; None if they are not."""
    return next((getattr(layer.weight, "quant_type", INT8) for layer in layers_of(model)), None)


def problems_of(model: Any, where: str) -> Iterator[ModelRefused]:
    """Yield what keeps a session from running a quantized model as plain Hugging Face does."""
    layers, method = list(layers_of(model)), getattr(model, "quantization_method", None)
    if getattr(model, "is_quantized", False) and method != QuantizationMethod.BITS_AND_BYTES:
        expected = "a model in full precision, or linear layers of bitsandbytes in 4 or 8 bits"
        remedy = "Load it in bfloat16, or with a BitsAndBytesConfig."
        got = f"a model quantized by {getattr(method, 'value', method)}"
        yield ModelRefused(where, expected=expected, got=got, remedy=remedy)
    if limits := {each for each in map(_outlier_limit, layers) if each}:
        expected = "llm_int8_threshold=0.0 (which columns are outliers depends on the other rows of a microbatch)"
        remedy = "Load it with BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=0.0), or in 4 bits."
        yield ModelRefused(where, expected=expected, got=f"llm_int8_threshold={max(limits)}", remedy=remedy)
    if layers and any(each.dtype == torch.float64 for each in model.parameters()):
        expected, remedy = "fp32 at most: bitsandbytes computes in no wider type", "Convert the adapters to float32."
        yield ModelRefused(where, expected=expected, got="parameters in float64", remedy=remedy)
    if any(layer.weight.requires_grad for layer in layers):
        got, remedy = "one that trains", "Freeze it, and train adapters: peft's prepare_model_for_kbit_training."
        yield ModelRefused(where, expected="frozen quantized weights", got=got, remedy=remedy)


def _outlier_limit(layer: Any) -> float:
    state = getattr(layer, "state", None)
    return 0.0 if state is None else state.threshold


def loading_config(kind: str | None) -> BitsAndBytesConfig | None:
    """Return the config with which Hugging Face loads a model in nf4, fp4 (scales quantized too), int8, or as it is.

    Raises:
        ConfigError: bitsandbytes or accelerate is not installed.
    """
    if kind is None:
        return None
    if missing := [name for name in ("bitsandbytes", "accelerate") if find_spec(name) is None]:
        expected, got = "the packages bitsandbytes and accelerate", f"no {' and no '.join(missing)}"
        remedy = "Install them: pip install 'lengthwise[qlora]'."
        raise ConfigError("quantization", expected=expected, got=got, remedy=remedy)
    if kind == INT8:
        return BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=0.0)
    return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type=kind, bnb_4bit_use_double_quant=True)


def replace_layers(model: Any, kind: str | None) -> None:
    """Put empty quantized layers into a model on the meta device, where Hugging Face's loading puts them."""
    config: Any = loading_config(kind)
    if config is None:
        return
    quantizer: Any = AutoHfQuantizer.from_config(config, pre_quantized=False)
    quantizer.preprocess_model(model, device_map=None)
    quantizer.postprocess_model(model)


def settle(model: nn.Module, device: torch.device, dtype: torch.dtype | None) -> list[Tensor]:
    """Move quantized layers to a device; return their weights and scales there, to share, in the order of the layers.

    A layer on the meta device gets room for what rank 0 has. dtype: that of products, None for the layers' own.
    """
    found = list[Tensor]()
    for layer in layers_of(model):
        weight, is_in_use = layer.weight, getattr(getattr(layer, "state", None), "CB", None) is not None
        if weight.is_meta:
            layer.weight = type(weight)(torch.zeros(layer.out_features, layer.in_features), **_how(layer)).to(device)
        elif weight.device != device:
            if is_in_use:  # in 8 bits the first forward moves the scales from the weight to the layer
                weight.SCB = layer.state.SCB
            layer.weight = weight.to(device)
            if is_in_use:
                layer.init_8bit_state()
        if hasattr(layer.weight, "quant_state"):
            layer.quant_state = layer.weight.quant_state
            # On some CPUs bitsandbytes packs a weight anew in an evaluation, after which it gives no gradients.
            layer.support_avx512bf16_for_cpu = False
        if dtype is not None:
            compute_in(layer, dtype)
        found += [layer.weight.data, *_scales(layer)]
    return found


def _how(layer: Any) -> dict[str, Any]:
    names = ("quant_type", "compress_statistics", "blocksize", "quant_storage")
    own = {name: getattr(layer.weight, name) for name in names if hasattr(layer.weight, name)}
    return {**own, "requires_grad": False, "has_fp16_weights": False}


def compute_in(model: nn.Module, dtype: torch.dtype) -> None:
    """Let 4-bit layers make weights and products in this dtype, or in fp32, the widest that bitsandbytes has."""
    dtype = torch.float32 if dtype == torch.float64 else dtype
    for layer in layers_of(model):
        if (state := getattr(layer.weight, "quant_state", None)) is not None:
            layer.compute_dtype, layer.compute_type_is_set, state.dtype = dtype, True, dtype


def _scales(layer: Any) -> list[Tensor]:
    """Return the scales of a layer's weight."""
    state = getattr(layer.weight, "quant_state", None)
    if state is None:
        scales = layer.weight.SCB if layer.weight.SCB is not None else layer.state.SCB
        return [] if scales is None else [scales]
    inner = state.state2
    return [state.absmax, state.code] + ([] if inner is None else [state.offset, inner.absmax, inner.code])


def frozen_bytes(model: nn.Module, dtype_bytes: int) -> int | None:
    """Return the bytes of a model's frozen parameters, or None if none is quantized.

    dtype_bytes: bytes of an entry that is not quantized, of a parameter on the meta device.
    """
    layers = {id(layer.weight): layer for layer in layers_of(model)}
    if not layers:
        return None
    found = sum(
        layer.in_features * layer.out_features * QUANTIZED_BYTES[kind_of(layer) or INT8] for layer in layers.values()
    )
    for each in model.parameters():
        if id(each) not in layers and not each.requires_grad:
            found += each.numel() * (dtype_bytes if each.is_meta else each.element_size())
    return ceil(found)


def count_entries(model: nn.Module) -> int:
    """Return the number of entries of a model's parameters, tied ones once; several may lie in a byte."""
    layers = {id(layer.weight): layer.in_features * layer.out_features for layer in layers_of(model)}
    return sum(layers.get(id(each), each.numel()) for each in model.parameters())
