"""The base of all sections of a run file, strict and immutable, and the field types that accept more than one form."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal, Self, TypeAlias

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from lengthwise.core.errors import ConfigError
from lengthwise.core.sizes import parse_tokens


def _read_tokens(value: object) -> object:
    """Read 8K or 2M as the command line does; leave other values to the type."""
    if isinstance(value, str) and not value.strip().isdecimal():
        with contextlib.suppress(ConfigError):
            return parse_tokens(value, "")
    return value


# YAML has no tuples and no paths: a tuple accepts a list, and a path text, although types are strict.
PathSetting = Annotated[Path, Field(strict=False)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
Tokens = Annotated[int, Field(ge=1), BeforeValidator(_read_tokens)]
# For the fields of a run file, and for the arguments of `Session` and trainers, which type checkers read.
Shard: TypeAlias = Literal["auto", "zero1", "zero3", "hybrid"]
Recompute: TypeAlias = Literal["auto", "none", "layer", "all_but_attention", "elementwise"]
Heads: TypeAlias = int | Literal["auto", "off"]
Attention: TypeAlias = Literal["auto", "flash2", "flash3", "flash_attn", "cudnn", "efficient", "reference"]
FusedLayers: TypeAlias = Literal["auto", "off", "liger"]
Experts: TypeAlias = Literal["auto", "eager", "grouped_mm"]


class Settings(BaseModel):
    """A section of the run file: immutable, no unknown keys, no silent casts, no NaN or infinity."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    @classmethod
    def broken_rules(cls, values: Mapping[str, object]) -> list[ConfigError]:
        """Return an error for each rule between fields that raw `values` break; its key is "" for the section."""
        del values
        return []

    @model_validator(mode="after")
    def _obey_rules(self) -> Self:
        for rule in self.broken_rules(self.__dict__):
            raise PydanticCustomError("rule", "{rule}", {"rule": str(rule)})
        return self
