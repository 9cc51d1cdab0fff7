"""A model's parameters as tests and benchmarks ask for them: of any cut, and of models without layers."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from lengthwise.comm import Mesh, Transport
from lengthwise.engine.parameters import Parameters
from lengthwise.engine.slices import Sharding
from lengthwise.engine.stage_share import StageShare
from lengthwise.models import ModelStage, wrapped_layers


def whole_parameters(
    model: nn.Module, transport: Transport, *, dtype: torch.dtype, device: torch.device | None = None, **how: Any
) -> Parameters:
    """Lay them as zero1 does. device: None: where the model is."""
    return Parameters(model, Mesh(transport, 1), Sharding(dtype=dtype, device=device or _device(model), **how))


def freed_parameters(
    model: nn.Module, transport: Transport, *, dtype: torch.dtype, ranks_per_node: int | None = None, **how: Any
) -> Parameters:
    """Lay them as zero3 does, or as hybrid; how: fields of `Sharding`."""
    how = {"device": _device(model), "layers": wrapped_layers(model), **how}
    in_step = ranks_per_node or transport.world_size
    return Parameters(model, Mesh(transport, 1), Sharding(dtype=dtype, ranks_in_step=in_step, frees=True, **how))


def stage_parameters(stage: ModelStage, mesh: Mesh, *, dtype: torch.dtype, **how: Any) -> Parameters:
    """Lay those of a stage; how: fields of `Sharding`."""
    how = {"device": _device(stage.model), "layers": wrapped_layers(stage.model), **how}
    return Parameters(stage.model, mesh, Sharding(dtype=dtype, **how), StageShare(mesh, stage))


def _device(model: nn.Module) -> torch.device:
    return next(model.parameters()).device
