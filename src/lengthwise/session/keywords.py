"""The keywords of a session: the settings that run files have too, checked alike, and those of loops alone."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from numbers import Integral
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypedDict

import torch
from pydantic import BeforeValidator, ConfigDict, Field, InstanceOf
from pydantic_core import PydanticCustomError

from lengthwise.config import MEASURE_AT_START, MEASURE_NOTHING, OptimizerConfig, TrainingSettings
from lengthwise.config.problems import find_problems
from lengthwise.config.setting_types import Attention, Experts, FusedLayers, Heads, Recompute, Shard
from lengthwise.config.together import SESSION
from lengthwise.core.errors import ConfigError
from lengthwise.cost import Cost


def _take_measurements(value: object) -> object:
    if value is None or isinstance(value, Path | Cost):
        return value
    if isinstance(value, str) and value not in ("", MEASURE_AT_START, MEASURE_NOTHING):
        return value
    raise PydanticCustomError("measurements", "a file of `lengthwise profile`, costs, or None")


def _take_device(value: object) -> object:
    if value is None or isinstance(value, torch.device):
        return value
    with suppress(RuntimeError):
        if isinstance(value, str):
            return torch.device(value)
    raise PydanticCustomError("device", "a device of torch, for example cuda:0, or None")


class SessionKeywords(TrainingSettings):
    """The keywords of `Session`; trainers take some of them."""

    model_config = ConfigDict(arbitrary_types_allowed=True)
    door: ClassVar[str] = SESSION
    page: ClassVar[str] = "docs/session.md"

    measurements: Annotated[str | Path | InstanceOf[Cost] | None, BeforeValidator(_take_measurements)] = Field(  # type: ignore[assignment] - wider than a run file's
        default=None,
        description="the file that `lengthwise profile` wrote, or costs, to plan with; by default estimates",
    )
    offload_optimizer: bool = Field(
        default=False,
        description="True keeps fp32 master weights and the optimizer's states in host memory; default False",
    )
    share_prefixes: Literal["auto", "off"] = Field(
        default="auto",
        description="auto computes a prefix without labels once for all rows of a step that begin with it, as prompts "
        "of GRPO and DPO, where that saves more than 5 % of the time by the costs; off: never; default auto",
    )
    precision: Literal["bf16"] | None = Field(
        default=None,
        description="bf16: mixed precision over fp32 weights; by default a surrounding torch.autocast decides. For "
        "another dtype convert the model; fp16 is not supported, because it needs a loss scale",
    )
    device: Annotated[torch.device | None, BeforeValidator(_take_device)] = Field(
        default=None, description="where steps run, as cuda:0; by default where the model is"
    )


class SectionKeywords(SessionKeywords):
    """The keywords of a session beside the optimizer's section of a run file."""

    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig, description="as in a run file")


class StepOptions(TypedDict, total=False):
    """The keywords that trainers take too, for type checkers and editors."""

    capacity_tokens: int | str
    planner: str
    offload: Mapping[str, Any] | None
    shard: Shard
    ranks_per_node: int | None
    stages: int
    virtual: int
    heads: Heads
    measurements: str | Path | Cost | None
    attention: Attention
    compile: bool
    fused_layers: FusedLayers
    experts: Experts
    overlap: bool | None
    share_prefixes: Literal["auto", "off"]
    offload_optimizer: bool


class SessionOptions(StepOptions, total=False):
    """All keywords of a session, for type checkers and editors."""

    recompute: Recompute
    precision: Literal["bf16"] | None
    device: torch.device | str | None


def keyword_problems(given: Mapping[str, Any]) -> list[ConfigError]:
    """Return the problems of keywords, and of an optimizer's section among them, that do not depend on the model."""
    return find_problems(_plain(given), _root(given))


def read_keywords(given: Mapping[str, Any]) -> SessionKeywords:
    """Return keywords in which `keyword_problems` found nothing."""
    return _root(given).model_validate(_plain(given))


def _root(given: Mapping[str, Any]) -> type[SessionKeywords]:
    return SectionKeywords if "optimizer" in given else SessionKeywords


def _plain(given: Mapping[str, Any]) -> dict[str, Any]:
    """Convert NumPy's whole numbers to Python's, and make the folder of `offload` absolute."""
    values = {
        name: int(value) if isinstance(value, Integral) and not isinstance(value, bool) else value
        for name, value in given.items()
    }
    if isinstance(offload := values.get("offload"), Mapping):
        path = offload.get("path")
        values["offload"] = {**offload, **({"path": Path(path).absolute()} if isinstance(path, str | Path) else {})}
    return values
