"""How a step is planned: all options in one record, checked in one place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from math import inf
from typing import Any

from lengthwise.core.errors import Collector, ConfigError, LengthwiseError, raise_problems
from lengthwise.core.names import unknown_name
from lengthwise.core.plan import RECOMPUTE_KINDS, kinds_by_layer
from lengthwise.core.sizes import read_whole
from lengthwise.cost import Choices, Cost, StepMemory
from lengthwise.planner.problem.speeds import read_speeds
from lengthwise.planner.registry import unknown_planner

CHOICES = ("off", "auto")  # of offload and heads
MODES = ("free", "waves", "pipeline")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """The settings of a step's plan.

    planner: one of `PLANNERS`, or a registered one. layers: number of the model's layers; offload ratios and pipeline
    stages depend on it. context_tokens: context of the mesh of `static`, in tokens (default: the longest sequence).
    recompute: recomputation in every microbatch, as `kinds_by_layer` reads it. offload: `auto`: microbatches above the
    capacity offload as much as they must; `off`: none does. heads: `auto`: each ring splits heads if that is faster;
    `off`: none does; a number such as 4: groups of 4 if possible. mode: one of `MODES`; `lengthwise` plans all of them,
    other planners only `free`, which `pipeline` runs through stages. speeds: relative speed of each rank, 1 for that of
    the costs (default: all 1). Only `lengthwise` plans with them. stages: pipeline stages of each rank in mode
    `pipeline`; the costs are those of one stage. virtual: chunks of layers per stage (default: 1). planning_share:
    limit of the seconds spent on tries beyond the search, as a share of the least step time (default: no limit).
    """

    planner: str = "lengthwise"
    layers: int = 1
    context_tokens: int | None = None
    recompute: str = "none"
    offload: str = "off"
    heads: str | int = "off"
    mode: str = "free"
    speeds: Sequence[float] | None = None
    stages: int | None = None
    virtual: int | None = None
    planning_share: float | None = None

    def choices(self, capacity_tokens: int) -> Choices:
        """Return the choices of each piece beside its degree, on ranks of this capacity."""
        return Choices(
            recompute=self.recompute,
            splits_heads=self.heads == "auto",
            offloads_above_tokens=capacity_tokens if self.offload == "auto" else inf,
            layers=self.layers,
        )

    def checked(self, ranks: int, cost: Cost | None) -> PlanOptions:
        """Return the options with whole numbers as int and speeds as a tuple, or None if all are 1.

        Without costs, options that depend on them are not checked.

        Raises:
            ConfigError: an unknown name, a number out of range, or a combination that planner or costs do not support.
            Problems: several of these.
        """
        problems = Collector()
        problems.attempt(self._refuse_names)
        given = {name: getattr(self, name) for name in ("layers", "context_tokens", "stages", "virtual")}
        given = {name: value for name, value in given.items() if value is not None}
        read = {name: problems.attempt(partial(read_whole, name, value)) for name, value in given.items()}
        speeds = problems.attempt(partial(self._read_speeds, ranks))
        layers, share = read["layers"] or 1, self.planning_share
        if share is not None and not share >= 0:
            got, remedy = repr(share), "Leave it out for no limit."
            problems.add(ConfigError("planning_share", expected="a number of at least 0", got=got, remedy=remedy))
        problems.attempt(partial(_refuse_choices, {"offload": self.offload, "heads": self.heads}, cost, layers, speeds))
        counts = {name: value for name, value in read.items() if name != "context_tokens"}
        if self.mode in MODES and None not in counts.values():
            problems.attempt(partial(_refuse_stages, replace(self, **counts), cost))
        problems.raise_all()
        return replace(self, **read, speeds=speeds)

    def _refuse_names(self) -> None:
        unknown = [unknown_planner("planner", self.planner)]
        if self.mode not in MODES:
            unknown.append(unknown_name("mode", self.mode, MODES))
        try:
            mix = kinds_by_layer(self.recompute)
        except ValueError:
            unknown.append(unknown_name("recompute", self.recompute, RECOMPUTE_KINDS))
        else:
            if mix.number and (mix.layers != self.layers or self.offload != "off" or self.mode == "pipeline"):
                expected = f"one kind beside offload and in pipelines, else a number of the {self.layers} layers"
                remedy = "Use one of its kinds, or leave the others out."
                unknown.append(ConfigError("recompute", expected=expected, got=self.recompute, remedy=remedy))
        raise_problems([each for each in unknown if each is not None])
        if self.mode == "waves" and self.planner != "lengthwise":
            remedy = "{one_mode|Use planner lengthwise, or mode free}."
            expected = f"free, all that planner {self.planner} plans"
            raise ConfigError("mode", expected=expected, got=self.mode, remedy=remedy)

    def _read_speeds(self, ranks: int) -> tuple[float, ...] | None:
        speeds = read_speeds(self.speeds, ranks)
        if speeds is not None and self.mode != "free":
            remedy = "Use mode free, or leave {speeds} out."
            raise ConfigError("speeds", expected=f"all 1 in mode {self.mode}", got="unequal ranks", remedy=remedy)
        return speeds


DEFAULT = PlanOptions()


def options_of(layout: StepMemory | None, **choices: Any) -> PlanOptions:
    """Return the options for steps of a layout, or, without one, only those in `choices`.

    The layout sets layers, mode (`pipeline` if it has several stages, `waves` if ranks share parameters) and stages.
    choices: fields of `PlanOptions`, which override these.
    """
    if layout is None:
        return PlanOptions(**choices)
    by_itself = "pipeline" if layout.cut.stages > 1 else "waves" if layout.ranks_in_step > 1 else "free"
    found = {"layers": layout.shape.layers, "mode": by_itself} | choices
    if found["mode"] == "pipeline":
        found = asdict(layout.cut) | found
    return PlanOptions(**found)


def _refuse_choices(
    asked: Mapping[str, object], cost: Cost | None, layers: int, speeds: Sequence[float] | None
) -> None:
    """Refuse choices that these costs (if known) do not price, and choices beside unequal speeds."""
    problems: list[LengthwiseError] = []
    told = {} if cost is None else {"offload": cost.copy_bytes, "heads": cost.exchange_bytes}
    for name, value in asked.items():
        if value not in CHOICES and not (name == "heads" and str(value).isdecimal() and int(str(value))):
            problems.append(unknown_name(name, value, CHOICES))
        elif value != "off" and cost is not None and not told[name]:
            remedy = f"Plan with a hardware description ({{hardware}}), or without {{{name}}}."
            got = f"costs {cost.version}, which have no price for {name}"
            problems.append(ConfigError(name, expected="off, with these costs", got=f"{value}; {got}", remedy=remedy))
    if asked["offload"] == "auto" and cost is not None and layers < cost.layers:
        expected = f"those of the model, at least {cost.layers}: what offload leaves on the device depends on them"
        problems.append(ConfigError("layers", expected=expected, got=str(layers), remedy="Set {layers}."))
    if set(asked.values()) != {"off"} and speeds is not None:
        expected = "all 1 beside offload or heads, which are not planned together with speeds yet"
        remedy = "Plan with {speeds}, or with these choices."
        problems.append(ConfigError("speeds", expected=expected, got="unequal ranks", remedy=remedy))
    raise_problems(problems)


def _refuse_stages(options: PlanOptions, cost: Cost | None) -> None:
    mode, stages, virtual = options.mode, options.stages, options.virtual
    problems: list[LengthwiseError] = []
    for name, value in (("stages", stages), ("virtual", virtual)):
        if value is not None and mode != "pipeline":
            remedy = f"Use mode pipeline, or leave {{{name}|`{name}`}} out."
            problems.append(ConfigError(name, expected=f"nothing in mode {mode}", got=repr(value), remedy=remedy))
    if mode == "pipeline" and stages is None:
        expected = "a number in mode pipeline"
        problems.append(ConfigError("stages", expected=expected, got="none", remedy="Give {stages|`stages`}."))
    raise_problems(problems)
    if mode != "pipeline":
        return
    chunks = (stages or 1) * (virtual or 1)
    if options.layers > 1 and chunks > options.layers:
        expected = f"{{stages}} x {{virtual}} of at most the {options.layers} layers"
        got = f"{stages} x {virtual or 1}"
        raise ConfigError("stages", expected=expected, got=got, remedy="Use fewer of them.")
    if cost is not None and cost.stages not in (0, stages):
        expected = f"{cost.stages}, as in the costs"
        raise ConfigError("stages", expected=expected, got=str(stages), remedy="Use costs of this many stages.")
