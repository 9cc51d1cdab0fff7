"""The arguments of a session as a record, and all checks of them that need no model; trainers make them, too."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, get_args

import torch

from lengthwise.config import OffloadConfig
from lengthwise.config.problems import find_problems
from lengthwise.config.settings import Attention, Experts, FusedLayers, Recompute, Shard
from lengthwise.core.errors import Collector, ConfigError, LengthwiseError
from lengthwise.core.sizes import parse_tokens, read_whole
from lengthwise.cost import Cost
from lengthwise.planner.registry import unknown_planner
from lengthwise.session.misuse import check_kinds
from lengthwise.session.stages import not_with_stages

LOCK_STEP_PLANNER = "lengthwise"
_OF_KINDS = ("ranks_per_node", "heads", "planner", "measurements", "device")
_BESIDE_STAGES = ("shard", "capacity_tokens", "ranks_per_node", "compile")


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionRequest:
    """Arguments of `Session`, not checked yet."""

    capacity_tokens: int | str
    shard: str
    ranks_per_node: int | None
    stages: int = 1
    virtual: int = 1
    recompute: str
    heads: int | str
    offload: Mapping[str, Any] | None
    offload_optimizer: bool
    planner: str
    measurements: str | Path | Cost | None
    precision: str | None = None
    attention: str = "auto"
    compile: bool = False
    fused_layers: str = "auto"
    experts: str = "auto"
    overlap: bool | None = None
    device: torch.device | str | None = None


def check_request_kinds(asked: SessionRequest) -> None:
    """Refuse values of a request that are of a wrong kind, all together."""
    check_kinds(**{name: getattr(asked, name) for name in _OF_KINDS})


def request_problems(asked: SessionRequest, *, trains: bool) -> list[LengthwiseError]:
    """Return all that is wrong with a request, whatever the model; trains: whether there is an optimizer."""
    shard, planner, heads, ranks_per_node = asked.shard, asked.planner, asked.heads, asked.ranks_per_node
    problems = Collector()
    problems.attempt(partial(check_request_kinds, asked))
    if problems.problems:
        return problems.problems

    def refuse(key: str, expected: str, got: object, remedy: str = "Take one of them.") -> None:
        problems.add(ConfigError(key, expected=expected, got=f"{got!r}", remedy=remedy))

    problems.attempt(partial(read_capacity, asked.capacity_tokens))
    if asked.precision not in (None, "bf16"):
        remedy = "For another dtype, convert the model; fp16 is not supported, because it needs a loss scale."
        refuse("precision", "None or bf16", asked.precision, remedy)
    for key, value, known in (
        ("recompute", asked.recompute, get_args(Recompute)),
        ("shard", shard, get_args(Shard)),
        ("attention", asked.attention, get_args(Attention)),
        ("fused_layers", asked.fused_layers, get_args(FusedLayers)),
        ("experts", asked.experts, get_args(Experts)),
    ):
        if value not in known:
            refuse(key, " or ".join(known), value)
    for key in ("offload_optimizer", "compile", "overlap"):
        value, expected = getattr(asked, key), "True or False" + ", or None" * (key == "overlap")
        if not isinstance(value, bool) and (key != "overlap" or value is not None):
            refuse(key, expected, value, "Correct it.")
    if heads not in ("auto", "off") and (isinstance(heads, bool) or not isinstance(heads, int) or heads < 1):
        refuse("heads", "auto, off, or ranks of a group", heads)
    problems.attempt(partial(read_offload, asked.offload))
    if ranks_per_node is not None and (shard in ("zero1", "zero3") or ranks_per_node < 1):
        remedy = "Take it out, or give shard='hybrid'."
        refuse("ranks_per_node", f"1 or more, beside shard hybrid or auto, not {shard}", ranks_per_node, remedy)
    unknown = unknown_planner("planner", planner)
    if unknown is not None:
        problems.add(unknown)
    elif shard in ("zero3", "hybrid") and planner != LOCK_STEP_PLANNER:
        expected = f"{LOCK_STEP_PLANNER} under shard {shard}, the only one that plans in lock-step"
        refuse("planner", expected, planner, "Take planner out.")
    if shard in ("zero3", "hybrid") and asked.compile is True:
        refuse("compile", f"False under shard {shard}", True, "Take compile out.")
    beside = {name: getattr(asked, name) for name in _BESIDE_STAGES}
    for each in not_with_stages(asked.stages, asked.virtual, beside, trains=trains):
        problems.add(each)
    return problems.problems


def read_capacity(given: int | str) -> int | None:
    """Read capacity_tokens as run files have it: a number, or a text as 16K; return None for auto."""
    where = "capacity_tokens"
    if given == "auto":
        return None
    return parse_tokens(given, where) if isinstance(given, str) else read_whole(where, given)


def read_offload(offload: Mapping[str, Any] | None) -> OffloadConfig | None:
    """Read the section `offload` of a run file.

    Raises:
        ConfigError, Problems: values that a run file refuses, too.
    """
    if offload is None:
        return None
    if not isinstance(offload, Mapping):
        expected, remedy = "a mapping, as in a run file", 'Write for example {"store": "host"}.'
        raise ConfigError("offload", expected=expected, got=f"{offload!r}", remedy=remedy)
    values = dict(offload)
    if isinstance(values.get("path"), str | Path):
        values["path"] = Path(values["path"]).absolute()
    found = Collector()
    for each in find_problems({"offload": values}):
        if each.where.startswith("offload"):
            found.add(each)
    found.raise_all()
    return OffloadConfig.model_validate(values)
