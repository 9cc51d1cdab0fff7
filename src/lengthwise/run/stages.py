"""`stages` of a run file, before any process starts: whether ranks and layers can be cut so."""

from __future__ import annotations

from lengthwise.config import RunConfig
from lengthwise.core.errors import ConfigError
from lengthwise.models import ModelSource, check_stages


def check_ranks(config: RunConfig, ranks: int) -> None:
    """Refuse ranks that are no whole number of replicas."""
    if ranks % config.stages:
        expected, got = f"a multiple of the {config.stages} stages", str(ranks)
        raise ConfigError("ranks", expected=expected, got=got, remedy="Start {ranks} of them, or change stages.")


def check_cut(config: RunConfig, model: ModelSource) -> None:
    """Refuse more chunks than layers, and families that are not cut into stages."""
    layers, chunks = model.config.num_hidden_layers, config.stages * config.virtual
    if chunks > layers:
        expected, got = f"stages x virtual of at most the {layers} layers", f"{config.stages} x {config.virtual}"
        raise ConfigError("stages", expected=expected, got=got, remedy="Use fewer of them.")
    check_stages(model.config)
