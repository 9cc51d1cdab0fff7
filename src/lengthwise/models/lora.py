"""LoRA through peft: low-rank adapters on a frozen base model, which a plan runs like any other model.

peft changes the model in place and saves its own format. A matrix has r (inputs + outputs) trainable parameters, in the
flat buffers; every rank has the base in the compute dtype. Importing peft takes 3 s. Hu et al. 2021 (arXiv 2106.09685).
"""

from __future__ import annotations

import copy
import json
import re
import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from lengthwise.config import LoraConfig
from lengthwise.config.sections import ALL_LINEAR
from lengthwise.core.errors import ConfigError, raise_problems
from lengthwise.core.files import read_plain
from lengthwise.core.names import did_you_mean
from lengthwise.models.adapter import ATTENTION_NAME
from lengthwise.models.model_files import unwritable
from lengthwise.models.model_source import ModelSource, build_model, build_skeleton
from lengthwise.models.text_part import TextPart
from lengthwise.models.weights import WIDTHS, check_finite, first_line

CONFIG_NAME, WEIGHTS_NAME = "adapter_config.json", "adapter_model.safetensors"
_PREFIX, _ADAPTER, _BASE_COPY = "base_model.model.", "default", ".base_layer.weight"

# Keys of a saved adapter's config that we support, or that do not affect the arithmetic.
_RUNNABLE = frozenset(
    {"alpha_pattern", "auto_mapping", "base_model_name_or_path", "inference_mode", "lora_alpha", "peft_type"}
    | {"lora_dropout", "peft_version", "r", "rank_pattern", "revision", "target_modules", "task_type", "use_rslora"}
)


def check_lora(source: ModelSource, lora: LoraConfig | None) -> int | None:
    """Try the adapter on a model on the meta device; return the number of its parameters, or None without an adapter.

    Raises:
        ConfigError: peft is not installed, the base has no weights, a name fits no layer, or the saved adapter cannot
            be read, is of another kind or of another model.
    """
    if lora is None:
        return None
    _peft()
    if not source.weights:
        got = f"{source.name}, whose weights are drawn from the seed and not saved"
        raise _refuse("lora", "a base model with weights", got, "Give a model with weights, or remove lora.")
    skeleton = build_skeleton(source.config, source)
    config = _peft_config(source, lora, skeleton, draws_both=False)
    if lora.adapter is None:
        _check_targets(skeleton, config.target_modules)
    where = "lora.adapter" if lora.adapter else "lora.target_modules"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            _inject(config, skeleton)
    except (ValueError, Warning) as error:
        if not config.target_parameters:
            raise _refuse(where, "layers that peft can adapt", first_line(error)) from None
    if config.target_parameters:  # peft's form for experts in one parameter
        remedy = "Name layers outside the experts, for example [q_proj, k_proj, v_proj, o_proj]."
        raise _refuse(where, "linear and embedding layers only", "the experts of a mixture", remedy)
    if lora.adapter is not None:
        _check_weights(lora.adapter, skeleton)
    return sum(parameter.numel() for parameter in skeleton.parameters() if parameter.requires_grad)


def build_adapted(
    source: ModelSource,
    lora: LoraConfig | None,
    *,
    seed: int,
    attention: str = ATTENTION_NAME,
    draws_both: bool = False,
    stored: bool = True,
) -> nn.Module:
    """Build the model as `build_model` does; if `lora` is given, freeze it and add adapters.

    A is drawn from `seed`, the same on every rank, and B is zero, or both come from the saved adapter. stored: that of
    `build_model`. draws_both: True to draw B too, for checks, because A has no gradient while B is zero.
    """
    model = build_model(source, seed=seed, attention=attention, stored=stored)
    if lora is None:
        return model
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        _inject(_peft_config(source, lora, model, draws_both=draws_both), model)
    if lora.adapter is not None and stored:
        saved = load_file(lora.adapter / WEIGHTS_NAME)
        check_finite(f"lora.adapter {lora.adapter}", saved.items())
        for name, parameter in _adapters(model).items():
            parameter.data = saved[name].to(torch.promote_types(saved[name].dtype, torch.float32))
    return model.train()


def save_adapter(model: Any, folder: Path) -> None:
    """Write the adapter for `PeftModel.from_pretrained`, with its base's name.

    Raises:
        OutputError: the folder cannot be written.
    """
    config = copy.copy(model.peft_config[_ADAPTER])
    config.inference_mode = True
    if isinstance(model, TextPart) and not isinstance(config.target_modules, str):
        config.target_modules = _in_text_part(model, config.target_modules)
    settings = {key: sorted(value) if isinstance(value, set) else value for key, value in config.to_dict().items()}
    state = {name: tensor.detach().clone().contiguous() for name, tensor in _adapters(model).items()}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / CONFIG_NAME).write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        save_file(state, folder / WEIGHTS_NAME, metadata={"format": "pt"})
    except (OSError, SafetensorError) as error:
        raise unwritable(folder, "the adapter", error) from None


def _in_text_part(model: TextPart, names: Iterable[str]) -> str:
    """Return a pattern for layers of these names in the text part only: peft searches the whole model."""
    parts, layers = ("|".join(map(re.escape, sorted(each))) for each in (model._modules, names))
    return rf"(?:(?:{parts})\.(?:.*\.)?)?(?:{layers})"


def _peft() -> Any:
    try:
        import peft
    except ImportError as error:
        raise _refuse("lora", "the package peft", first_line(error), "Install it: pip install 'peft>=0.21'.") from None
    return peft


def _peft_config(source: ModelSource, lora: LoraConfig, model: Any, *, draws_both: bool) -> Any:
    peft = _peft()
    if lora.adapter is not None:
        saved = _read_adapter_config(lora.adapter)
        keys = ("r", "lora_alpha", "target_modules", "use_rslora", "rank_pattern", "alpha_pattern", "lora_dropout")
        chosen = {key: saved[key] for key in keys if key in saved}
    else:
        named = lora.target_modules or ()
        chosen = {
            "r": lora.r,
            "lora_alpha": lora.lora_alpha,
            "use_rslora": lora.use_rslora,
            "lora_dropout": lora.lora_dropout,
            "target_modules": _linear_names(model) if ALL_LINEAR in named else list(named),
        }
    return peft.LoraConfig(
        task_type="CAUSAL_LM", base_model_name_or_path=source.name, init_lora_weights=not draws_both, **chosen
    )


def _inject(config: Any, model: nn.Module) -> None:
    _peft().inject_adapter_in_model(config, model, adapter_name=_ADAPTER)


def _linear_names(model: Any) -> list[str]:
    """List the last parts of the names of linear layers, except the head, as peft's `all-linear`.

    As many parts as no other module ends with: in towers a convolution may have the last part of a linear layer. Names
    that peft takes for experts, here and where it opens what was saved, are left out, with all layers that have them.
    """
    head = model.get_output_embeddings()
    others = {name for name, module in model.named_modules() if not isinstance(module, nn.Linear)}
    ends = {tuple(name.split(".")[at:]) for name in others for at in range(name.count(".") + 1)}

    def shown(name: str) -> str:
        parts = tuple(name.split("."))
        return ".".join(next(parts[at:] for at in range(len(parts) - 1, -1, -1) if parts[at:] not in ends))

    linear = (name for name, module in model.named_modules() if isinstance(module, nn.Linear) and module is not head)
    config = _peft().LoraConfig(target_modules=sorted({shown(name) for name in linear}))
    from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers

    convert_peft_config_for_transformers(config, model=model, conversions=None)
    return sorted(config.target_modules)


def _check_targets(model: Any, names: Any) -> None:
    """Refuse names that fit no linear or embedding layer, and one of two tied embeddings."""
    modules = dict(model.named_modules())
    kinds = (nn.Linear, nn.Embedding)
    known = sorted({name.rpartition(".")[2] for name, module in modules.items() if isinstance(module, kinds)})
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    tied = None not in ends and ends[0].weight is ends[1].weight
    where, problems = "lora.target_modules", []
    for target in sorted(names):
        fitting = [module for name, module in modules.items() if name == target or name.endswith(f".{target}")]
        other = [module for module in fitting if not isinstance(module, kinds)]
        near = did_you_mean(target, known) or f"Known: {', '.join(known)}."
        if not fitting:
            problems.append(_refuse(where, "names of layers of the model", f"`{target}`", near))
        elif other:
            got = f"`{target}`, a {type(other[0]).__name__}"
            problems.append(_refuse(where, "names of linear or embedding layers", got, f"Known: {', '.join(known)}."))
        elif tied and any(module is end for module in fitting for end in ends):
            got = f"`{target}`, whose weight input and output share"
            problems.append(_refuse(where, "layers with a weight of their own", got, "Remove it."))
    raise_problems(problems)


def _is_size(value: Any) -> bool:
    return type(value) in (int, float) and 0 < value <= _MOST_RANK


def _is_share(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value < 1


def _is_pattern(value: Any) -> bool:
    return isinstance(value, dict) and all(_is_size(each) for each in value.values())


def _is_names(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, list) and all(isinstance(each, str) for each in value))


_MOST_RANK = 1 << 16  # more than the hidden size of any model today
_SIZE, _PATTERN = f"a number above 0, at most {_MOST_RANK}", f"an object of numbers above 0, at most {_MOST_RANK},"
_ADAPTER_VALUES: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "r": (lambda value: type(value) is int and _is_size(value), _SIZE),
    "lora_alpha": (_is_size, _SIZE),
    "rank_pattern": (_is_pattern, _PATTERN),
    "alpha_pattern": (_is_pattern, _PATTERN),
    "lora_dropout": (_is_share, "a number from 0 to below 1"),
    "target_modules": (_is_names, "a name or a list of names"),
    "use_rslora": (lambda value: isinstance(value, bool), "true or false"),
}


def _read_adapter_config(folder: Path) -> dict[str, Any]:
    try:
        saved = json.loads(read_plain(folder / CONFIG_NAME).decode())
    except (OSError, ValueError, RecursionError) as error:
        raise _refuse("lora.adapter", f"a folder with {CONFIG_NAME}", f"{folder}: {first_line(error)}") from None
    if not isinstance(saved, dict) or saved.get("peft_type") != "LORA":
        kind = saved.get("peft_type") if isinstance(saved, dict) else type(saved).__name__
        raise _refuse("lora.adapter", "an adapter of peft_type LORA", str(kind))
    for key, (good, expected) in _ADAPTER_VALUES.items():
        if key in saved and not good(saved[key]):
            raise _refuse("lora.adapter", f"{expected} for {key} in {CONFIG_NAME}", json.dumps(saved[key])[:60])
    plain = _peft().LoraConfig().to_dict()
    other = sorted(key for key in saved.keys() - _RUNNABLE if saved[key] and saved[key] != plain.get(key))
    if other:
        got = ", ".join(f"{key}={saved[key]}" for key in other)
        raise _refuse("lora.adapter", "an adapter of plain LoRA", got, "Use an adapter without these keys.")
    return saved


def _check_weights(folder: Path, model: nn.Module) -> None:
    if not (folder / WEIGHTS_NAME).is_file():
        raise _refuse("lora.adapter", f"a folder with {WEIGHTS_NAME}", f"{folder}, without such a file")
    try:
        with safe_open(folder / WEIGHTS_NAME, framework="pt") as file:
            parts = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 - no mapping
            saved = {name: list(part.get_shape()) for name, part in parts.items()}
            kinds = {str(part.get_dtype()) for part in parts.values()} - WIDTHS.keys()
    except (OSError, SafetensorError) as error:
        raise _refuse("lora.adapter", f"a folder with {WEIGHTS_NAME}", f"{folder}: {first_line(error)}") from None
    if kinds:
        raise _refuse("lora.adapter", f"weights of {', '.join(WIDTHS)}", ", ".join(sorted(kinds)))
    asked = {name: list(parameter.shape) for name, parameter in _adapters(model).items()}
    copies = sorted(name for name in saved.keys() - asked.keys() if name.endswith(_BASE_COPY))
    if copies:  # peft adds it if an embedding is a target
        got = f"also a copy of the base model's weight, {copies[0]}"
        remedy = "Save it with save_pretrained(..., save_embedding_layers=False)."
        raise _refuse("lora.adapter", "the weights of the adapter alone", got, remedy)
    wrong = sorted(name for name in saved.keys() | asked.keys() if saved.get(name) != asked.get(name))
    if wrong:
        first = wrong[0]
        there, here = saved.get(first, "nothing"), asked.get(first, "nothing")
        got = f"{len(wrong)} that differ, first {first}: {there} in the file, {here} in the model"
        raise _refuse("lora.adapter", "exactly the weights of its config on this model", got)


def _adapters(model: nn.Module) -> dict[str, Tensor]:
    return {
        _PREFIX + name.replace(f".{_ADAPTER}", ""): parameter
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }


def _refuse(where: str, expected: str, got: str, remedy: str = "Give another adapter.") -> ConfigError:
    return ConfigError(where, expected=expected, got=got, remedy=remedy)
