"""Model shapes: the named ones of `models.json`, and those read from a Hugging Face `config.json`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from os.path import exists, expanduser
from pathlib import Path
from typing import Any

from lengthwise.core.errors import Collector, ConfigError
from lengthwise.core.files import is_path, read_json_object, read_package_json
from lengthwise.core.names import unknown_name
from lengthwise.core.shape import ModelShape
from lengthwise.core.trained import family_refusal, layer_kinds, text_part
from lengthwise.cost.layer_sizes import (
    EXPERT_WIDTH,
    WIDTH,
    full_heads,
    has_experts,
    layer_inputs,
    mixers_of,
    mlps_of,
    projections_of,
)

_FILE = read_package_json("lengthwise.cost", "models.json")
_SHAPES, _PUBLISHED = _FILE["shapes"], _FILE["published"]
SHAPE_NAMES = (*_SHAPES, *_PUBLISHED)
_VARIANT = re.compile(  # suffixes and prefixes of variants with the same sizes
    r"^(meta|nvidia)-|-(instruct|base|it|pt|hf|chat|thinking|think|reasoning|sft|dpo|bf16|exp|\d{4})(?=-|$)"
)
_HUB_NAME = re.compile(r"(\w[\w.-]*/)?[\w.-]+")  # ./NAME, ~/NAME and /FOLDER/NAME are paths, even if nothing is there
_OWN_SHAPE = "or a model's folder or its config.json, by its path"


def named_shape(name: str) -> ModelShape:
    """Return the shape of a name of `SHAPE_NAMES`, a hub name (Qwen/Qwen3-8B), or a model's folder or config.json.

    For a model with images it is the shape of its text part; `check_trained` refuses some of them.

    Raises:
        ConfigError: an unknown name (it suggests the nearest one), or a folder or file that is not a model's.
        ModelRefused: a family that this version does not train, whose costs it does not know.
        Problems: several missing or invalid sizes in a config.
    """
    known = _known_name(name)
    if known is not None:
        if known in _SHAPES:
            return ModelShape(name=known, **_SHAPES[known])
        like = _PUBLISHED[known]  # a config, or the name of a model with the same one
        return shape_from_config(_PUBLISHED[like] if isinstance(like, str) else like, name=known)
    config, path = _config_of(name), Path(expanduser(name)).resolve()
    refusal = family_refusal(config, "model")
    if refusal is not None and not (text_part(config) and family_refusal(config["text_config"], "model") is None):
        raise refusal
    folder = path if path.is_dir() else path.parent if path.name == "config.json" else None
    return shape_from_config(config, name=path.stem if folder is None else folder.name)


def check_trained(name: str) -> None:
    """Refuse a model, named as for `named_shape`, that this version does not train.

    Raises:
        ConfigError: there is no such model (see `named_shape`).
        ModelRefused: its family is not trained.
    """
    refusal = None if _known_name(name) is not None else family_refusal(_config_of(name), "model")
    if refusal is not None:
        raise refusal


def _known_name(name: str) -> str | None:
    """Return our name of a model whose sizes are known here, or None; an existing path comes first."""
    if name in SHAPE_NAMES:
        return name
    return None if not _HUB_NAME.fullmatch(name) or exists(name) else _published_name(name)


def _config_of(name: str) -> dict[str, Any]:
    """Read the config of a model's folder or config.json; ConfigError: there is none."""
    path = Path(expanduser(name))  # unlike Path.expanduser, accepts ~NAME of an unknown user
    if path.is_dir():
        path = path / "config.json"
    elif not is_path(name):
        raise unknown_name("model", name, SHAPE_NAMES, others=_OWN_SHAPE)
    elif not path.exists() and not name.endswith(".json"):
        expected, remedy = (
            f"one of {', '.join(SHAPE_NAMES)}, {_OWN_SHAPE}",
            "Download its config.json and give its path.",
        )
        got = f"{name!r}, which does not exist (names on the hub are not looked up)"
        raise ConfigError("model", expected=expected, got=got, remedy=remedy)
    return read_json_object(str(path))


def _published_name(name: str) -> str | None:
    """Return our name of a published model, by its name on the hub, or None."""
    plain = _VARIANT.sub("", name.lower().rpartition("/")[2])
    return plain if plain in _PUBLISHED else None


# Keys of sizes in configs; the first that a config has counts.
_HEADS = ("num_attention_heads", "n_head", "n_heads")
_HIDDEN = ("hidden_size", "n_embd", "d_model")
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_OWN_HEAD_DIM = ("gemma", "gemma2", "gemma3", "gemma3_text", "qwen3")  # without the key, another size is meant
_PATTERNS = {"gemma2": 2, "gemma3": 6, "gemma3_text": 6}  # of windows, if an older config has none
_ACTIVE = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts")


def shape_from_config(config: Mapping[str, Any], *, name: str | None = None) -> ModelShape:
    """Read the sizes from a Hugging Face config (llama, mistral, qwen3, gemma, mixtral and similar).

    name: name in reports (default: the config's `model_type`). If there is a `text_config`, its sizes count; of layers
    of unequal size, the widest; with multi-head latent attention, values count as large as keys.

    Raises:
        ConfigError: a size that is missing or not a positive whole number.
        Problems: several of these.
    """
    config = _text_of(config)
    label = name or str(config.get("model_type", "model"))
    problems = Collector()

    def size(*keys: str, default: int | None = None) -> int:
        return problems.attempt(lambda: _first_size(config, keys, label, default)) or 1

    heads, hidden, layers = size(*_HEADS), size(*_HIDDEN), problems.attempt(lambda: _layers(config, label)) or 1
    kinds = layer_kinds(config, layers)
    without = any(config.get(key) == 0 for key in _EXPERTS)  # granitemoehybrid: the shared MLP is the only one
    active = not without and any(config.get(key) is not None for key in _ACTIVE)  # then there must be experts
    experts = 1 if without else size(*_EXPERTS, default=None if active else 1)
    experts = experts if has_experts(config, kinds, experts) else 1
    latent = config.get("qk_rope_head_dim") and config.get("qk_nope_head_dim")
    own = ("block_ff_dim",) if config.get("block_ff_dim") else ()  # of lfm2; it overrides other keys
    widths = (*own, *(EXPERT_WIDTH if experts > 1 else ()), *(("shared_intermediate_size",) if without else ()), *WIDTH)
    sizes = {
        "hidden": hidden,
        "heads": heads,
        "kv_heads": heads if latent else size("num_key_value_heads", default=heads),
        "head_dim": size("qk_nope_head_dim") + size("qk_rope_head_dim")
        if latent
        else size("head_dim", default=_usual_head_dim(config, hidden, heads)),
        "intermediate": size(*widths, default=_usual_width(config, hidden)),
        "vocab": size("vocab_size"),
        "experts_per_token": size(*_ACTIVE) if experts > 1 else 1,
        **full_heads(config),
    }
    if config.get("block_auto_adjust_ff_dim", config.get("model_type") == "lfm2"):  # two thirds of it, rounded up
        unit, scale = size("block_multiple_of", default=256), config.get("block_ffn_dim_multiplier") or 1.0
        sizes["intermediate"] = -(-int(scale * int(2 * sizes["intermediate"] / 3)) // unit) * unit
    mixing = mixers_of(config, kinds, hidden)
    attending = mixing.get("attention_layers", layers)
    window, having = problems.attempt(lambda: _windows(config, kinds, label)) or (0, [])
    mlps = mlps_of(config, kinds, experts, size)
    problems.raise_all()
    projections = projections_of(config, sizes, attending, sum(having))
    fields: Any = {**sizes, **mixing, **mlps, **projections, **layer_inputs(config, layers, hidden)}
    windows = ((window, sum(having)),) if any(having) else ()
    family = str(config.get("model_type", ""))
    return ModelShape(name=label, layers=layers, experts=experts, windows=windows, family=family, **fields)


def layer_shapes(config: Mapping[str, Any]) -> list[ModelShape]:
    """Return a shape of one layer for each decoder layer of a Hugging Face config, by its kind and window.

    Each has the embedding and head of the whole model.

    Raises:
        ConfigError, Problems: see `shape_from_config`.
    """
    whole, config = shape_from_config(config), _text_of(config)
    kinds = layer_kinds(config, whole.layers)
    window, having = _windows(config, kinds, whole.name)
    sizes = {name: getattr(whole, name) for name in ("hidden", "heads", "kv_heads", "head_dim")} | full_heads(config)
    size = partial(_first_of, config, whole.name)
    none = {"attention_layers": None, "mlp_layers": None, "attention_params": None} | dict.fromkeys(
        ("dense_width", "lookup_params", "mixer_params", "scan_flops", "state_layers", "map_values", "mixer_kept"), 0
    )
    found = []
    for number, (kind, has_window) in enumerate(zip(kinds, having, strict=True)):
        mixing = mixers_of(config, [kind], whole.hidden)
        attending = mixing.get("attention_layers", 1)
        fields = none | mixing | mlps_of(config, kinds, whole.experts, size, at=[number])
        fields |= projections_of(config, sizes, attending, int(has_window), share=1 / whole.layers)
        fields |= layer_inputs(config, 1, whole.hidden)
        found.append(replace(whole, layers=1, windows=((window, 1),) if has_window else (), **fields))
    return found


def _first_of(config: Mapping[str, Any], label: str, *keys: str, default: int | None = None) -> int:
    return _first_size(config, keys, label, default)


def _text_of(config: Mapping[str, Any]) -> Mapping[str, Any]:
    text = config.get("text_config")
    return text if isinstance(text, Mapping) and all(config.get(key) is None for key in _HIDDEN) else config


def _usual_head_dim(config: Mapping[str, Any], hidden: int, heads: int) -> int | None:
    """Return the head size of configs without it, or None if other sizes do not determine it."""
    has_own = config.get("model_type") in _OWN_HEAD_DIM and "head_dim" not in config
    return None if has_own else max(1, hidden // heads)


def _usual_width(config: Mapping[str, Any], hidden: int) -> int | None:
    """Return the MLP width of configs without it (GPT-2's time), or None if other sizes do not determine it."""
    is_old = "n_embd" in config or "d_model" in config or config.get("model_type") in ("bloom", "falcon")
    return 4 * hidden if is_old or any(key in config for key in WIDTH) else None


def _layers(config: Mapping[str, Any], label: str) -> int:
    if config.get("model_type") == "longcat_flash":  # two attentions and two MLPs a layer
        return 2 * _size(config, "num_layers", label)
    if all(config.get(key) is None for key in _LAYERS) and (kinds := layer_kinds(config, 0)):
        return len(kinds)
    return _first_size(config, _LAYERS, label)


def _windows(config: Mapping[str, Any], kinds: Sequence[str], label: str) -> tuple[int, list[bool]]:
    """Return the sliding window (0 without one) and which layers have it, by the four forms of configs."""
    family = str(config.get("model_type", ""))
    used = config.get("use_sliding_window", not family.startswith("qwen"))
    if config.get("sliding_window") is None or not used:
        return 0, [False] * len(kinds)
    window = _size(config, "sliding_window", label)
    pattern, first = config.get("sliding_window_pattern", _PATTERNS.get(family)), config.get("max_window_layers")
    if config.get("layer_types") is not None:
        return window, ["sliding" in str(kind) for kind in kinds]
    attending = [kind == "full_attention" for kind in kinds]
    if isinstance(pattern, int) and pattern > 1:  # every pattern-th layer has no window
        return window, [attends and (number + 1) % pattern > 0 for number, attends in enumerate(attending)]
    if isinstance(first, int):  # layers from this one on
        return window, [attends and number >= first for number, attends in enumerate(attending)]
    return window, attending


def _first_size(config: Mapping[str, Any], keys: tuple[str, ...], label: str, default: int | None = None) -> int:
    for key in keys:
        if config.get(key) is not None:
            return _size(config, key, label)
    return default if default is not None else _size(config, keys[0], label)


def _size(config: Mapping[str, Any], key: str, label: str) -> int:
    value = config.get(key)
    if isinstance(value, list | tuple) and value and all(isinstance(each, int) for each in value):  # one per layer
        value = max(value)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        where, expected = f"model {label}: config key {key}", "a whole number of at least 1"
        got, why = ("nothing", ": this size does not follow from the others") if value is None else (repr(value), "")
        raise ConfigError(where, expected=expected, got=got, remedy=f"Fix the model's config.json{why}.")
    return value
