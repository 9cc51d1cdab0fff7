"""Check a session's model, optimizer and keywords; choose its costs, and plan its steps by them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import nn
from torch.optim import Optimizer

from lengthwise.config import OptimizerConfig, TrainingSettings
from lengthwise.config.together import broken
from lengthwise.core.errors import Collector, ConfigError
from lengthwise.core.plan import RECOMPUTE_KINDS
from lengthwise.cost import Cost, hardware_of_gpu, shape_from_config
from lengthwise.cost.measured import base_cost, cost_from_measurements
from lengthwise.engine.offloading import check_offload
from lengthwise.engine.optimizer import SlicedOptimizer
from lengthwise.engine.whole_optimizer import states_an_entry
from lengthwise.models import (
    Computing,
    check_adapters,
    check_computing,
    check_cut,
    has_own_logits,
    sees_images,
    text_part,
    whole_model,
    wrapped_layers,
)
from lengthwise.models.quantized import count_entries, frozen_bytes, kind_of
from lengthwise.models.stored_model import StoredModel
from lengthwise.planner.service.slow_ranks import SlowRanks
from lengthwise.planner.service.step_planning import step_planning
from lengthwise.session.capacity import measured_of
from lengthwise.session.engine import Engine
from lengthwise.session.keywords import SectionKeywords, SessionKeywords, keyword_problems, read_keywords
from lengthwise.session.misuse import check_kinds
from lengthwise.session.model import PRECISIONS, can_share_prefixes, check_session_model, hugging_face_model, num_words
from lengthwise.session.optimizers import check_optimizer
from lengthwise.session.planning import SessionPlanning, for_whole_logits
from lengthwise.setup import TrainedModel, memory_of_settings, offload_of

_MOST_TOKENS = 2**22  # assumed tokens of a batch when memory is measured, if the lengths are unknown


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionSettings:
    """Checked settings: those asked for, and what follows from them for a model.

    model: model that is saved; for a `StoredModel` an empty one on the meta device, until it is read. text: its text
    part, which runs. stored: the stored model that the session reads, or None. optimizer: the loop's torch optimizer,
    or a run file's section; None if nothing trains. asked: the settings, whose layout may still be auto. trained: sizes
    of the model and its optimizer. num_words: rows of its embedding. dtype: dtype of the parameters. autocast: dtype of
    mixed precision. device: device of the steps. computing: kernels and forwards of the model. seed: seed of dropout.
    lengths: tokens of the coming sequences; empty if unknown. batch_tokens: maximum tokens of a global batch.
    shares_prefixes: True if plans may compute prefixes once.
    """

    model: nn.Module
    text: Any
    asked: TrainingSettings
    trained: TrainedModel
    num_words: int
    dtype: torch.dtype
    device: torch.device
    computing: Computing
    stored: StoredModel | None = None
    optimizer: Optimizer | OptimizerConfig | None = None
    autocast: torch.dtype | None = None
    seed: int = 0
    timeout_seconds: float = 600.0
    lengths: Sequence[int] = ()
    batch_tokens: int = _MOST_TOKENS
    shares_prefixes: bool = False

    @property
    def on_gpus(self) -> bool:
        """Whether steps run on GPUs."""
        return self.device.type == "cuda"

    @property
    def section(self) -> OptimizerConfig | None:
        """The section of a run file by which the session makes its optimizer; None if the loop gave one."""
        return self.optimizer if isinstance(self.optimizer, OptimizerConfig) else None

    @property
    def trains(self) -> bool:
        """Whether anything trains."""
        return self.optimizer is not None

    @property
    def capacity_tokens(self) -> int | None:
        """Maximum tokens of a rank in a microbatch, or None if they are to be measured."""
        return None if self.asked.capacity_tokens == "auto" else self.asked.capacity_tokens

    @property
    def recompute(self) -> str:
        """The kind of recomputation, see `recompute_of`."""
        return recompute_of(self.asked)


def recompute_of(asked: TrainingSettings) -> str:
    """Return the kind of recomputation of settings; with a number of tokens, auto means none."""
    is_none = asked.recompute == "auto" and asked.capacity_tokens != "auto"
    return "none" if is_none else asked.recompute


def check_settings(
    model: Any,
    optimizer: Any,
    given: Mapping[str, Any],
    *,
    seed: int = 0,
    timeout_seconds: float = 600.0,
    lengths: Sequence[int] = (),
    batch_tokens: int | None = None,
) -> SessionSettings:
    """Check the arguments of a session, all problems in one message; return its settings.

    model: a Hugging Face model, peft's wrap of one, or a `StoredModel`. optimizer: a torch optimizer, a run file's
    section or its values; None to only evaluate. given: the unchecked keywords.
    """
    stored: StoredModel | None = model if isinstance(model, StoredModel) else None
    whole: Any = model
    problems = Collector()
    check_kinds(seed=seed, timeout_seconds=timeout_seconds, **({} if stored else {"model": model}))
    if isinstance(optimizer, Mapping | OptimizerConfig):
        given = {**given, "optimizer": optimizer}
    for each in keyword_problems(given):
        problems.add(each)
    asked = read_keywords({} if problems.problems else given)
    if stored is None:
        check_adapters(whole)
        text, where = _part_of(hugging_face_model(whole), optimizer, asked), asked.device
        where = where or next(text.parameters()).device
    else:
        whole = text = stored.build(stored=False)
        where = asked.device or torch.device("cpu")
    if where.type == "meta" and not problems.problems:
        expected, got = "the device where steps run", "a model on the meta device, without storage"
        problems.add(ConfigError("device", expected=expected, got=got, remedy="Give device, for example cuda:0."))
    kind = recompute_of(asked)
    wrapped, trains = kind if kind in RECOMPUTE_KINDS else "none", optimizer is not None
    dtype = problems.attempt(partial(check_session_model, text, wrapped, trains=trains))
    inner = asked.optimizer if isinstance(asked, SectionKeywords) else None
    if trains and inner is None:
        check = partial(check_optimizer, optimizer, text, offloads=asked.offload_optimizer, is_given=stored is None)
        inner = problems.attempt(check)
    if not problems.problems:
        dtype = dtype if stored is None else stored.dtype
        _check_layers(text, asked, dtype=dtype, on_gpus=where.type == "cuda", problems=problems)
    values = {**vars(asked), "quantization": kind_of(text)}
    for rule in broken(values, asked.door):
        problems.add(rule.error(values))
    problems.raise_all()
    assert dtype is not None, "a model without one was refused"
    return SessionSettings(
        model=whole,
        text=text,
        stored=stored,
        optimizer=inner,
        asked=asked,
        trained=_trained_model(text, inner, asked, stored),
        num_words=num_words(text),
        dtype=dtype,
        autocast=None if asked.precision is None else torch.bfloat16,
        device=where,
        computing=Computing.of(asked),
        seed=seed,
        timeout_seconds=timeout_seconds,
        lengths=lengths,
        batch_tokens=_MOST_TOKENS if batch_tokens is None else batch_tokens,
        shares_prefixes=asked.share_prefixes == "auto" and can_share_prefixes(text),
    )


def _part_of(model: Any, optimizer: Any, asked: SessionKeywords) -> Any:
    """Return the part of a loop's model that may train: with towers in the loop's optimizer if their rows train."""
    if optimizer is None or asked.stages > 1 or not sees_images(model):
        return text_part(model)
    groups = getattr(optimizer, "param_groups", [{"params": model.parameters()}])  # a section has all
    return text_part(model, trained={id(each) for group in groups for each in group["params"]})


def _check_layers(text: Any, asked: SessionKeywords, *, dtype: Any, on_gpus: bool, problems: Collector) -> None:
    config, layers = whole_model(text).config, text.config.num_hidden_layers
    heads = shape_from_config(text.config.to_dict()).heads
    problems.attempt(partial(check_offload, asked.offload, layers, on_gpus=on_gpus))
    problems.attempt(partial(check_computing, config, Computing.of(asked), dtype=dtype, on_gpus=on_gpus))
    problems.attempt(partial(_check_heads, asked.heads, heads))
    if asked.stages > 1:
        problems.attempt(partial(check_cut, config, asked.cut))


def _check_heads(asked: object, heads: int) -> None:
    if isinstance(asked, int) and heads % asked:
        expected = f"auto, off, or a number that divides the model's {heads} heads"
        raise ConfigError("heads", expected=expected, got=f"{asked}", remedy="Set heads: auto.")


def _trained_model(text: nn.Module, optimizer: Any, asked: SessionKeywords, stored: StoredModel | None) -> TrainedModel:
    parameters, config = list(text.parameters()), whole_model(text).config
    widths = Counter[int]()
    for parameter in parameters:
        widths[parameter.element_size()] += parameter.numel() * parameter.is_floating_point()
    section: OptimizerConfig | None = optimizer if isinstance(optimizer, OptimizerConfig) else None
    total, given = count_entries(text), cast(Any, optimizer)
    dtype_bytes = widths.most_common(1)[0][0] if stored is None else stored.dtype.itemsize
    states = len(section.states) if section else 0 if given is None else states_an_entry(given)
    trained = 0 if optimizer is None else sum(each.numel() for each in parameters if each.requires_grad)
    shape = shape_from_config(config.to_dict())
    return TrainedModel(
        shape=shape,
        dtype_bytes=dtype_bytes,
        parameters=total,
        trained=trained if trained < total else None,
        ties=bool(getattr(config, "tie_word_embeddings", False)),
        kinds=RECOMPUTE_KINDS if wrapped_layers(text) else ("none",),
        states=states,
        offloads=optimizer is not None and (asked.offload_optimizer or (section is not None and section.offload)),
        chunked=not (has_own_logits(text) if stored is None else stored.whole_logits),
        quantization=kind_of(text),
        frozen_bytes=frozen_bytes(text, dtype_bytes),
        # Mixed precision casts linear layers; experts in one parameter are gathered as they are.
        layer_bytes=2 if asked.precision == "bf16" and dtype_bytes == 4 and shape.experts == 1 else None,
    )


def cost_of(settings: SessionSettings, ranks: int) -> tuple[Cost, str | None]:
    """Return the costs: given, measured, or estimated for the device; and a note if they are another device's."""
    asked, trained, device = settings.asked, settings.trained, settings.device
    measurements, precision = asked.measurements, PRECISIONS[settings.dtype]
    if isinstance(measurements, Cost):
        return measurements, None
    how: dict[str, Any] = {"precision": precision, "adapters": trained.trained or None, "stages": asked.stages}
    if measurements is not None:
        threads = torch.get_num_threads() if ranks > 1 and not settings.on_gpus else None
        how |= {"threads": threads, "on_gpus": settings.on_gpus}
        return cost_from_measurements(measurements, trained.shape, **how), None
    name, note = hardware_of_gpu(torch.cuda.get_device_name(device)) if settings.on_gpus else ("cpu", None)
    return base_cost(trained.shape, name, **how, quantization=trained.quantization), note


def planning_of(
    engine: Engine, updates: SlicedOptimizer | None, cost: Cost, settings: SessionSettings, *, takes_any_loss: bool
) -> SessionPlanning:
    """Return the planning of a session's steps; measure how many tokens fit if that was asked for. Collective.

    takes_any_loss: True if later losses may need whole logits.
    """
    asked, measured, whole = settings.asked, None, None
    if settings.capacity_tokens is not None:
        capacities = {settings.recompute: settings.capacity_tokens}
    elif updates is None:
        found, whole = measured_of(engine, settings, trains=False, takes_any_loss=takes_any_loss)
        capacities = {"none": max(found.plain.values())}
    else:
        kept, end = updates.pending_bytes()
        with updates.collecting():
            held: dict[str, Any] = {"kept_bytes": kept, "end_bytes": end, "takes_any_loss": takes_any_loss}
            measured, whole = measured_of(engine, settings, trains=True, **held)
        updates.zero_grad()
        capacities = dict(measured.plain)
    memory = memory_of_settings(asked, settings.trained, ranks=engine.transport.world_size, on_gpus=settings.on_gpus)
    ahead = step_planning(
        memory,
        cost,
        capacities,
        measured=measured,
        offload=offload_of(asked.offload),
        planner=asked.planner,
        heads=asked.heads,
        context_tokens=max(settings.lengths, default=None),
    )
    return SessionPlanning(
        chunked=ahead,
        whole=ahead if whole is None else for_whole_logits(ahead, whole),
        shares=settings.shares_prefixes,
        slow_ranks=None if asked.measurements is None else SlowRanks(),
    )
