"""What a session is asked for, checked; and what then plans its steps: costs, and the tokens that a rank holds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
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
    choose_shard,
    hardware_of_gpu,
    ranks_of_node,
    shape_from_config,
    sharded_cost,
    wanted_tokens,
)
from lengthwise.cost.measured import base_cost, cost_from_measurements
from lengthwise.engine.activations import check_offload
from lengthwise.engine.memory import free_bytes
from lengthwise.models import check_cut
from lengthwise.planner import PlanOptions
from lengthwise.planner.service.rank_memory import Capacities
from lengthwise.planner.service.step_planning import StepPlanning
from lengthwise.session.capacity import kinds_of, least, measuring_of
from lengthwise.session.engine import Engine
from lengthwise.session.model import PRECISIONS, check_session_model
from lengthwise.session.runner import StepResult
from lengthwise.session.sharded import ShardedInPlace
from lengthwise.session.stages import not_with_stages

SHARDS = ("auto", "zero1", "zero3", "hybrid")
LOCK_STEP_PLANNER = "lengthwise"
_MOST_TOKENS = 2**22  # of a batch, as which memory is measured: what a loop will give is not known yet
_STATES = 2  # an entry, of most optimizers; amsgrad and centered keep one more


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionSettings:
    """Checked settings.

    dtype: of the parameters. autocast: of mixed precision. capacity_tokens: None: to be measured. recompute: a kind, or
    auto. heads, planner, offload: as in a run file. shard, ranks_per_node: how parameters lie over the ranks, as it was
    asked for. stages, virtual: of a pipeline.
    device: where steps run.
    """

    dtype: torch.dtype
    autocast: torch.dtype | None
    capacity_tokens: int | None
    recompute: str
    heads: int | str
    planner: str
    offload: OffloadConfig | None
    shard: str
    ranks_per_node: int | None
    device: torch.device
    stages: int = 1
    virtual: int = 1


def check_settings(
    model: Any,
    *,
    capacity_tokens: int | str,
    recompute: str,
    heads: int | str,
    offload: Mapping[str, Any] | None,
    precision: str | None,
    shard: str,
    ranks_per_node: int | None,
    planner: str,
    device: torch.device | str | None,
    trains: bool,
    stages: int = 1,
    virtual: int = 1,
) -> SessionSettings:
    """Return the settings of a session around `model`.

    Raises:
        ConfigError, ModelRefused, Problems: all that cannot be kept.
    """
    problems, is_measured = Collector(), capacity_tokens == "auto"

    def refuse(key: str, expected: str, got: object, remedy: str = "Take one of them.") -> None:
        problems.add(ConfigError(key, expected=expected, got=f"{got!r}", remedy=remedy))

    tokens = None if is_measured else problems.attempt(partial(_tokens, capacity_tokens))
    if precision not in (None, "bf16"):
        remedy = "For another dtype, convert the model; fp16 is not supported, because it needs a loss scale."
        refuse("precision", "None or bf16", precision, remedy)
    if recompute not in ("auto", *RECOMPUTE_KINDS):
        refuse("recompute", " or ".join(("auto", *RECOMPUTE_KINDS)), recompute)
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
    beside = {"shard": shard, "capacity_tokens": capacity_tokens}
    for each in not_with_stages(stages, virtual, {**beside, "ranks_per_node": ranks_per_node}, trains=trains):
        problems.add(each)
    where = next(model.parameters()).device if device is None else torch.device(device)
    if where.type == "meta":
        expected, got = "the device where steps run", "a model on the meta device, without storage"
        problems.add(ConfigError("device", expected=expected, got=got, remedy="Give device, for example cuda:0."))
    kind = recompute if recompute != "auto" or is_measured else "none"
    wrapped = kind if kind in RECOMPUTE_KINDS else "none"
    dtype = problems.attempt(partial(check_session_model, model, wrapped, trains=trains))
    section = problems.attempt(partial(_offload_of, model, offload, where))
    if not problems.problems and stages > 1:
        problems.attempt(partial(check_cut, model.config, stages, virtual))
    problems.raise_all()
    assert dtype is not None, "a model without one was refused"
    return SessionSettings(
        dtype=dtype,
        autocast=torch.bfloat16 if precision == "bf16" else None,
        capacity_tokens=tokens,
        recompute=kind,
        heads=heads,
        planner=planner,
        offload=section,
        shard=shard,
        ranks_per_node=ranks_per_node,
        device=where,
        stages=stages,
        virtual=virtual,
    )


def _tokens(given: int | str) -> int:
    """Read capacity_tokens as run files have it: a number, or a text as 16K."""
    where = "capacity_tokens"
    return parse_tokens(given, where) if isinstance(given, str) else read_whole(where, given)


def shard_of(
    model: nn.Module, optimizer: Optimizer | None, transport: Transport, settings: SessionSettings, *, local_ranks: int
) -> tuple[str, int]:
    """Return how the parameters of a model lie over the ranks, and how many neighbouring ranks share them. Collective.

    As asked for, or as what is free allows. What model and optimizer hold already counts as free: it moves. Rank 0 says
    why, where parameters are cut. local_ranks: of this machine, which are a node where nothing else was asked for.

    Raises:
        ConfigError: nodes do not divide the ranks.
        MemoryShortage: the model fits in no way.
    """
    ranks, is_asked = transport.world_size, settings.shard == "hybrid"
    least_here, most_here = least(transport, [local_ranks, -local_ranks])  # the same on all ranks, or no node
    here = int(least_here) if least_here == -most_here else ranks
    node = ranks_of_node(settings.ranks_per_node, here, ranks, is_asked=is_asked)
    within = {"zero1": 1, "zero3": ranks, "hybrid": node or ranks}
    shard = settings.shard
    if shard == "auto" and ranks > 1:
        shard = _chosen(model, optimizer, transport, settings, node)
    if ranks == 1:
        if shard == "zero3":
            print(f"lengthwise: {ZERO3_ALONE}", flush=True)
        return "zero1", 1
    if shard == "hybrid" and node == ranks:
        if not transport.rank:
            print("lengthwise: shard hybrid: all ranks are on one node, where it is zero3", flush=True)
        shard = "zero3"
    return shard, within[shard]


def _chosen(
    model: nn.Module, optimizer: Optimizer | None, transport: Transport, settings: SessionSettings, node: int | None
) -> str:
    """Return the layout that what is free allows, and say why. Collective."""
    config: Any = model.config
    parameters, device = list(model.parameters()), settings.device
    held = [*parameters, *(each for part in (optimizer.state.values() if optimizer else ()) for each in part.values())]
    own = sum(each.nbytes for each in held if isinstance(each, Tensor) and each.device.type == device.type)
    widths = Counter[int]()
    for parameter in parameters:
        widths[parameter.element_size()] += parameter.numel()
    count = sum(widths.values())
    trained = 0 if optimizer is None else sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
    memory = StepMemory(
        shape=shape_from_config(config.to_dict()),
        dtype_bytes=widths.most_common(1)[0][0],
        parameters=count,
        trained=None if trained == count else trained,
        ranks=transport.world_size,
        ranks_per_node=node,
        states=0 if optimizer is None else states_an_entry(optimizer),
        ties=bool(getattr(config, "tie_word_embeddings", False)),
    )
    (free,) = least(transport, [free_bytes(device, transport.device_ranks) + own])
    choice = choose_shard(
        memory,
        free or None,
        tokens=settings.capacity_tokens or wanted_tokens(transport.world_size),
        kinds=kinds_of(config, settings.recompute),
        offload=0.0 if settings.offload is None else 1.0,
        keeps_whole=None if settings.planner == LOCK_STEP_PLANNER else f"planner {settings.planner}",
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


def cost_of(config: Any, settings: SessionSettings, measurements: str | Path | Cost | None) -> Cost:
    """Return the costs to plan with: those given, measured, or estimated for the device."""
    if isinstance(measurements, Cost):
        return measurements
    device, precision = settings.device, PRECISIONS[settings.dtype]
    shape, on_gpus = shape_from_config(config.to_dict()), device.type == "cuda"
    if measurements is not None:
        return cost_from_measurements(measurements, shape, precision=precision, on_gpus=on_gpus, stages=settings.stages)
    name = hardware_of_gpu(torch.cuda.get_device_name(device))[0] if on_gpus else "cpu"
    return base_cost(shape, name, precision=precision, stages=settings.stages)


def planning_of(engine: Engine, sharded: ShardedInPlace | None, cost: Cost, settings: SessionSettings) -> StepPlanning:
    """Return what plans the steps of a session; what memory holds is measured where it is asked for. Collective."""
    measured = None
    if settings.capacity_tokens is not None:
        capacities = {settings.recompute: settings.capacity_tokens}
    elif sharded is None:
        found = _measured(engine, settings, kept_bytes=0, end_bytes=0, trains=False)
        capacities = {"none": max(found.plain.values())}
    else:
        kept, end = _optimizer_bytes(sharded)
        measured = _measured(engine, settings, kept_bytes=kept, end_bytes=end, trains=True)
        sharded.parameters.clear_gradients()
        capacities = dict(measured.plain)
    return step_planning(
        cost,
        engine.config,
        capacities,
        ranks=engine.transport.world_size,
        in_step=1 if engine.parameters is None else engine.parameters.ranks_in_step,
        dtype_bytes=DTYPE_BYTES[PRECISIONS[settings.dtype]],
        offload=settings.offload,
        measured=measured,
        planner=settings.planner,
        heads=settings.heads,
        stages=settings.stages,
        **({"mode": "pipeline", "virtual": settings.virtual} if settings.stages > 1 else {}),
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
    trained: int | None = None,
    stages: int = 1,
    **options: Any,
) -> StepPlanning:
    """Return what plans the steps of a model, by its config, on so many ranks.

    in_step: neighbouring ranks that share parameters, and so run in lock-step. options: of `PlanOptions`.
    """
    ratio = offload.ratio if offload else "off"
    if in_step > 1:
        shape = shape_from_config(model.to_dict())
        ties = bool(getattr(model, "tie_word_embeddings", False))
        memory = StepMemory(shape=shape, dtype_bytes=dtype_bytes, ranks=ranks, trained=trained, ties=ties)
        cost = sharded_cost(cost, memory, group=in_step)
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


def _measured(
    engine: Engine, settings: SessionSettings, *, kept_bytes: float, end_bytes: float, trains: bool
) -> Capacities:
    """Measure what a rank holds. Collective.

    A model that does not train holds less than with all layers computed again, and is measured so.
    """
    offload, kinds = settings.offload if trains else None, kinds_of(engine.config, settings.recompute)
    ratio = offload.ratio if offload else "off"
    engine.transport.phase = "start, measuring what fits into memory"
    measuring = measuring_of(
        engine,
        kinds=kinds if trains else ["layer" if "layer" in kinds else kinds[0]],
        heads=settings.heads,
        most_tokens=_MOST_TOKENS,
        offload=offload,
        kept_bytes=kept_bytes,
        end_bytes=end_bytes,
    )
    with (
        engine.attending(),
        torch.autocast(engine.device.type, enabled=False),
        _in_training(engine.model),
        nullcontext() if trains else _embedding_alone_trains(engine.model),
    ):
        return measuring.capacities(ratio=ratio if isinstance(ratio, float) else None)


@contextmanager
def _in_training(model: nn.Module) -> Iterator[None]:
    """Put a model into training mode inside the block: in no other are layers computed again, and entries dropped."""
    before = [(module, module.training) for module in model.modules()]
    model.train()
    try:
        yield
    finally:
        for module, training in before:
            module.training = training


@contextmanager
def _embedding_alone_trains(model: Any) -> Iterator[None]:
    """Let backward reach all layers of a model that nobody trains, with one gradient that is there before."""
    before = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    embedding = model.get_input_embeddings().weight
    for parameter, _ in before:
        parameter.requires_grad_(parameter is embedding)
    embedding.grad = torch.zeros_like(embedding)
    try:
        yield
    finally:
        embedding.grad = None
        for parameter, trains in before:
            parameter.requires_grad_(trains)


def _optimizer_bytes(sharded: ShardedInPlace) -> tuple[int, int]:
    """Count the bytes of states that an optimizer has yet to make, and those that a step's end needs for a while."""
    parameters, optimizer = sharded.parameters, sharded.optimizer
    part = parameters.master_weights.nbytes
    return (0 if optimizer.state else states_an_entry(optimizer) * part), max(2 * part, parameters.publish_bytes())


def first_step_sentence(step: StepResult, planning: StepPlanning) -> str:
    """Say what the plan of a first step was."""
    plan = step.plan
    held = " or ".join(f"{tokens:,}" for tokens in sorted(set(planning.capacities.values())))
    predicted = float(plan.notes["predicted_seconds"])
    return (
        f"lengthwise: a rank holds {held} tokens; step 1 on {plan.ranks} ranks: {step.ring_token_ratio:.0%} of tokens "
        f"in rings, {step.idle_ratio:.0%} idle, {predicted:.3g} s predicted (without its end), "
        f"{step.step_seconds:.3g} s taken"
    )
