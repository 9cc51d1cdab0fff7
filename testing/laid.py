"""A model's parameters as tests and benchmarks ask for them: of any cut, and of models without layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lengthwise.comm import Mesh, Transport
from lengthwise.engine.parameters import Parameters
from lengthwise.engine.slices import Sharding
from lengthwise.engine.stage_share import StageShare
from lengthwise.models import ModelStage, wrapped_layers


def whole_parameters(
    model: nn.Module, transport: Transport, *, dtype: torch.dtype, device: torch.device | None = None, **how: Any
) -> Parameters:
    """Lay them as zero1 does. device: None: where the model is."""
    return _laid(model, StageShare(Mesh(transport, 1)), dtype=dtype, device=device, **{"layers": (), **how})


def freed_parameters(
    model: nn.Module, transport: Transport, *, dtype: torch.dtype, ranks_per_node: int | None = None, **how: Any
) -> Parameters:
    """Lay them as zero3 does, or as hybrid; how: fields of `Sharding`."""
    in_step = ranks_per_node or transport.world_size
    return _laid(model, StageShare(Mesh(transport, 1)), dtype=dtype, ranks_in_step=in_step, **how)


def stage_parameters(stage: ModelStage, mesh: Mesh, *, dtype: torch.dtype, **how: Any) -> Parameters:
    """Lay those of a stage; how: fields of `Sharding`."""
    return _laid(stage.model, StageShare(mesh, stage), dtype=dtype, **how)


def _laid(
    model: nn.Module,
    share: StageShare,
    *,
    device: torch.device | None = None,
    layers: Sequence[nn.Module] | None = None,
    read: Callable[[str, int, int], Tensor] | None = None,
    **how: Any,
) -> Parameters:
    sharding = Sharding(device=device or next(model.parameters()).device, **how)
    return Parameters(model, sharding, share, layers=wrapped_layers(model) if layers is None else layers, read=read)
