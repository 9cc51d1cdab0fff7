"""What a session is asked for, checked; and what then plans its steps: costs, and the tokens that a rank holds."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lengthwise.comm import Transport
from lengthwise.config import OffloadConfig
from lengthwise.config.problems import find_problems
from lengthwise.core.errors import Collector, ConfigError
from lengthwise.core.plan import RECOMPUTE_KINDS
from lengthwise.core.sizes import parse_tokens, read_whole
from lengthwise.cost import (
    DTYPE_BYTES,
    ZERO3_ALONE,
    Cost,
    StepMemory,
    check_host,
    choose_shard,
    hardware_of_gpu,
    offloaded_cost,
    ranks_of_node,
    shape_from_config,
    sharded_cost,
    wanted_tokens,
)
from lengthwise.cost.measured import base_cost, cost_from_measurements
from lengthwise.engine.activations import check_offload
from lengthwise.engine.memory import free_bytes
from lengthwise.engine.norm import norm_bytes
from lengthwise.models import check_cut
from lengthwise.planner import PlanOptions
from lengthwise.planner.service.rank_memory import Capacities
from lengthwise.planner.service.step_planning import StepPlanning
from lengthwise.session.capacity import kinds_of, least, measured_of
from lengthwise.session.engine import Engine
from lengthwise.session.misuse import check_kinds
from lengthwise.session.model import PRECISIONS, check_session_model
from lengthwise.session.sharded import ShardedInPlace, check_optimizer
from lengthwise.session.stages import not_with_stages

SHARDS = ("auto", "zero1", "zero3", "hybrid")
LOCK_STEP_PLANNER = "lengthwise"
_BESIDE_STAGES = ("shard", "capacity_tokens", "ranks_per_node")
_STATES = 2  # an entry, of most optimizers; amsgrad and centered keep one more


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionRequest:
    """What a session is asked for, in the words of `Session`; not checked yet."""

    capacity_tokens: int | str
    shard: str
    ranks_per_node: int | None
    stages: int
    virtual: int
    recompute: str
    heads: int | str
    offload: Mapping[str, Any] | None
    offload_optimizer: bool
    planner: str
    measurements: str | Path | Cost | None
    precision: str | None
    device: torch.device | str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionSettings:
    """Checked settings: what was asked for, and what was read of it.

    dtype: of the parameters. autocast: of mixed precision. capacity_tokens: None: to be measured. recompute: a kind, or
    auto. offload: of activations. optimizer: torch's own; None: nothing trains. offloads_optimizer: masters and its
    states are on the host. device: where steps run.
    """

    asked: SessionRequest
    dtype: torch.dtype
    autocast: torch.dtype | None
    capacity_tokens: int | None
    recompute: str
    offload: OffloadConfig | None
    optimizer: Optimizer | None
    offloads_optimizer: bool
    device: torch.device


def check_settings(model: Any, optimizer: Any, asked: SessionRequest) -> SessionSettings:
    """Return the settings of a session around `model` that trains with `optimizer`; None: it evaluates.

    Raises:
        ConfigError, ModelRefused, Problems: all that cannot be kept.
    """
    names = ("ranks_per_node", "heads", "planner", "measurements", "device")
    check_kinds(**{name: getattr(asked, name) for name in names})
    shard, planner, recompute, heads = asked.shard, asked.planner, asked.recompute, asked.heads
    offload, precision, ranks_per_node = asked.offload, asked.precision, asked.ranks_per_node
    trains, offloads, inner = optimizer is not None, asked.offload_optimizer and optimizer is not None, None
    problems, is_measured = Collector(), asked.capacity_tokens == "auto"

    def refuse(key: str, expected: str, got: object, remedy: str = "Take one of them.") -> None:
        problems.add(ConfigError(key, expected=expected, got=f"{got!r}", remedy=remedy))

    tokens = None if is_measured else problems.attempt(partial(_tokens, asked.capacity_tokens))
    if precision not in (None, "bf16"):
        remedy = "For another dtype, convert the model; fp16 is not supported, because it needs a loss scale."
        refuse("precision", "None or bf16", precision, remedy)
    if recompute not in ("auto", *RECOMPUTE_KINDS):
        refuse("recompute", " or ".join(("auto", *RECOMPUTE_KINDS)), recompute)
    if not isinstance(asked.offload_optimizer, bool):
        refuse("offload_optimizer", "True or False", asked.offload_optimizer, "Correct it.")
    if heads not in ("auto", "off") and (isinstance(heads, str | bool) or heads < 1):
        refuse("heads", "auto, off, or ranks of a group", heads)
    if offload is not None and not isinstance(offload, Mapping):
        refuse("offload", "a mapping, as in a run file", offload, 'Write for example {"store": "host"}.')
        offload = None
    if shard not in SHARDS:
        refuse("shard", " or ".join(SHARDS), shard)
    if ranks_per_node is not None and (shard in ("zero1", "zero3") or ranks_per_node < 1):
        remedy = "Take it out, or give shard='hybrid'."
        refuse("ranks_per_node", f"1 or more, beside shard hybrid or auto, not {shard}", ranks_per_node, remedy)
    if shard in ("zero3", "hybrid") and planner != LOCK_STEP_PLANNER:
        expected = f"{LOCK_STEP_PLANNER} under shard {shard}, the only one that plans in lock-step"
        refuse("planner", expected, planner, "Take planner out.")
    beside = {name: getattr(asked, name) for name in _BESIDE_STAGES}
    for each in not_with_stages(asked.stages, asked.virtual, beside, trains=trains):
        problems.add(each)
    where = next(model.parameters()).device if asked.device is None else torch.device(asked.device)
    if where.type == "meta":
        expected, got = "the device where steps run", "a model on the meta device, without storage"
        problems.add(ConfigError("device", expected=expected, got=got, remedy="Give device, for example cuda:0."))
    kind = recompute if recompute != "auto" or is_measured else "none"
    wrapped = kind if kind in RECOMPUTE_KINDS else "none"
    dtype = problems.attempt(partial(check_session_model, model, wrapped, trains=trains))
    if trains:
        inner = problems.attempt(partial(check_optimizer, optimizer, model, offloads=offloads))
    section = problems.attempt(partial(_offload_of, model, offload, where))
    if not problems.problems and asked.stages > 1:
        problems.attempt(partial(check_cut, model.config, asked.stages, asked.virtual))
    problems.raise_all()
    assert dtype is not None, "a model without one was refused"
    return SessionSettings(
        asked=asked,
        dtype=dtype,
        autocast=torch.bfloat16 if precision == "bf16" else None,
        capacity_tokens=tokens,
        recompute=kind,
        offload=section,
        optimizer=inner,
        offloads_optimizer=offloads,
        device=where,
    )


def _tokens(given: int | str) -> int:
    """Read capacity_tokens as run files have it: a number, or a text as 16K."""
    where = "capacity_tokens"
    return parse_tokens(given, where) if isinstance(given, str) else read_whole(where, given)


def shard_of(model: nn.Module, transport: Transport, settings: SessionSettings, *, local_ranks: int) -> tuple[str, int]:
    """Return how the parameters of a model lie over the ranks, and how many neighbouring ranks share them. Collective.

    As asked for, or as what is free allows. What model and optimizer hold already counts as free: it moves. Rank 0 says
    why, where parameters are cut. local_ranks: of this machine, which are a node where nothing else was asked for.

    Raises:
        ConfigError: nodes do not divide the ranks.
        MemoryShortage: the model fits in no way.
    """
    ranks, shard = transport.world_size, settings.asked.shard
    least_here, most_here = least(transport, [local_ranks, -local_ranks])  # the same on all ranks, or no node
    here = int(least_here) if least_here == -most_here else ranks
    node = ranks_of_node(settings.asked.ranks_per_node, here, ranks, is_asked=shard == "hybrid")
    within = {"zero1": 1, "zero3": ranks, "hybrid": node or ranks}
    if shard == "auto" and ranks > 1:
        shard = _chosen(model, transport, settings, _memory(model, settings, ranks, node))
    if ranks == 1:
        if shard == "zero3":
            print(f"lengthwise: {ZERO3_ALONE}", flush=True)
        return "zero1", 1
    if shard == "hybrid" and node == ranks:
        if not transport.rank:
            print("lengthwise: shard hybrid: all ranks are on one node, where it is zero3", flush=True)
        shard = "zero3"
    return shard, within[shard]


def check_host_optimizer(model: nn.Module, transport: Transport, settings: SessionSettings, local_ranks: int) -> None:
    """Refuse an offloaded optimizer that is more than hosts have free; rank 0 says where it saves nothing. Collective.

    local_ranks: of this machine.

    Raises:
        MemoryShortage: it is more.
    """
    if settings.offloads_optimizer and settings.device.type == "cuda":
        free, fewest = least(transport, [free_bytes(torch.device("cpu"), 1), -local_ranks])
        memory = _memory(model, settings, transport.world_size)
        check_host(memory, int(-fewest), free, key="offload_optimizer")
    elif settings.offloads_optimizer and not transport.rank:
        print("lengthwise: offload_optimizer saves no memory without GPUs", flush=True)


def _memory(model: nn.Module, settings: SessionSettings, ranks: int, node: int | None = None) -> StepMemory:
    """Return what a step of the model holds, under zero1."""
    config: Any = model.config
    parameters, optimizer = list(model.parameters()), settings.optimizer
    widths = Counter[int]()
    for parameter in parameters:
        widths[parameter.element_size()] += parameter.numel()
    count = sum(widths.values())
    trained = 0 if optimizer is None else sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
    return StepMemory(
        shape=shape_from_config(config.to_dict()),
        dtype_bytes=widths.most_common(1)[0][0],
        parameters=count,
        trained=None if trained == count else trained,
        ranks=ranks,
        ranks_per_node=node,
        states=0 if optimizer is None else states_an_entry(optimizer),
        offloads=settings.offloads_optimizer and settings.device.type == "cuda",
        ties=bool(getattr(config, "tie_word_embeddings", False)),
    )


def _chosen(model: nn.Module, transport: Transport, settings: SessionSettings, memory: StepMemory) -> str:
    """Return the layout that what is free allows, and say why. Collective."""
    device, planner, optimizer = settings.device, settings.asked.planner, settings.optimizer
    states = () if optimizer is None else optimizer.state.values()
    held = [*model.parameters(), *(each for part in states for each in part.values())]
    own = sum(each.nbytes for each in held if isinstance(each, Tensor) and each.device.type == device.type)
    (free,) = least(transport, [free_bytes(device, transport.device_ranks) + own])
    choice = choose_shard(
        memory,
        free or None,
        tokens=settings.capacity_tokens or wanted_tokens(transport.world_size),
        kinds=kinds_of(model.config, settings.recompute),
        offload=0.0 if settings.offload is None else 1.0,
        keeps_whole=None if planner == LOCK_STEP_PLANNER else f"planner {planner}",
        can_offload=optimizer is not None and device.type == "cuda",
    )
    if choice.shard != "zero1" and not transport.rank:
        print(f"lengthwise: shard {choice.shard}: {choice.why}", flush=True)
    return choice.shard


def states_an_entry(optimizer: Optimizer) -> int:
    """Count what an optimizer keeps of each entry: two by most, and what arguments ask for beside."""
    groups = optimizer.param_groups
    if isinstance(optimizer, torch.optim.SGD):
        return int(any(group.get("momentum") for group in groups))
    return _STATES + any(group.get("amsgrad") or group.get("centered") for group in groups)


def _offload_of(model: nn.Module, offload: Mapping[str, Any] | None, device: torch.device) -> OffloadConfig | None:
    if offload is None:
        return None
    values = dict(offload)
    if isinstance(values.get("path"), str | Path):
        values["path"] = Path(values["path"]).absolute()
    found = Collector()
    for each in find_problems({"offload": values}):
        if each.where.startswith("offload"):
            found.add(each)
    found.raise_all()
    section = OffloadConfig.model_validate(values)
    config: Any = model.config
    check_offload(section, config.num_hidden_layers, on_gpus=device.type == "cuda")
    return section


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


def planning_of(engine: Engine, sharded: ShardedInPlace | None, cost: Cost, settings: SessionSettings) -> StepPlanning:
    """Return what plans the steps of a session; what memory holds is measured where it is asked for. Collective."""
    asked, measured = settings.asked, None
    how: dict[str, Any] = {"recompute": settings.recompute, "heads": asked.heads, "offload": settings.offload}
    if settings.capacity_tokens is not None:
        capacities = {settings.recompute: settings.capacity_tokens}
    elif sharded is None:
        found = measured_of(engine, kept_bytes=0, end_bytes=0, trains=False, **how)
        capacities = {"none": max(found.plain.values())}
    else:
        kept, end = _optimizer_bytes(sharded)
        measured = measured_of(engine, kept_bytes=kept, end_bytes=end, trains=True, **how)
        sharded.parameters.clear_gradients()
        capacities = dict(measured.plain)
    trained = 0 if sharded is None else sum(math.prod(shape) for shape in sharded.shapes.values())
    return step_planning(
        cost,
        engine.config,
        capacities,
        ranks=engine.transport.world_size,
        in_step=1 if engine.parameters is None else engine.parameters.ranks_in_step,
        dtype_bytes=DTYPE_BYTES[PRECISIONS[settings.dtype]],
        offload=settings.offload,
        measured=measured,
        planner=asked.planner,
        heads=asked.heads,
        parameters=engine.num_parameters,
        trained=trained if trained < engine.num_parameters else None,
        stages=asked.stages,
        offloaded_states=states_an_entry(settings.optimizer)
        if settings.offloads_optimizer and settings.optimizer is not None and settings.device.type == "cuda"
        else None,
        **({"mode": "pipeline", "virtual": asked.virtual} if asked.stages > 1 else {}),
    )


def step_planning(
    cost: Cost,
    model: Any,
    capacities: Mapping[str, int],
    *,
    ranks: int,
    in_step: int,
    dtype_bytes: int,
    offload: OffloadConfig | None,
    measured: Capacities | None,
    parameters: int | None = None,
    trained: int | None = None,
    stages: int = 1,
    offloaded_states: int | None = None,
    **options: Any,
) -> StepPlanning:
    """Return what plans the steps of a model, by its config, on so many ranks.

    in_step: neighbouring ranks that share parameters, and so run in lock-step. parameters: in all; None: by the shape,
    without norms and routers. trained: of these; None: all. offloaded_states: that an optimizer on the host keeps of an
    entry; None: it is not there. options: of `PlanOptions`.
    """
    ratio = offload.ratio if offload else "off"
    memory = StepMemory(
        shape=shape_from_config(model.to_dict()),
        dtype_bytes=dtype_bytes,
        parameters=parameters,
        ranks=ranks // stages,
        stages=stages,
        trained=trained,
        states=offloaded_states or 0,
        offloads=offloaded_states is not None,
        ties=bool(getattr(model, "tie_word_embeddings", False)),
    )
    if in_step > 1:
        cost = sharded_cost(cost, memory, group=in_step)
    cost = offloaded_cost(cost, memory)
    kinds = {"mode": "waves" if in_step > 1 else "free", "offload": ratio if isinstance(ratio, str) else "off"}
    return StepPlanning(
        ranks=ranks // stages,
        cost=cost,
        capacities=capacities,
        measured=measured,
        options=PlanOptions(
            **{"layers": model.num_hidden_layers, "stages": stages if stages > 1 else None, **kinds, **options}
        ),
        offload_ratio=None if isinstance(ratio, str) else ratio,
    )


def _optimizer_bytes(sharded: ShardedInPlace) -> tuple[int, int]:
    """Count the bytes of states that an optimizer has yet to make, and those that a step's end needs for a while."""
    parameters, optimizer = sharded.parameters, sharded.optimizer
    part = parameters.grad_shard.nbytes
    if sharded.offloads and parameters.grad_shard.is_cuda:
        return 0, max(norm_bytes(parameters.grad_shard), parameters.publish_bytes())
    return (0 if optimizer.state else states_an_entry(optimizer) * part), max(2 * part, parameters.publish_bytes())
