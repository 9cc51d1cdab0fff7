"""The parameters of a model on one rank: whole, cut over ranks, or of a stage. The one place that makes them."""

from __future__ import annotations

import torch
from torch import nn

from lengthwise.comm import Mesh, Transport
from lengthwise.engine.parameters import Parameters
from lengthwise.engine.slices import Sharding
from lengthwise.engine.stage_share import StageShare
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
    weights are on the host. overlaps, values_late: of what every rank has, for the others sum and gather in every pass
    (`Sharding`).
    """
    frees = ranks_in_step > 1
    assert frees or rows is None, "whole parameters come from rank 0"
    share = None if stage is None else StageShare(stage[1], stage[0])
    sharding = Sharding(
        dtype=dtype,
        device=device,
        layers=wrapped_layers(model),
        ranks_in_step=ranks_in_step,
        frees=frees,
        overlaps=overlaps and not frees,
        values_late=values_late and not frees,
        trains=trains,
        keeps_frozen=keeps_frozen,
        exact_on=torch.device("cpu") if offloads else None,
        read=None if rows is None else rows.read,
    )
    return Parameters(model, Mesh(transport, 1) if share is None else share.mesh, sharding, share)
