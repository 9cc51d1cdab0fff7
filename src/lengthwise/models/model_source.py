"""Find and build models: `tiny`, a local Hugging Face folder, or a hub name.

Keys of configs that choose kernels (attention, experts, fused layers) are dropped, because Hugging Face would load
native code by them. Weights are loaded whole or drawn from the seed. Remote code is never run.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMultimodalLM,
    GenerationConfig,
    LlamaConfig,
    PreTrainedConfig,
)
from transformers.utils.hub import cached_file
from transformers.utils.import_utils import is_accelerate_available
from transformers.utils.peft_utils import find_adapter_config_file

from lengthwise.config.schema import TINY_MODEL
from lengthwise.core.errors import ConfigError, LengthwiseError, raise_problems
from lengthwise.core.files import MOST_BYTES
from lengthwise.core.hub_access import only_cached, why_only_cached
from lengthwise.cost import named_shape
from lengthwise.models.adapter import ATTENTION_NAME, register_attention
from lengthwise.models.quantized import loading_config, replace_layers
from lengthwise.models.text_part import has_towers, layer_configs, text_config, text_part
from lengthwise.models.weights import WEIGHTS_FILES, check_dtypes, check_finite, first_line, first_names, holds_weights

# Experts one by one: Hugging Face's grouped products do not support fp64, and round differently by number of tokens.
EXPERTS = "eager"

# Keys of a config.json by which Hugging Face chooses kernels, files of weights, and results of forward.
_ENGINE_KEYS = re.compile(
    r"_?(attn|experts|cache)_implementation(_internal|_autoset)?"
    r"|fusion_config|kernel_config|use_kernels|distributed_config|transformers_weights"
    r"|output_attentions|output_hidden_states|return_dict|torchscript"
)

_PARTS = re.compile(r"\w*(layers?|blocks?|experts|labels)")  # keys for numbers of parts
_MOST_PARTS = 10_000  # about ten times the layers or experts of any model today

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSource:
    """The source of a model. weights: True to load its weights, False to draw them from the seed.

    config: config of the whole model. text: config of its text part, if that has its own. quantization: nf4, fp4 or
    int8, in which linear layers but the head are loaded; None as they are. trains_towers: True if towers for images
    train beside the text part.
    """

    name: str
    config: Any
    weights: bool
    quantization: str | None = None
    trains_towers: bool = False

    @property
    def text(self) -> Any:
        """Config of the text part, which trains."""
        return text_config(self.config)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype to build the model in, on every rank, whatever dtype its config publishes: fp64 for such weights."""
        return torch.float64 if self.weights and self.config.dtype == torch.float64 else torch.float32


def find_model(
    name: str,
    *,
    weights: Literal["load", "fresh"] | None = None,
    quantization: str | None = None,
    train_towers: bool = False,
) -> ModelSource:
    """Read the config of `tiny`, a folder or a hub name, and check whether there are weights.

    weights, quantization, train_towers: values of the run file's keys; by default existing weights are loaded, as they
    are, and towers stay so.

    Raises:
        ConfigError: there is no such model, its config cannot be read, or its weights cannot be loaded whole.
    """
    if name == TINY_MODEL:
        config, has_weights = tiny_config(), False
    else:
        config = _read_config(name)
        has_weights = weights != "fresh" and (not Path(name).is_dir() or holds_weights(Path(name)))
    if weights == "load" and not has_weights:
        remedy = "Give a model with weights, or remove `weights: load` to draw them from the seed."
        raise ConfigError("weights", expected="weights to load", got=f"{name}, which has none", remedy=remedy)
    how: dict[str, Any] = {"quantization": quantization, "trains_towers": train_towers}
    return ModelSource(name=name, config=config, weights=has_weights, **how)


def _read_config(name: str) -> Any:
    try:
        _refuse_odd_files(Path(name))
        cached = only_cached(name)
        values: dict[str, Any] = _without_engine(PreTrainedConfig.get_config_dict(name, local_files_only=cached)[0])
        _refuse_adapter(name, local_files_only=cached)
        _refuse_endless(values, name)
        found = AutoConfig.from_pretrained(name, trust_remote_code=False, local_files_only=cached)
        return type(found).from_dict({**values, "model_type": found.model_type}, name_or_path=name)
    except LengthwiseError:
        raise
    except Exception as error:  # transformers may raise anything for values of a file
        if (Path(name) / "config.json").is_file():
            raise _refuse_config(f"{name}/config.json", error) from error
        raise _unreadable(name, error) from error


def _refuse_odd_files(folder: Path) -> None:
    """Refuse JSON files that are not regular files, or too large: Hugging Face would read a device without end."""
    for path in sorted(folder.glob("*.json")):
        if path.exists() and not path.is_file():
            raise _refuse_config(str(path), "a device, a pipe or a folder", "a regular file")
        if path.exists() and path.stat().st_size > MOST_BYTES:
            raise _refuse_config(str(path), f"{path.stat().st_size:,} bytes", f"at most {MOST_BYTES:,} bytes")


def _refuse_adapter(name: str, *, local_files_only: bool) -> None:
    """Refuse a model folder with an adapter: Hugging Face would load both."""
    found = find_adapter_config_file(name, local_files_only=local_files_only)
    if found is not None:
        expected, remedy = "a model without an adapter", "Give the base model, and the adapter by `lora.adapter`."
        raise ConfigError(f"model {name}", expected=expected, got=Path(found).name, remedy=remedy)


def _refuse_endless(values: Any, name: str) -> None:
    """Refuse numbers of parts, at any depth, that transformers would need hours to build."""
    counts = {key: value for key, value in _entries(values) if isinstance(value, int) and _PARTS.fullmatch(key)}
    raise_problems(
        [
            _refuse_config(f"{name}/config.json: {key}", str(value), f"at most {_MOST_PARTS:,}")
            for key, value in counts.items()
            if value > _MOST_PARTS
        ]
    )


def _entries(values: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(values, dict):
        yield from values.items()
    for each in values.values() if isinstance(values, dict) else values if isinstance(values, list) else ():
        yield from _entries(each)


def _without_engine(values: Any) -> Any:
    """Return a config.json without the keys that choose kernels, at any depth."""
    if isinstance(values, dict):
        return {key: _without_engine(value) for key, value in values.items() if not _ENGINE_KEYS.fullmatch(key)}
    return [_without_engine(value) for value in values] if isinstance(values, list) else values


def tiny_config() -> LlamaConfig:
    """Return the config of `tiny`, a Llama of about a million parameters over bytes."""
    shape = named_shape("tiny")
    return LlamaConfig(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        max_position_embeddings=1 << 20,
        bos_token_id=None,
        eos_token_id=None,
        tie_word_embeddings=False,
    )


def build_model(source: ModelSource, *, seed: int, attention: str = ATTENTION_NAME, stored: bool = True) -> nn.Module:
    """Build the model in fp32, or in fp64 if its weights are; flat buffers narrow it later.

    A model with towers is returned as the part that trains (`models.text_part`). Without weights the parameters are
    drawn from `seed`, the same on every rank and for every precision. stored: False keeps parameters on the meta
    device, and reads and draws nothing.

    Raises:
        ConfigError: weights cannot be read, or are not exactly those of the config.
    """
    register_attention()
    of_text = {"text_config": attention} if has_towers(source.config) else attention
    computing: dict[str, Any] = {"attn_implementation": of_text, "experts_implementation": EXPERTS}
    if not stored:
        with _parameters_on_meta():
            made = _class_of(source.config).from_config(copy.deepcopy(source.config), dtype=source.dtype, **computing)
            replace_layers(made, source.quantization)
        if source.weights:
            _read_generation_config(made, source.name)
        return _trained_part(made.train(), source)
    if source.weights:
        quantized = loading_config(source.quantization)
        return _trained_part(_load(source, quantization_config=quantized, **computing).train(), source)
    # A copy, because Hugging Face writes into the config, and one source may build several models.
    config = copy.deepcopy(source.config)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            made = _class_of(config).from_config(config, dtype=source.dtype, **computing)
            return _trained_part(made.train(), source)
        except (ValueError, RuntimeError) as error:  # for example initializer_range is NaN
            raise _refuse_config(_where(config), error) from error


def _trained_part(model: Any, source: ModelSource) -> Any:
    """Return the part of a model that trains: its text part, with its towers for images if they train."""
    if not source.trains_towers or not has_towers(source.config):
        return text_part(model)
    for name, part in model.base_model.named_children():
        if "audio" in name:  # no row has sounds
            part.requires_grad_(False)
    return text_part(model, trained={id(each) for each in model.parameters()})


def _class_of(config: Any) -> Any:
    return AutoModelForMultimodalLM if has_towers(config) else AutoModelForCausalLM


def check_weights(source: ModelSource) -> None:
    """Raise errors of weights as `build_model` does, without reading tensors; without accelerate do nothing."""
    if source.weights and is_accelerate_available():
        _load(source, device_map="meta")


def weights_folder(name: str) -> Path:
    """Return the folder of a model's weights: the given one, or the hub's cache."""
    if Path(name).is_dir():
        return Path(name)
    options: dict[str, Any] = {"_raise_exceptions_for_missing_entries": False, "local_files_only": only_cached(name)}
    found = (cached_file(name, each, **options) for each in WEIGHTS_FILES)
    return Path(next(each for each in found if each is not None)).parent


def _load(source: ModelSource, **options: Any) -> Any:
    try:
        loaded: Any = _class_of(source.config).from_pretrained(
            source.name,
            config=copy.deepcopy(source.config),  # the file's own config could choose kernels
            dtype=source.dtype,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # so that they are listed, and refused below with the others
            use_safetensors=True,
            trust_remote_code=False,
            local_files_only=only_cached(source.name),
            **options,
        )
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise _unreadable(source.name, error) from None
    model, loading = loaded
    _refuse_other_weights(source.name, loading)
    whole_numbers = [re.escape(name) for name, buffer in model.named_buffers() if not buffer.is_floating_point()]
    left_aside = [*whole_numbers, *(model._keys_to_ignore_on_load_unexpected or ())]
    check_dtypes(weights_folder(source.name), widest=source.dtype, but=left_aside)
    limits = {name: each.nan_to_num(torch.nan, 0.0, 0.0) for name, each in model.named_buffers()}  # may be infinite
    check_finite(f"model {source.name}", {**model.state_dict(), **limits}.items())
    return model


def _read_generation_config(model: Any, name: str) -> None:
    with suppress(OSError):
        model.generation_config = GenerationConfig.from_pretrained(name, local_files_only=only_cached(name))


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    def without_storage(_module: nn.Module, _name: str, parameter: nn.Parameter) -> nn.Parameter:
        return parameter if parameter.is_meta else nn.Parameter(parameter.to("meta"), parameter.requires_grad)

    hook: Any = without_storage  # torch's annotation lacks the returned parameter
    handle = register_module_parameter_registration_hook(hook)
    try:
        yield
    finally:
        handle.remove()


def build_skeleton(config: Any, source: ModelSource | None = None) -> Any:
    """Build the model of a config on the meta device, at any size; a model with towers as its text part.

    source: of the model, if towers may train.

    Raises:
        ConfigError: it cannot be built.
    """
    try:
        with torch.device("meta"):  # with a copy, because Hugging Face writes into the config
            made = _class_of(config).from_config(copy.deepcopy(config), experts_implementation=EXPERTS)
            return text_part(made) if source is None else _trained_part(made, source)
    except Exception as error:  # the model's own code, with values from outside
        raise _refuse_config(_where(config), error) from error


def size_problems(config: Any) -> list[ConfigError]:
    """List impossible sizes of a config: no layer, token or head, or heads that do not fit each other."""
    where, problems = _where(config), list[ConfigError]()
    layers = layer_configs(config)
    for key in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"):
        wrong = [each for layer in layers if isinstance(each := getattr(layer, key, None), int) and each < 1]
        problems += [_refuse_config(f"{where}: {key}", str(each), "at least 1") for each in wrong[:1]]
    for layer in layers if not problems else ():
        heads, kv_heads = (getattr(layer, f"num_{kind}_heads", None) for kind in ("attention", "key_value"))
        if heads and kv_heads and heads % kv_heads:
            error = f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}"
            return [_refuse_config(where, error)]
        head_dim = getattr(layer, "head_dim", None)
        if head_dim and head_dim % 2 and getattr(layer, "rope_parameters", None):
            return [_refuse_config(where, f"head_dim {head_dim} is odd, but RoPE rotates pairs of entries")]
    return problems


def count_parameters(config: Any) -> int:
    """Count the parameters of a config's model (see `build_skeleton`), tied ones once, without making them."""
    return sum(parameter.numel() for parameter in build_skeleton(config).parameters())


def _refuse_other_weights(name: str, loading: dict[str, Any]) -> None:
    """Refuse missing and unused weights: Hugging Face only warns, and draws missing ones."""
    kinds = {"missing": "missing_keys", "not in the model": "unexpected_keys", "of another shape": "mismatched_keys"}
    found = {kind: sorted(map(str, loading.get(key) or ())) for kind, key in kinds.items()}
    wrong = [f"{len(keys)} {kind} ({first_names(keys)})" for kind, keys in found.items() if keys]
    if wrong:
        expected = "exactly the weights of config.json"
        remedy = "Give the config and the weights of one model; set `weights: fresh` to draw them from the seed."
        raise ConfigError(f"model {name}", expected=expected, got="; ".join(wrong), remedy=remedy)


def plain_attention(source: ModelSource) -> str:
    """Return Hugging Face's attention for comparisons: sdpa, or eager for models without it (sinks, softcaps)."""
    if has_towers(source.config):
        model: Any = build_skeleton(source.config).get_decoder()
    else:
        model = MODEL_FOR_CAUSAL_LM_MAPPING[type(source.config)]
    return "sdpa" if model._supports_sdpa else "eager"


def _unreadable(name: str, error: Exception) -> ConfigError:
    expected = "tiny, a Hugging Face folder with config.json (and safetensors), or a hub name that can be reached"
    remedy = "Correct the name, or download the model and give its folder."
    got = why_only_cached() if isinstance(error, OSError) and only_cached(name) else first_line(error)
    return ConfigError("model", expected=expected, got=f"{name}: {got}", remedy=remedy)


def _where(config: Any) -> str:
    return f"{config.name_or_path or config.model_type}: config.json"


def _refuse_config(
    where: str, error: Exception | str, expected: str = "a config that transformers can build a model of"
) -> ConfigError:
    got = error if isinstance(error, str) else f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    return ConfigError(where, expected=expected, got=got.rstrip("."), remedy="Correct this entry.")
