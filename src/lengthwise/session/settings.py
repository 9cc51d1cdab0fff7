"""Checked settings of a session, for a user's loop or a run file, and the planning that follows from them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from lengthwise.config import OffloadConfig, TrainingSettings
from lengthwise.core.errors import Collector, ConfigError
from lengthwise.core.plan import RECOMPUTE_KINDS
from lengthwise.cost import Cost, hardware_of_gpu, shape_from_config
from lengthwise.cost.measured import base_cost, cost_from_measurements
from lengthwise.engine.offloading import check_offload
from lengthwise.engine.optimizer import SlicedOptimizer
from lengthwise.engine.whole_optimizer import states_an_entry
from lengthwise.models import Computing, check_computing, check_cut, has_own_logits, whole_model
from lengthwise.planner.service.step_planning import step_planning
from lengthwise.session.engine import Engine
from lengthwise.session.keywords import keyword_problems, read_keywords
from lengthwise.session.model import PRECISIONS, can_share_prefixes, check_session_model
from lengthwise.session.optimizers import check_optimizer
from lengthwise.session.planning import SessionPlanning, for_whole_logits
from lengthwise.session.room import kinds_of, measured_of
from lengthwise.setup import TrainedModel, memory_of_settings, offload_of

_MOST_TOKENS = 2**22  # assumed tokens of a loop's batch when memory is measured, before any batch is known


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionSettings:
    """Checked settings: those asked for, and what follows from them for a model.

    asked: the settings, whose layout may still be auto. trained: sizes of the model and its optimizer. dtype: dtype of
    the parameters. autocast: dtype of mixed precision. device: where steps run. computing: how the model computes.
    optimizer: the loop's torch optimizer. If None, nothing trains, or the run file names the optimizer. seed: seed of
    dropout. most_tokens, context_tokens: maximum tokens of a global batch and of a sequence; None if unknown.
    takes_any_loss: whether losses may need whole logits. is_read_between: whether the loop may read the model between
    steps. keeps_dtypes: whether parameters keep their dtypes. shares_prefixes: whether plans may compute prefixes
    once.
    """

    asked: TrainingSettings
    trained: TrainedModel
    dtype: torch.dtype
    device: torch.device
    computing: Computing
    autocast: torch.dtype | None = None
    optimizer: Optimizer | None = None
    seed: int = 0
    timeout_seconds: float = 600.0
    most_tokens: int = _MOST_TOKENS
    context_tokens: int | None = None
    takes_any_loss: bool = True
    is_read_between: bool = True
    keeps_dtypes: bool = True
    shares_prefixes: bool = False

    @property
    def offload(self) -> OffloadConfig | None:
        """Settings of activation offloading."""
        return self.asked.offload

    @property
    def on_gpus(self) -> bool:
        """Whether steps run on GPUs."""
        return self.device.type == "cuda"

    @property
    def trains(self) -> bool:
        """Whether anything trains."""
        return self.trained.trained != 0

    @property
    def capacity_tokens(self) -> int | None:
        """Maximum tokens of a rank in a microbatch, or None if they are to be measured."""
        return None if self.asked.capacity_tokens == "auto" else self.asked.capacity_tokens

    @property
    def recompute(self) -> str:
        """The kind of recomputation, see `recompute_of`."""
        return recompute_of(self.asked)


def recompute_of(asked: TrainingSettings) -> str:
    """Return the kind of recomputation that settings ask for; auto is none beside a number of tokens."""
    is_none = asked.recompute == "auto" and asked.capacity_tokens != "auto"
    return "none" if is_none else asked.recompute


def check_settings(
    model: Any, optimizer: Any, given: Mapping[str, Any], *, seed: int = 0, timeout_seconds: float = 600.0
) -> SessionSettings:
    """Check the keywords of a session against its model and optimizer; return its settings.

    optimizer: if None, the session evaluates. given: the keywords, unchecked.

    Raises:
        ConfigError, ModelRefused, Problems: something does not work; one message has all problems.
    """
    trains, inner, problems = optimizer is not None, None, Collector()
    for each in keyword_problems(given):
        problems.add(each)
    are_right = not problems.problems
    asked = read_keywords(given if are_right else {})
    offloads = asked.offload_optimizer and trains
    where = asked.device or next(model.parameters()).device
    if are_right and where.type == "meta":
        expected, got = "the device where steps run", "a model on the meta device, without storage"
        problems.add(ConfigError("device", expected=expected, got=got, remedy="Give device, for example cuda:0."))
    kind = recompute_of(asked)
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
        problems.attempt(partial(check_cut, whole_model(model).config, asked.cut))
    problems.raise_all()
    assert dtype is not None, "a model without one was refused"
    return SessionSettings(
        asked=asked,
        trained=_trained_model(model, inner, offloads=offloads),
        dtype=dtype,
        autocast=torch.bfloat16 if asked.precision == "bf16" else None,
        optimizer=inner,
        device=where,
        computing=computing,
        seed=seed,
        timeout_seconds=timeout_seconds,
        shares_prefixes=asked.share_prefixes == "auto" and can_share_prefixes(model),
    )


def _trained_model(model: nn.Module, optimizer: Optimizer | None, *, offloads: bool) -> TrainedModel:
    parameters, config = list(model.parameters()), whole_model(model).config
    widths = Counter[int]()
    for parameter in parameters:
        widths[parameter.element_size()] += parameter.numel()
    total = sum(widths.values())
    trained = 0 if optimizer is None else sum(each.numel() for each in parameters if each.requires_grad)
    return TrainedModel(
        shape=shape_from_config(config.to_dict()),
        dtype_bytes=widths.most_common(1)[0][0],
        parameters=total,
        trained=trained if trained < total else None,
        ties=bool(getattr(config, "tie_word_embeddings", False)),
        kinds=tuple(kinds_of(config, "auto")),
        states=0 if optimizer is None else states_an_entry(optimizer),
        offloads=offloads,
        chunked=not has_own_logits(model),
    )


def cost_of(settings: SessionSettings) -> Cost:
    """Return the costs to plan with: given, read from measurements, or estimated for the device."""
    asked, trained, device = settings.asked, settings.trained, settings.device
    measurements, precision = asked.measurements, PRECISIONS[settings.dtype]
    if isinstance(measurements, Cost):
        return measurements
    how: dict[str, Any] = {"precision": precision, "adapters": trained.trained or None, "stages": asked.stages}
    if measurements is not None:
        return cost_from_measurements(measurements, trained.shape, on_gpus=settings.on_gpus, **how)
    name = hardware_of_gpu(torch.cuda.get_device_name(device))[0] if settings.on_gpus else "cpu"
    return base_cost(trained.shape, name, **how)


def planning_of(
    engine: Engine, updates: SlicedOptimizer | None, cost: Cost, settings: SessionSettings
) -> SessionPlanning:
    """Return the planning of a session's steps; measure how many tokens fit if that was asked for. Collective."""
    asked, measured, whole = settings.asked, None, None
    if settings.capacity_tokens is not None:
        capacities = {settings.recompute: settings.capacity_tokens}
    elif updates is None:
        found, whole = measured_of(engine, settings, trains=False)
        capacities = {"none": max(found.plain.values())}
    else:
        kept, end = updates.pending_bytes()
        with updates.collecting():
            measured, whole = measured_of(engine, settings, trains=True, kept_bytes=kept, end_bytes=end)
        updates.zero_grad()
        capacities = dict(measured.plain)
    memory = memory_of_settings(asked, settings.trained, ranks=engine.transport.world_size, on_gpus=settings.on_gpus)
    ahead = step_planning(
        memory,
        cost,
        capacities,
        measured=measured,
        offload=offload_of(settings.offload),
        planner=asked.planner,
        heads=asked.heads,
        context_tokens=settings.context_tokens,
    )
    return SessionPlanning(
        chunked=ahead,
        whole=ahead if whole is None else for_whole_logits(ahead, whole),
        shares=settings.shares_prefixes,
    )
