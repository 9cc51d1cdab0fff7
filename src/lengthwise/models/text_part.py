"""The text part of a checkpoint with towers for images or sounds: its decoder and head, all that rows of text train.

The whole model runs forward, so nothing of it is written again; what trains, lies over ranks, is cut into stages or
adapted is its text part, under the names that it has in the whole. Towers stay as they were loaded, on rank 0, which
saves the whole.
"""

from __future__ import annotations

import re
from typing import Any

from torch import nn

from lengthwise.core.trained import WITH_TOWERS

# Embeddings of images and sounds that a forward of text runs, too, and takes nothing from: here they do not train.
_RUN_BY_TEXT = {"gemma3n": ("model.embed_vision", "model.embed_audio")}

_PLACEHOLDERS = re.compile(r"(image|video|audio)_token_(id|index)")


class TextPart(nn.Module):
    """The decoder and the head of a `whole` model: modules that it shares, by their names in it.

    A call, hooks of it and of its state, and all else that is asked of a Hugging Face model are the whole's. `config`
    is that of the text part.
    """

    whole: Any

    def __init__(self, whole: Any) -> None:
        self.__dict__["whole"] = whole  # no child: its towers are no part
        mode = whole.training
        super().__init__()
        self.training = mode  # pyright: ignore[reportIncompatibleVariableOverride] - that of the whole
        names = {id(module): name for name, module in whole.named_modules()}
        beside = [whole.get_submodule(name) for name in _RUN_BY_TEXT.get(whole.config.model_type, ())]
        for part in (*beside, whole.get_decoder(), whole.get_output_embeddings()):
            self._modules[names[id(part)]] = part
        for part in beside:
            part.requires_grad_(False)

    def __getattr__(self, name: str) -> Any:
        """Return what the whole model has of this name."""
        if name in ("whole", "_modules", "_parameters", "_buffers"):  # of a copy that is not filled yet
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
        """The config of the text part."""
        return self.whole.config.get_text_config()

    @property
    def training(self) -> bool:  # type: ignore[override]
        """The mode of the whole model."""
        return bool(self.whole.training)

    @training.setter
    def training(self, mode: bool) -> None:
        self.whole.training = mode

    def register_forward_pre_hook(self, *arguments: Any, **options: Any) -> Any:
        """Register it of the whole model, as the next ones do."""
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


def text_part(model: Any) -> Any:
    """Return the text part of a model with towers and a head; any other model is its own."""
    if not has_towers(getattr(model, "config", None)) or model.get_output_embeddings() is None:
        return model
    kind = type(type(model).__name__, (TextPart,), {})  # messages then name the class that users know
    return kind(model)


def whole_model(model: Any) -> Any:
    """Return the model with towers that this is the text part of; any other model is its own."""
    return model.whole if isinstance(model, TextPart) else model


def has_towers(config: Any) -> bool:
    """Return whether a Hugging Face config is of a model with towers whose text part this version trains."""
    return getattr(config, "model_type", None) in WITH_TOWERS


def text_config(config: Any) -> Any:
    """Return the config of the text part of a model with towers; that of a model of text is its own."""
    return config.get_text_config() if has_towers(config) else config


def placeholders(config: Any) -> dict[int, str]:
    """Return the ids that stand for an image, a video or sounds in a row, with what the config calls them."""
    found = config.to_dict() if has_towers(config) else {}
    return {value: key for key, value in found.items() if _PLACEHOLDERS.fullmatch(key) and isinstance(value, int)}


def left_alone(model: Any) -> dict[str, nn.Parameter]:
    """Return the parameters of a model with towers that are not of its text part, by name; none of any other model."""
    if not isinstance(model, TextPart):
        return {}
    own = {id(each) for each in model.parameters()}
    return {name: each for name, each in model.whole.named_parameters() if id(each) not in own}
