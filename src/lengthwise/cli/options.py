"""What commands refuse alike: options that exclude each other, or do nothing beside another."""

from __future__ import annotations

from collections.abc import Mapping

from lengthwise.core.errors import ConfigError, raise_problems
from lengthwise.core.names import unknown_name
from lengthwise.core.plan import RECOMPUTE_KINDS


def named_alike(names: str) -> dict[str, str]:
    """Map names of the library, separated by spaces, to the options that are called the same."""
    return {name: f"--{name}" for name in names.split()}


def refuse_but_one(where: str, options: Mapping[str, bool]) -> None:
    """Refuse two options, by name whether they are given, of which not exactly one is.

    Raises:
        ConfigError: neither, or both.
    """
    if sum(options.values()) != 1:
        got = "both" if any(options.values()) else "neither"
        raise ConfigError(where, expected=f"one of {' and '.join(options)}", got=got, remedy="Give exactly one.")


def refuse_beside(options: Mapping[str, object], expected: str, remedy: str, *, got: str | None = None) -> None:
    """Refuse every option that has a value; the remedy may name it as {option}.

    Raises:
        ConfigError, Problems: one or several of them.
    """
    raise_problems(
        [
            ConfigError(option, expected=expected, got=got or repr(value), remedy=remedy.replace("{option}", option))
            for option, value in options.items()
            if value is not None
        ]
    )


def refuse_recompute(recompute: str | None, capacity: object) -> None:
    """Refuse a kind of recomputation that there is not, and a capacity beside `auto`.

    Raises:
        ConfigError: one of these.
    """
    kinds = (*RECOMPUTE_KINDS, "auto")
    if recompute is not None and recompute not in kinds:
        raise unknown_name("--recompute", recompute, kinds)
    if recompute == "auto":
        refuse_beside(
            {"--capacity": capacity},
            "nothing beside --recompute auto: every kind has its own",
            "Leave out one of them.",
        )
