"""Finds, builds and saves models: `tiny`, a local Hugging Face folder, or a hub name. Remote code is never run."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModelForCausalLM, LlamaConfig

from lengthwise.core.errors import ConfigError, OutputError
from lengthwise.cost import named_shape
from lengthwise.models.adapter import ATTENTION_NAME, register_attention

# Experts one by one: Hugging Face's grouped products know no fp64 and round differently with the number of tokens.
EXPERTS = "eager"

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSource:
    """Where a model comes from. `weights` is False for a config without weights: those start from the seed."""

    name: str
    config: Any
    weights: bool


def find_model(name: str) -> ModelSource:
    """Read the config of `tiny`, of a folder, or of a hub name.

    Raises:
        ConfigError: there is no such model, or its config cannot be read.
    """
    if name == "tiny":
        return ModelSource(name=name, config=tiny_config(), weights=False)
    try:
        config = AutoConfig.from_pretrained(name, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise _unreadable(name, error) from None
    folder = Path(name)
    weights = not folder.is_dir() or any(folder.glob("*.safetensors"))
    others = sorted(path.name for kind in ("*.bin", "*.pt", "*.pth", "*.h5", "*.gguf") for path in folder.glob(kind))
    if not weights and others:
        raise ConfigError(
            f"model {name}",
            expected="weights in safetensors, or none at all",
            got=", ".join(others[:3]),
            remedy="Convert them to safetensors (pickles are never opened), or delete them to start from the seed.",
        )
    return ModelSource(name=name, config=config, weights=weights)


def tiny_config() -> LlamaConfig:
    """The shape `tiny`: a Llama of about one million parameters over bytes, which `plan` knows without torch."""
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


def build_model(source: ModelSource, *, seed: int, attention: str = ATTENTION_NAME) -> nn.Module:
    """Build the model in fp32, or fp64 where its weights are, so that masters are exact; flat buffers make it narrower.

    Without weights the parameters are drawn from `seed`, the same on every rank and for every precision.

    Raises:
        ConfigError: weights that cannot be read, or are not exactly those that the config asks for.
    """
    register_attention()
    if source.weights:
        try:
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                source.name,
                dtype=torch.float64 if source.config.dtype == torch.float64 else torch.float32,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # so that they are listed, and refused below with all others
                attn_implementation=attention,
                experts_implementation=EXPERTS,
                use_safetensors=True,
                trust_remote_code=False,
            )
        except (OSError, ValueError, RuntimeError, SafetensorError) as error:
            raise _unreadable(source.name, error) from None
        model, loading = loaded
        _refuse_other_weights(source.name, loading)
    else:
        # The copy: Hugging Face writes the attention's name into the config, and one source may build several models.
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = AutoModelForCausalLM.from_config(
                copy.deepcopy(source.config),
                dtype=torch.float32,
                attn_implementation=attention,
                experts_implementation=EXPERTS,
            )
    return model.train()


def build_skeleton(config: Any) -> Any:
    """Build the model of a Hugging Face config without storage: its layers can be looked at, at any size."""
    with torch.device("meta"):  # the copy: Hugging Face writes into the config
        return AutoModelForCausalLM.from_config(copy.deepcopy(config), experts_implementation=EXPERTS)


def count_parameters(config: Any) -> int:
    """Count the parameters of a config's model, tied ones once; no weights are made."""
    return sum(parameter.numel() for parameter in build_skeleton(config).parameters())


def _refuse_other_weights(name: str, loading: dict[str, Any]) -> None:
    """Refuse what Hugging Face only warns of: parameters drawn anew or left aside are a model that nobody asked for."""
    kinds = {"missing": "missing_keys", "not in the model": "unexpected_keys", "of another shape": "mismatched_keys"}
    found = {kind: sorted(map(str, loading.get(key) or ())) for kind, key in kinds.items()}
    told = [
        f"{len(keys)} {kind} ({', '.join(keys[:3])}{', ...' * (len(keys) > 3)})" for kind, keys in found.items() if keys
    ]
    if told:
        raise ConfigError(
            f"model {name}",
            expected="weights that are exactly those of config.json",
            got="; ".join(told),
            remedy="Give the config and the weights of one model; delete the weights to start from the seed.",
        )


def plain_attention(source: ModelSource) -> str:
    """Name Hugging Face's own attention to compare with: sdpa, or eager for models that lack it (sinks, softcaps)."""
    model: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(source.config)]
    return "sdpa" if model._supports_sdpa else "eager"


def save_model(model: Any, folder: Path) -> None:
    """Write config and safetensors that `from_pretrained` opens.

    Parameters are views of one flat buffer; each is copied once, tied ones staying one tensor, so that Hugging Face
    sees exactly the sharing that the model means.

    Raises:
        OutputError: the folder cannot be written.
    """
    copies: dict[tuple[int, torch.Size], torch.Tensor] = {}
    state = {}
    for name, tensor in model.state_dict().items():
        key = (tensor.data_ptr(), tensor.shape)
        if key not in copies:
            copies[key] = tensor.detach().to("cpu", copy=True)
        state[name] = copies[key]
    try:
        model.save_pretrained(folder, state_dict=state)
    except OSError as error:
        raise OutputError(
            str(folder), expected="a folder to write the model to", got=str(error), remedy="Free or mend the folder."
        ) from None


def _unreadable(name: str, error: Exception) -> ConfigError:
    return ConfigError(
        "model",
        expected="tiny, a Hugging Face folder with config.json (and safetensors), or a hub name that can be reached",
        got=f"{name}: {str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__}",
        remedy="Correct the name, or download the model and give its folder.",
    )
