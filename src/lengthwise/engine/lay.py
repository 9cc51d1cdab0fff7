"""The parameters of a model on one rank: whole, cut over ranks, or of a stage. The one place that makes them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from lengthwise.comm import Mesh, Transport
from lengthwise.engine.parameters import Parameters
from lengthwise.engine.replicated import FlatParameters
from lengthwise.engine.sharded import ShardedParameters
from lengthwise.engine.stage_parameters import StageParameters
from lengthwise.models import ModelStage, wrapped_layers
from lengthwise.models.own_rows import OwnRows


def lay_parameters(
    model: nn.Module,
    transport: Transport,
    *,
    dtype: torch.dtype,
    device: torch.device,
    ranks_in_step: int = 1,
    stage: tuple[ModelStage, Mesh] | None = None,
    rows: OwnRows | None = None,
    trains: bool = True,
    offloads: bool = False,
    overlaps: bool = False,
    values_late: bool = False,
    keeps_frozen: bool = False,
) -> Parameters:
    """Give a model, on every rank, parameters with the values of rank 0. Collective.

    ranks_in_step: neighbouring ranks that share them; 1: every rank has all. stage: of the model, with the mesh of its
    pipelines. rows: where every rank reads its own values, if they are cut; None: rank 0 sends them. offloads: master
    weights are on the host. overlaps: gradients are summed while the last backward runs. values_late: what was
    published may still arrive while the next forward begins. keeps_frozen: what does not train keeps its dtype.
    """
    how: dict[str, Any] = {"dtype": dtype, "device": device, "keeps_frozen": keeps_frozen}
    how["exact_on"] = torch.device("cpu") if offloads else None
    early: dict[str, Any] = {"overlaps": overlaps, "values_late": values_late}
    if stage is not None:
        return StageParameters(*stage, **early, **how)
    how["layers"] = wrapped_layers(model)
    if ranks_in_step == 1:
        assert rows is None, "whole parameters come from rank 0"
        return FlatParameters(model, transport, **early, **how)
    read = None if rows is None else rows.read
    return ShardedParameters(model, transport, trains=trains, ranks_per_node=ranks_in_step, read=read, **how)
