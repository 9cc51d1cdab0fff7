"""The parameters of a model on one rank: whole, cut over ranks, or of a stage. The one place that makes them."""

from __future__ import annotations

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
    sharding: Sharding,
    *,
    stage: tuple[Mesh, ModelStage] | None = None,
    rows: OwnRows | None = None,
) -> Parameters:
    """Give a model, on every rank, parameters with the values of rank 0. Collective.

    stage: of the model, with the mesh of its pipelines. rows: where every rank reads its own values, if they are cut;
    None: rank 0 sends them.
    """
    assert rows is None or not sharding.stays, "whole parameters come from rank 0"
    share = StageShare(Mesh(transport, 1)) if stage is None else StageShare(*stage, trains=sharding.trains)
    read = None if rows is None else rows.read
    return Parameters(model, sharding, share, layers=wrapped_layers(model), read=read)
