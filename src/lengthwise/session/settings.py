"""Checked settings of a session; and what then plans its steps: costs, and the tokens that a rank holds."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.optim import Optimizer

from lengthwise.config import OffloadConfig
from lengthwise.core.errors import Collector, ConfigError
from lengthwise.core.plan import RECOMPUTE_KINDS
from lengthwise.core.shape import LayerCut
from lengthwise.cost import (
    DTYPE_BYTES,
    Cost,
    ModelLayout,
    StepMemory,
    hardware_of_gpu,
    memory_of,
    shape_from_config,
)
from lengthwise.cost.measured import base_cost, cost_from_measurements
from lengthwise.engine.activations import check_offload
from lengthwise.engine.norm import norm_bytes
from lengthwise.models import Computing, check_computing, check_cut, whole_model
from lengthwise.planner.service.step_planning import step_planning
from lengthwise.session.capacity import measured_of
from lengthwise.session.engine import Engine
from lengthwise.session.keywords import SessionKeywords, keyword_problems, read_keywords
from lengthwise.session.model import PRECISIONS, check_session_model
from lengthwise.session.optimizers import check_optimizer
from lengthwise.session.planning import SessionPlanning, for_whole_logits
from lengthwise.session.sharded import ShardedInPlace
from lengthwise.setup import offload_of

_STATES = 2  # an entry, of most optimizers; amsgrad and centered keep one more


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionSettings:
    """Checked settings: what was asked for, and what follows with a model.

    dtype: of the parameters. autocast: of mixed precision. capacity_tokens: None: to be measured. recompute: a kind, or
    auto. optimizer: torch's own; None: nothing trains. offloads_optimizer: masters and its states are on the host.
    device: where steps run. computing: how the model computes there.
    """

    asked: SessionKeywords
    dtype: torch.dtype
    autocast: torch.dtype | None
    capacity_tokens: int | None
    recompute: str
    optimizer: Optimizer | None
    offloads_optimizer: bool
    device: torch.device
    computing: Computing

    @property
    def offload(self) -> OffloadConfig | None:
        """The store of activations that leave the device."""
        return self.asked.offload


def check_settings(model: Any, optimizer: Any, given: Mapping[str, Any]) -> SessionSettings:
    """Return the settings of a session around `model` that trains with `optimizer`; None: it evaluates.

    given: the keywords of the session, not checked yet.

    Raises:
        ConfigError, ModelRefused, Problems: all that cannot be kept.
    """
    trains, inner, problems = optimizer is not None, None, Collector()
    for each in keyword_problems(given, trains=trains):
        problems.add(each)
    are_right = not problems.problems
    asked = read_keywords(given if are_right else {})
    recompute, offloads = asked.recompute, asked.offload_optimizer and trains
    tokens = None if asked.capacity_tokens == "auto" else asked.capacity_tokens
    where = asked.device or next(model.parameters()).device
    if are_right and where.type == "meta":
        expected, got = "the device where steps run", "a model on the meta device, without storage"
        problems.add(ConfigError("device", expected=expected, got=got, remedy="Give device, for example cuda:0."))
    kind = recompute if recompute != "auto" or tokens is None else "none"
    wrapped = kind if kind in RECOMPUTE_KINDS else "none"
    dtype = problems.attempt(partial(check_session_model, model, wrapped, trains=trains))
    if trains:
        inner = problems.attempt(partial(check_optimizer, optimizer, model, offloads=offloads))
    if asked.offload is not None:
        layers = model.config.num_hidden_layers
        problems.attempt(partial(check_offload, asked.offload, layers, on_gpus=where.type == "cuda"))
    computing = Computing.of(asked)
    if not problems.problems and dtype is not None:
        problems.attempt(
            partial(check_computing, whole_model(model).config, computing, dtype=dtype, on_gpus=where.type == "cuda")
        )
    if not problems.problems and asked.stages > 1:
        cut = LayerCut(stages=asked.stages, virtual=asked.virtual)
        problems.attempt(partial(check_cut, whole_model(model).config, cut))
    problems.raise_all()
    assert dtype is not None, "a model without one was refused"
    return SessionSettings(
        asked=asked,
        dtype=dtype,
        autocast=torch.bfloat16 if asked.precision == "bf16" else None,
        capacity_tokens=tokens,
        recompute=kind,
        optimizer=inner,
        offloads_optimizer=offloads,
        device=where,
        computing=computing,
    )


def states_an_entry(optimizer: Optimizer) -> int:
    """Count what an optimizer keeps of each entry: two by most, and what arguments ask for beside."""
    groups = optimizer.param_groups
    if isinstance(optimizer, torch.optim.SGD):
        return int(any(group.get("momentum") for group in groups))
    return _STATES + any(group.get("amsgrad") or group.get("centered") for group in groups)


def cost_of(config: Any, settings: SessionSettings) -> Cost:
    """Return the costs to plan with: those given, measured, or estimated for the device."""
    measurements = settings.asked.measurements
    if isinstance(measurements, Cost):
        return measurements
    device, precision = settings.device, PRECISIONS[settings.dtype]
    shape, on_gpus = shape_from_config(config.to_dict()), device.type == "cuda"
    if measurements is not None:
        return cost_from_measurements(
            measurements, shape, precision=precision, on_gpus=on_gpus, stages=settings.asked.stages
        )
    name = hardware_of_gpu(torch.cuda.get_device_name(device))[0] if on_gpus else "cpu"
    return base_cost(shape, name, precision=precision, stages=settings.asked.stages)


def planning_of(
    engine: Engine, sharded: ShardedInPlace | None, cost: Cost, settings: SessionSettings
) -> SessionPlanning:
    """Return what plans the steps of a session; what memory holds is measured where it is asked for. Collective."""
    asked, measured, whole = settings.asked, None, None
    if settings.capacity_tokens is not None:
        capacities = {settings.recompute: settings.capacity_tokens}
    elif sharded is None:
        found, whole = measured_of(engine, settings, kept_bytes=0, end_bytes=0, trains=False)
        capacities = {"none": max(found.plain.values())}
    else:
        kept, end = _optimizer_bytes(sharded)
        with sharded.collecting():
            measured, whole = measured_of(engine, settings, kept_bytes=kept, end_bytes=end, trains=True)
        sharded.zero_grad()
        capacities = dict(measured.plain)
    trained = 0 if sharded is None else sum(math.prod(shape) for shape in sharded.shapes.values())
    in_step = 1 if engine.parameters is None else engine.parameters.ranks_in_step
    memory = session_memory(
        engine.config,
        settings,
        ranks=engine.transport.world_size,
        shard="zero1" if in_step == 1 else "hybrid",
        ranks_per_node=in_step,
        parameters=engine.num_parameters,
        trained=trained,
        dtype_bytes=DTYPE_BYTES[PRECISIONS[settings.dtype]],
    )
    ahead = step_planning(
        memory,
        cost,
        capacities,
        measured=measured,
        offload=offload_of(settings.offload),
        planner=asked.planner,
        heads=asked.heads,
    )
    return SessionPlanning(chunked=ahead, whole=ahead if whole is None else for_whole_logits(ahead, whole))


def session_memory(
    config: Any,
    settings: SessionSettings,
    *,
    ranks: int,
    parameters: int,
    trained: int,
    dtype_bytes: int,
    shard: str = "zero1",
    ranks_per_node: int | None = None,
    chunked: bool = True,
) -> StepMemory:
    """Return what a step of a session holds.

    ranks: in all. shard, ranks_per_node: as of `ModelLayout`. parameters, trained: of the model, by its config.
    chunked: whether a loss makes logits in chunks.
    """
    layout = ModelLayout(
        ranks=ranks // settings.asked.stages,
        cut=LayerCut(stages=settings.asked.stages, virtual=settings.asked.virtual),
        shard=shard,
        ranks_per_node=ranks_per_node,
        parameters=parameters,
        trained=trained if trained < parameters else None,
        states=0 if settings.optimizer is None else states_an_entry(settings.optimizer),
        offloads=settings.offloads_optimizer,
        ties=bool(getattr(config, "tie_word_embeddings", False)),
    )
    on_gpus, shape = settings.device.type == "cuda", shape_from_config(config.to_dict())
    return memory_of(shape, layout, dtype_bytes=dtype_bytes, on_gpus=on_gpus, chunked=chunked)


def _optimizer_bytes(sharded: ShardedInPlace) -> tuple[int, int]:
    """Count the bytes of states that an optimizer has yet to make, and those that a step's end needs for a while."""
    parameters, optimizer = sharded.parameters, sharded.optimizer
    part = parameters.grad_shard.nbytes
    if sharded.offloads and parameters.grad_shard.is_cuda:
        return 0, max(norm_bytes(parameters.grad_shard), parameters.publish_bytes())
    return (0 if optimizer.state else states_an_entry(optimizer) * part), max(2 * part, parameters.publish_bytes())
