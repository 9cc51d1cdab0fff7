"""Options that `plan` and `simulate` share, speeds on a command line, and options that exclude one another."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from lengthwise.core.errors import ConfigError, raise_problems
from lengthwise.core.files import read_json
from lengthwise.core.names import unknown_name
from lengthwise.core.plan import RECOMPUTE_KINDS

if TYPE_CHECKING:
    from lengthwise.planner import PlanOptions

_MOST_SPEEDS = 2**20  # most ranks in one run of equal speed
_OFF = "(default: off; of simulate --mesh best: auto)"


@dataclass(frozen=True, kw_only=True)
class PlanChoices:
    """How ranks synchronize, and what may be chosen for each microbatch."""

    mode: Annotated[str | None, tyro.conf.arg(metavar="free|waves|pipeline", help_behavior_hint="(default: free)")] = (
        None
    )
    """How ranks synchronize: free (a rank continues once its own ring partners are ready; the default, of `simulate`
    for ranks of one stage, of `plan --config` as the run file shards), waves (all in lock-step, for parameters sharded
    over all ranks, shard zero3; planner lengthwise only), or pipeline (each rank is a pipeline of stages; other
    planners plan free and run that through the stages)."""

    virtual: Annotated[int | None, tyro.conf.arg(metavar="V", help_behavior_hint="")] = None
    """Chunks of layers of a stage (interleaved 1F1B), for mode pipeline; default: 1."""
    offload: Annotated[str | None, tyro.conf.arg(metavar="off|auto", help_behavior_hint=_OFF)] = None
    """Whether ranks may keep activations elsewhere to hold longer sequences: auto (as far as it makes the step faster)
    or off; a run file has its own key."""
    heads: Annotated[str | None, tyro.conf.arg(metavar="off|auto|N", help_behavior_hint=_OFF)] = None
    """Whether rings may split attention heads over groups of ranks: auto (where that is faster), a number (groups of
    this many ranks, where it divides ring and heads) or off; a run file has its own key."""

    def options(self, **others: Any) -> PlanOptions:
        """Return the planner's options, with `others` by name."""
        from lengthwise.planner import options_of

        own = {"mode": self.mode or "free", "heads": self.heads or "off", "offload": self.offload or "off"}
        return options_of(None, **{**own, "virtual": self.virtual, **others})


def named_alike(names: str) -> dict[str, str]:
    """Return names of the library, separated by spaces, with the options of the same names."""
    return {name: f"--{name.replace('_', '-')}" for name in names.split()}


def refuse_but_one(where: str, options: Mapping[str, bool]) -> None:
    """Raise ConfigError unless exactly one option is given. options: by name, True if given."""
    given = [option for option, is_given in options.items() if is_given]
    if len(given) != 1:
        *first, last = options
        expected, got = f"one of {', '.join(first)} and {last}", " and ".join(given) or "none"
        raise ConfigError(where, expected=expected, got=got, remedy="Give exactly one.")


def refuse_beside(options: Mapping[str, object], expected: str, remedy: str, *, got: str | None = None) -> None:
    """Raise ConfigError, or Problems, for every option that has a value; the remedy may name it as {option}."""
    raise_problems(
        [
            ConfigError(option, expected=expected, got=got or repr(value), remedy=remedy.replace("{option}", option))
            for option, value in options.items()
            if value is not None
        ]
    )


def refuse_kind(kind: str | None, capacity: object) -> None:
    """Raise ConfigError for an unknown kind of recomputation, and for a capacity beside `auto`."""
    kinds = (*RECOMPUTE_KINDS, "auto")
    if kind is not None and kind not in kinds:
        raise unknown_name("--recompute", kind, kinds)
    if kind == "auto":
        expected = "nothing beside --recompute auto: every kind has its own"
        refuse_beside({"--capacity": capacity}, expected, "Remove one of them.")


def parse_speeds(text: str) -> list[float]:
    """Read speeds from `1,1,0.5`, runs as `8x1.0,8x0.6`, or a JSON file's name."""
    from lengthwise.planner.problem.speeds import refuse_speeds

    if text.endswith(".json"):
        return _speeds_of_file(Path(text))
    speeds: list[float] = []
    for number, entry in enumerate(text.split(",")):
        count, _, speed = entry.strip().rpartition("x") if "x" in entry else ("1", "", entry)
        try:
            if not 0 < int(count) <= _MOST_SPEEDS:
                raise ValueError(count)
            speeds += [float(speed)] * int(count)
        except ValueError:
            expected = "a speed, or COUNTxSPEED for neighbouring ranks, as in 8x1.0,8x0.6"
            raise refuse_speeds(f"--speeds: entry {number + 1}", expected, repr(entry)) from None
    return speeds


def _speeds_of_file(path: Path) -> list[float]:
    from lengthwise.planner.problem.speeds import refuse_speeds

    try:
        speeds = read_json(path)
    except ValueError as error:
        raise refuse_speeds(str(path), "a JSON list of speeds", str(error)) from None
    if not isinstance(speeds, list):
        raise refuse_speeds(str(path), "a JSON list of speeds", type(speeds).__name__)
    return speeds
