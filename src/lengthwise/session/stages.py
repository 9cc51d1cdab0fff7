"""A session in stages of a pipeline: its part of the model, and the states of all stages."""

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
from lengthwise.engine.gathering import gather_to_first
from lengthwise.models import text_config
from lengthwise.program.stage_program import cut_layers
from lengthwise.session.engine import Engine
from lengthwise.session.loop_optimizer import LoopOptimizer
from lengthwise.session.state_dict import GROUPS, STATE, whole_state


def check_replicas(ranks: int, stages: int) -> None:
    """Refuse ranks that are no whole number of replicas."""
    if ranks % stages:
        expected = f"a multiple of the {stages} stages"
        raise ConfigError("ranks", expected=expected, got=str(ranks), remedy="Start others, or change stages.")


def join_stages(model: nn.Module, transport: Transport, stages: int, *, reads: bool) -> Mesh:
    """Return the mesh of stages and replicas. Collective. reads: every stage reads its values later.

    Raises:
        ConfigError: the ranks are no whole number of replicas, or a stage of the first one has no values, or others.
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
        expected = "the same values on the stages of the first replica, which each give those of their layers"
        remedy = "Load the same weights there, or call torch.manual_seed before the model is made."
        raise ConfigError("model", expected=expected, got="models that differ", remedy=remedy)
    return mesh


def cut_stages(
    world: Transport, config: Any, chunks: int, lengths: Sequence[int], *, capacity: int, cost: Cost | None
) -> list[range]:
    """Cut the layers of a model by the seconds that costs say, None: by FLOPs; as rank 0 does. Collective.

    lengths: of sequences as they are trained on. capacity: tokens of a microbatch.
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

    device: through which they travel, one at a time; they lie on the host.
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


def whole_states(updates: LoopOptimizer, engine: Engine) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return on rank 0 the optimizer's state, as `whole_state` does, and the weights by name; {} on others. Collective.

    Of all stages, where there are some.
    """
    parameters, pipeline = updates.parameters, engine.pipeline
    over = engine.transport if pipeline is None else pipeline.mesh.replicas
    state, weights = whole_state(updates, over), gather_to_first(parameters, parameters.master_weights, over)
    if pipeline is None:
        return state, weights
    return _state_of_stages(pipeline.mesh, state, engine.device), _from_stages(pipeline.mesh, weights, engine.device)


def _state_of_stages(mesh: Mesh, state: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """Return on rank 0 the states of all stages in one, each as `whole_state` returns it. Collective."""
    own = {json.dumps([n, key]): each for n, keys in state.get(STATE, {}).items() for key, each in keys.items()}
    found: dict[int, dict[str, Tensor]] = {}
    for name, each in _from_stages(mesh, own, device).items():
        number, key = json.loads(name)
        found.setdefault(number, {})[key] = each
    return {} if mesh.world.rank else {STATE: found, GROUPS: state[GROUPS]}
