"""The text part of a model with towers for images or sounds: its decoder and head, which rows of text train.

The whole model runs forward. Its text part is what trains, is sharded, cut into stages or adapted, under the names of
the whole model. If rows with images train, the towers that an optimizer has are in it, too. Other towers keep their
loaded values, on rank 0, which saves the whole model.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any

from torch import nn

from lengthwise.core.trained import WITH_TOWERS

# Embeddings of images and sounds that a forward of text also runs, without using the result: they do not train.
_RUN_BY_TEXT = {"gemma3n": ("model.embed_vision", "model.embed_audio")}

_PLACEHOLDERS = re.compile(r"(image|video|audio)_token_(id|index)")


class TextPart(nn.Module):
    """The decoder and head of a `whole` model: it shares these modules, by their names in the whole model.

    Calls, hooks and all other attributes are the whole model's; `config` is the text part's. towers: the modules beside
    the decoder, all of them, if one trains; else (). text: the same without towers.
    """

    whole: Any
    towers: tuple[nn.Module, ...]
    text: TextPart

    def __init__(self, whole: Any, towers: tuple[nn.Module, ...] = ()) -> None:
        self.__dict__["whole"] = whole  # not a child, because towers may not be included
        self.__dict__["towers"] = towers
        self.__dict__["text"] = type(self)(whole) if towers else self
        mode = whole.training
        super().__init__()
        self.training = mode  # pyright: ignore[reportIncompatibleVariableOverride] - that of the whole
        names = {id(module): name for name, module in whole.named_modules()}
        beside = [whole.get_submodule(name) for name in _RUN_BY_TEXT.get(whole.config.model_type, ())]
        for part in (*towers, *beside, whole.get_decoder(), whole.get_output_embeddings()):
            self._modules[names[id(part)]] = part
        for part in beside:
            part.requires_grad_(False)

    def __getattr__(self, name: str) -> Any:
        """Return the whole model's attribute."""
        if name in ("whole", "towers", "text", "_modules", "_parameters", "_buffers"):  # a copy that is not filled yet
            raise AttributeError(name)
        return getattr(self.whole, name)

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        """Run the whole model, with its hooks."""
        return self.whole(*arguments, **options)

    def forward(self, *arguments: Any, **options: Any) -> Any:
        """Run the whole model, without its hooks."""
        return self.whole.forward(*arguments, **options)

    @property
    def config(self) -> Any:
        """Config of the text part."""
        return self.whole.config.get_text_config()

    @property
    def training(self) -> bool:  # type: ignore[override]
        """Mode of the whole model."""
        return bool(self.whole.training)

    @training.setter
    def training(self, mode: bool) -> None:
        self.whole.training = mode

    def register_forward_pre_hook(self, *arguments: Any, **options: Any) -> Any:
        """Register a hook of the whole model, as the next methods do."""
        return self.whole.register_forward_pre_hook(*arguments, **options)

    def register_state_dict_pre_hook(self, hook: Any) -> Any:
        """See above."""
        return self.whole.register_state_dict_pre_hook(hook)

    def register_load_state_dict_pre_hook(self, hook: Any) -> Any:
        """See above."""
        return self.whole.register_load_state_dict_pre_hook(hook)

    def register_load_state_dict_post_hook(self, hook: Any) -> Any:
        """See above."""
        return self.whole.register_load_state_dict_post_hook(hook)


def text_part(model: Any, *, trained: Collection[int] = ()) -> Any:
    """Return the text part of a model with towers and a head; any other model itself.

    trained: ids of parameters that an optimizer has; the towers are part, too, if it has one that requires a gradient.
    """
    if not has_towers(getattr(model, "config", None)) or model.get_output_embeddings() is None:
        return model
    kind = type(type(model).__name__, (TextPart,), {})  # messages name the user's class
    towers = [each for each in model.base_model.children() if trained and each is not model.get_decoder()]
    trains = any(own.requires_grad and id(own) in trained for tower in towers for own in tower.parameters())
    return kind(model, tuple(towers) if trains else ())


def trained_towers(model: Any) -> tuple[nn.Module, ...]:
    """Return the modules beside the decoder of a model with towers, if one of them trains; else ()."""
    return model.towers if isinstance(model, TextPart) else ()


def without_towers(model: Any) -> Any:
    """Return a text part without the towers that train; any other model itself."""
    return model.text if isinstance(model, TextPart) else model


def whole_model(model: Any) -> Any:
    """Return the whole model of a text part; any other model itself."""
    return model.whole if isinstance(model, TextPart) else model


def has_towers(config: Any) -> bool:
    """Return whether a config's model has towers and a text part that this version trains."""
    return getattr(config, "model_type", None) in WITH_TOWERS


def text_config(config: Any) -> Any:
    """Return the text part's config of a model with towers; any other config itself."""
    return config.get_text_config() if has_towers(config) else config


def layer_configs(config: Any) -> list[Any]:
    """Return one config per layer if the layers of a model's text part differ, else its config alone."""
    config = text_config(config)
    return list(config.per_layer_config) if getattr(config, "is_heterogeneous", False) else [config]


def placeholders(config: Any) -> dict[int, str]:
    """Return the ids that stand for an image, a video or a sound, with their config keys."""
    found = config.to_dict() if has_towers(config) else {}
    return {value: key for key, value in found.items() if _PLACEHOLDERS.fullmatch(key) and isinstance(value, int)}


def left_alone(model: Any) -> dict[str, nn.Parameter]:
    """Return the parameters of a model's towers by name, or {} for a model without towers."""
    if not isinstance(model, TextPart):
        return {}
    own = {id(each) for each in model.parameters()}
    return {name: each for name, each in model.whole.named_parameters() if id(each) not in own}
