"""Stages of a pipeline in a session: which ranks share a stage, and which layers it takes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from lengthwise.comm import Mesh, Transport, broadcast_bytes, share_numbers
from lengthwise.core.errors import ConfigError
from lengthwise.cost import Cost, layer_shapes
from lengthwise.cost.analytic import layer_flops, layer_seconds
from lengthwise.models import text_config
from lengthwise.program.stage_program import cut_layers


def check_replicas(ranks: int, stages: int) -> None:
    """Refuse a number of ranks that is not a multiple of the stages."""
    if ranks % stages:
        expected = f"a multiple of the {stages} stages"
        raise ConfigError("ranks", expected=expected, got=str(ranks), remedy="Change the number of ranks, or stages.")


def join_stages(model: nn.Module, transport: Transport, stages: int, *, reads: bool) -> Mesh:
    """Return the mesh of stages and replicas. Collective.

    reads: True if every stage reads its values later; if not, the ranks of the first replica must have the same values.
    """
    check_replicas(transport.world_size, stages)
    mesh = Mesh(transport, stages)
    if reads:
        return mesh
    is_empty = mesh.replica == 0 and any(parameter.is_meta for parameter in model.parameters())
    if share_numbers(transport, [float(is_empty)]).any():
        expected = f"a model with values on ranks 0 to {stages - 1}, the stages of the first replica"
        raise ConfigError("model", expected=expected, got="one on the meta device", remedy="Load it there.")
    sizes = [0.0 if mesh.replica else float(each.detach().double().abs().sum()) for each in model.parameters()]
    of_stages = share_numbers(transport, sizes)[:stages]
    if not torch.allclose(of_stages, of_stages[:1], rtol=1e-9, atol=0.0, equal_nan=True):
        expected = f"a model with the same values on ranks 0 to {stages - 1}, the stages of the first replica"
        remedy = "Load the same weights there, or call torch.manual_seed before the model is made."
        raise ConfigError("model", expected=expected, got="models that differ", remedy=remedy)
    return mesh


def cut_stages(
    world: Transport, config: Any, chunks: int, lengths: Sequence[int], *, capacity: int, cost: Cost | None
) -> list[range]:
    """Cut the layers of a model into chunks of about equal time, as rank 0 decides. Collective.

    lengths: tokens of the training sequences. capacity: tokens of a microbatch. cost: cost model, None to count FLOPs.
    """
    sent = b""
    if not world.rank:
        shapes, embedding = layer_shapes(text_config(config).to_dict()), 0.0
        if cost is None:
            layers, head = layer_flops(shapes, lengths)
        else:
            layers, embedding, head = layer_seconds(cost, shapes, lengths, capacity=capacity)
        assert len(layers) == text_config(config).num_hidden_layers, f"costs of {len(layers)} layers"
        cuts = cut_layers(layers, chunks, first_seconds=embedding, last_seconds=head)
        sent = json.dumps([(each.start, each.stop) for each in cuts]).encode()
    return [range(*each) for each in json.loads(broadcast_bytes(world, sent if not world.rank else None))]
