"""The work of a model's tower on an image, in tokens of its decoder's linear work, by which plans balance ranks.

Counted by the entries of layers' weights. A pass forward counts once; one backward once more, and once more for the
weights that train.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn

from lengthwise.cost import shape_from_config
from lengthwise.models.text_part import trained_towers, whole_model

_SQUARES = 12  # entries of a layer's weights over its squared width


@dataclass(frozen=True, slots=True)
class TowerWork:
    """Work on a token of an image: `per_token`, and by attention `per_pair` for every token of this image."""

    per_token: float
    per_pair: float

    def of(self, tokens: int) -> float:
        """Return the work on an image of so many tokens."""
        return tokens * (self.per_token + tokens * self.per_pair)


def tower_work(model: Any, patches: float) -> TowerWork:
    """Return the work of a model's tower, which runs forward alone unless it is among those of `text_part` that train.

    model: as `text_part` returns it. patches: patches a token of an image.
    """
    whole = whole_model(model)
    decoder, config = whole.get_decoder(), whole.config
    parts = whole.base_model.named_children()
    towers = [each for name, each in parts if each is not decoder and "audio" not in name]
    layers = max(
        (each for tower in towers for each in tower.modules() if isinstance(each, nn.ModuleList)), key=_entries
    )
    of_layers = _entries(layers)
    beside = sum(map(_entries, towers)) - of_layers  # runs once a token or a patch
    width = math.sqrt(of_layers / len(layers) / _SQUARES)
    every = range(len(layers))
    full = {*getattr(config.vision_config, "fullatt_block_indexes", every)} & {*every}  # other layers see windows
    passes = _passes(towers) if trained_towers(model) else 1.0
    token = shape_from_config(config.to_dict()).linear_params * _passes([decoder]) / passes
    pairs = 2 * patches * width * len(full)  # two products of a patch's width for every patch of the image
    return TowerWork((patches * of_layers + beside) / token, patches * pairs / token)


def _passes(parts: Iterable[nn.Module]) -> float:
    """Return the work of all passes over that of a forward."""
    linear = [each for part in parts for each in part.modules() if isinstance(each, nn.Linear)]
    trained = sum(_entries(each) for each in linear if each.weight.requires_grad)
    return 1.0 + bool(trained) + trained / max(1, sum(map(_entries, linear)))


def _entries(module: nn.Module) -> int:
    """Return the entries of the weights of linear layers, also where their storage is not here."""
    return sum(each.in_features * each.out_features for each in module.modules() if isinstance(each, nn.Linear))
