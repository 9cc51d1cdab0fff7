"""The error tree: every error a user can meet says where, what was expected, what was got, and what to change.

`exit_status`: 2 for a user's own input, 1 for what went wrong while running. Errors name library options; a command
prints its own with `render` and a table: {"capacity_tokens": "--capacity"}.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

Result = TypeVar("Result")

_CODE_LINE = re.compile(r"\n(?=    )")  # of a remedy
_PLACEHOLDER = re.compile(r"\{([a-z_]+)(?:\|([^{}]+))?\}")


class LengthwiseError(Exception):
    """One problem, reported in one line; lines of code in a remedy, indented by 4, keep their own.

    where: a file and row (`train.jsonl:3`), a config path (`optimizer.lr`), or a rank, step and phase.
    expected, remedy: name other options in braces, "{capacity_tokens}", or with other words where no command has such
    an option: "{clip|leave it out}". got: quoted as it is.
    """

    code = "error"  # short and stable, to search for
    exit_status = 1
    place = ""  # of a run file's key: file and line, before `where`; an arrow then leads from what is there

    def __init__(self, where: str, *, expected: str, got: str, remedy: str) -> None:
        super().__init__(where, expected, got, remedy)
        self.where, self.expected, self.got, self.remedy = where, expected, got, remedy

    @property
    def key(self) -> str:
        """The option or config path concerned: the first word of `where`."""
        return self.where.partition(" ")[0].partition(":")[0]

    def render(self, names: Mapping[str, str]) -> str:
        """Return the line with options called by `names`; one that is not in it keeps its own."""
        where = f"{self.place} {names.get(self.key, self.key)}{self.where[len(self.key) :]}"
        text = self._text(_filled(self.expected, names), _filled(self.remedy, names))
        first, *code = _CODE_LINE.split(f"error[{self.code}] {where}: {text}")
        return "\n".join(map(printable, [" ".join(first.split()), *(line.rstrip() for line in code)]))

    def _text(self, expected: str, remedy: str) -> str:
        if self.place:
            return f"{self.got} -> {expected}. {remedy}"
        return f"expected {expected}; got {self.got}. {remedy}"

    def __str__(self) -> str:
        return self.render({})

    def __reduce__(self) -> tuple[object, ...]:  # keyword arguments do not survive the default pickling
        return _rebuild, (type(self), self.where, self.expected, self.got, self.remedy), {"place": self.place}


def printable(line: str) -> str:
    """Return a line whose control characters, which would steer a terminal, are written as in Python: \\x1b."""
    return line if line.isprintable() else "".join(each if each.isprintable() else repr(each)[1:-1] for each in line)


def _filled(template: str, names: Mapping[str, str]) -> str:
    """Fill each `{name}` and `{name|words}` with its name in `names`, else its words, else the name itself."""
    return _PLACEHOLDER.sub(lambda found: names.get(found[1], found[2] or found[1]), template)


def _rebuild(kind: type[LengthwiseError], where: str, expected: str, got: str, remedy: str) -> LengthwiseError:
    return kind(where, expected=expected, got=got, remedy=remedy)


class ConfigError(LengthwiseError):
    """A run file or a command-line value that cannot be used."""

    code, exit_status = "config", 2


class KeyProblem(ConfigError):  # noqa: N818 - one of a run file's
    """A key or value of a run file that cannot be used; its remedy stands for what was expected."""

    def _text(self, expected: str, remedy: str) -> str:
        return f"{self.got} -> {remedy or expected}"


class DataError(LengthwiseError):
    """A data file or one of its rows that cannot be trained on."""

    code, exit_status = "data", 2


class PlanError(LengthwiseError):
    """A plan that breaks a rule of the plan file, or lengths for which there is none."""

    code, exit_status = "plan", 2


class ModelRefused(LengthwiseError):  # noqa: N818 - the name says what happened
    """A model with a part that a plan would compute wrongly; it is refused by name instead."""

    code, exit_status = "model", 2


class OutputError(LengthwiseError):
    """An output folder that cannot be written, or holds an earlier run."""

    code, exit_status = "output", 2


class WriteError(OutputError):
    """A file that could not be written while a run went on: a full disk, a folder that was removed."""

    exit_status = 1


class TransferError(LengthwiseError):
    """A transfer between ranks that timed out or lost its peer: it follows from an error elsewhere."""

    code = "transfer"


class RankError(LengthwiseError):
    """A rank that died, hung, or disagrees with the others."""

    code = "rank"


class MemoryShortage(LengthwiseError):  # noqa: N818 - the name says what happened
    """Work that does not fit into the memory of a device."""

    code = "memory"


class NumericError(LengthwiseError):
    """A loss or gradient that is not finite."""

    code = "numeric"


class CallbackError(LengthwiseError):
    """A callback of the user's that raised."""

    code = "callback"


class Problems(LengthwiseError):  # noqa: N818 - a list of errors
    """Several problems at once, one line each; a user corrects them all before the next try."""

    code = "problems"

    def __init__(self, problems: Sequence[LengthwiseError]) -> None:
        assert problems, "Problems needs at least one problem"
        super().__init__("", expected="", got="", remedy="")
        self.problems = tuple(problems)
        self.exit_status = max(problem.exit_status for problem in problems)

    def render(self, names: Mapping[str, str]) -> str:
        """Return one line a problem."""
        return "\n".join(problem.render(names) for problem in self.problems)

    def __reduce__(self) -> tuple[object, ...]:
        return Problems, (self.problems,)


class Collector:
    """Collect errors and raise them together."""

    def __init__(self) -> None:
        self.problems: list[LengthwiseError] = []
        self._lines: set[str] = set()

    def attempt(self, call: Callable[[], Result]) -> Result | None:
        """Return what `call` returns; None when it raises an error of ours, which is kept."""
        try:
            return call()
        except Problems as several:
            for error in several.problems:
                self.add(error)
        except LengthwiseError as error:
            self.add(error)
        return None

    def add(self, error: LengthwiseError) -> None:
        """Keep an error that is not among the kept ones already."""
        if str(error) not in self._lines:
            self._lines.add(str(error))
            self.problems.append(error)

    def raise_all(self) -> None:
        """Raise what was kept, if anything."""
        raise_problems(self.problems)


def raise_problems(problems: Sequence[LengthwiseError]) -> None:
    """Raise what was collected: nothing for none, the error itself for one, `Problems` for more."""
    if len(problems) == 1:
        raise problems[0]
    if problems:
        raise Problems(problems)
