"""Values that are refused together: one table for run files, sessions and trainers, printed on their pages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass

from lengthwise.core.errors import ConfigError

RUN_FILE, SESSION = "run file", "session"


def plain(value: object) -> str:
    """Return a value as a run file writes it."""
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


@dataclass(frozen=True, slots=True)
class Values:
    """Some values of a key, or, if `are_others`, all other values."""

    listed: tuple[object, ...]
    are_others: bool = False

    def __contains__(self, value: object) -> bool:
        return (value in self.listed) != self.are_others


@dataclass(frozen=True, slots=True)
class Together:
    """Values of a key that are refused beside some values of another key.

    instead: the allowed values there. why: reason, for the message, or "". doors: where a user can write both.
    """

    key: str
    refused: Values
    beside: str
    values: Values
    instead: str
    remedy: str
    _: KW_ONLY
    why: str = ""
    doors: tuple[str, ...] = (RUN_FILE, SESSION)

    def is_broken(self, values: Mapping[str, object]) -> bool:
        """Return whether `values`, which may lack keys, break this rule."""
        pairs = ((self.key, self.refused), (self.beside, self.values))
        return all(key in values and values[key] in listed for key, listed in pairs)

    def error(self, values: Mapping[str, object]) -> ConfigError:
        """Return the error for values that break this rule."""
        why = f" ({self.why})" if self.why else ""
        expected = f"{self.instead} beside `{self.beside}: {plain(values[self.beside])}`{why}"
        return ConfigError(self.key, expected=expected, got=plain(values[self.key]), remedy=self.remedy)


_AT_START, _GIVEN = Values(("auto",)), Values((None,), are_others=True)
_CUT, _STAGES = ("shard", Values(("zero3", "hybrid"))), ("stages", Values((1,), are_others=True))
_OFF = "Take {} out.".format
_PACKED = "several weights share a byte, and blocks of them a scale"
_INSIDE_NODES = "hybrid alone shards inside nodes"

TABLE = (
    Together("steps", _GIVEN, "epochs", _GIVEN, "null", "Take one of them out.", doors=(RUN_FILE,)),
    Together(
        *("ranks_per_node", _GIVEN, "shard", Values(("zero1", "zero3")), "none"),
        "Take ranks_per_node out, or set hybrid.",
        why=_INSIDE_NODES,
    ),
    Together(
        *("planner", Values(("lengthwise",), are_others=True), *_CUT, "lengthwise"),
        _OFF("planner"),
        why="the only planner for ranks in lock-step",
    ),
    Together(
        *("measurements", _AT_START, *_CUT, "off, or a file of `lengthwise profile`"),
        "Take measurements out, or measure under zero1 with `lengthwise profile`.",
        doors=(RUN_FILE,),
    ),
    Together("quantization", _GIVEN, *_CUT, "none", "Take shard out: every rank has the whole base.", why=_PACKED),
    Together("quantization", _GIVEN, *_STAGES, "none", _OFF("stages"), why=_PACKED),
    Together(
        *("quantization", _GIVEN, "lora", Values((None,)), "none"),
        "Add for example `lora: {r: 16}`.",
        why="quantized weights do not train",
        doors=(RUN_FILE,),
    ),
    Together(
        *("quantization", _GIVEN, "precision", Values(("fp64",)), "none"),
        "Set precision: fp32.",
        why="bitsandbytes computes in fp32 at most",
        doors=(RUN_FILE,),
    ),
    Together(
        *("train_towers", Values((True,)), *_STAGES, "false"),
        _OFF("stages"),
        why="a tower is in no stage",
        doors=(RUN_FILE,),
    ),
    Together(
        *("virtual", Values((1,), are_others=True), "stages", Values((1,)), "1"),
        "Add `stages`, or take virtual out.",
    ),
    Together(
        *("shard", Values(("auto", "zero1"), are_others=True), *_STAGES, "auto or zero1"),
        "Take shard out, or stages.",
        why="each microbatch would gather the layers of a stage again",
    ),
    Together(*("ranks_per_node", _GIVEN, *_STAGES, "none"), _OFF("ranks_per_node"), why=_INSIDE_NODES),
    Together(
        *("measurements", _AT_START, *_STAGES, "off or a file"),
        "Measure the whole model with `lengthwise profile`, and name its file.",
        why="costs are those of a whole model, which no rank has",
        doors=(RUN_FILE,),
    ),
)


def broken(values: Mapping[str, object], door: str) -> list[Together]:
    """Return the rules that `values`, all or some and perhaps wrong, break at a door."""
    return [rule for rule in TABLE if door in rule.doors and rule.is_broken(values)]
