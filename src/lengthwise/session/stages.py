"""Stages of a pipeline in a session: which layers a stage takes, and the states of all stages on rank 0."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lengthwise.comm import Mesh, Transport, broadcast_bytes, share_numbers
from lengthwise.core.errors import ConfigError
from lengthwise.cost import Cost, layer_shapes
from lengthwise.cost.analytic import layer_flops, layer_seconds
from lengthwise.engine.optimizer import SlicedOptimizer
from lengthwise.models import text_config
from lengthwise.program.stage_program import cut_layers
from lengthwise.session.engine import Engine
from lengthwise.session.state_dict import GROUPS, STATE, gather_to_first, whole_state


def check_replicas(ranks: int, stages: int) -> None:
    """Refuse a number of ranks that is not a multiple of the stages."""
    if ranks % stages:
        expected = f"a multiple of the {stages} stages"
        raise ConfigError("ranks", expected=expected, got=str(ranks), remedy="Change the number of ranks, or stages.")


def join_stages(model: nn.Module, transport: Transport, stages: int, *, reads: bool) -> Mesh:
    """Return the mesh of stages and replicas. Collective.

    reads: True if every stage reads its values later; if not, the ranks of the first replica must have the same values.

    Raises:
        ConfigError: the ranks are not a multiple of the stages, or a rank of the first replica has no or other values.
    """
    check_replicas(transport.world_size, stages)
    mesh = Mesh(transport, stages)
    if reads:
        return mesh
    is_empty = mesh.replica == 0 and any(parameter.is_meta for parameter in model.parameters())
    if share_numbers(transport, [float(is_empty)]).any():
        expected = f"a model with values on ranks 0 to {stages - 1}, the stages of the first replica"
        raise ConfigError("model", expected=expected, got="one on the meta device", remedy="Load it there.")
    sizes = [
        0.0 if mesh.replica else float(parameter.detach().double().abs().sum()) for parameter in model.parameters()
    ]
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


def _from_stages(mesh: Mesh, own: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """Return on rank 0 the tensors of all stages of the first replica, by name; {} on other ranks. Collective.

    They lie on the host and are sent through `device`, one at a time.
    """
    world, found = mesh.world, dict(own)
    known = [[name, tuple(each.shape), str(each.dtype).removeprefix("torch.")] for name, each in own.items()]
    sent = [
        json.loads(broadcast_bytes(world, json.dumps(known).encode() if world.rank == stage else None, source=stage))
        for stage in range(mesh.stages)  # these ranks are the stages of replica 0
    ]
    for stage in range(1, mesh.stages):
        for name, shape, dtype in sent[stage]:
            if world.rank == stage:
                mesh.between.exchange([(own[name].to(device).contiguous(), 0)], []).wait()
            elif not world.rank:
                arriving = torch.empty(shape, dtype=getattr(torch, dtype), device=device)
                mesh.between.exchange([], [(arriving, stage)]).wait()
                found[name] = arriving.cpu()
    return {} if world.rank else found


def whole_states(updates: SlicedOptimizer, engine: Engine) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return on rank 0 the optimizer's state, as `whole_state` does, and the weights by name; {} on others. Collective.

    A pipeline's states are joined from all stages.
    """
    parameters, pipeline = updates.parameters, engine.pipeline
    over = engine.transport if pipeline is None else pipeline.mesh.replicas
    state, weights = whole_state(updates, over), gather_to_first(parameters, parameters.master_weights, over)
    if pipeline is None:
        return state, weights
    return _state_of_stages(pipeline.mesh, state, engine.device), _from_stages(pipeline.mesh, weights, engine.device)


def _state_of_stages(mesh: Mesh, state: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """Join the states of all stages, which `whole_state` returned, on rank 0. Collective."""
    own = {json.dumps([n, key]): each for n, keys in state.get(STATE, {}).items() for key, each in keys.items()}
    found: dict[int, dict[str, Tensor]] = {}
    for name, each in _from_stages(mesh, own, device).items():
        number, key = json.loads(name)
        found.setdefault(number, {})[key] = each
    return {} if mesh.world.rank else {STATE: found, GROUPS: state[GROUPS]}
