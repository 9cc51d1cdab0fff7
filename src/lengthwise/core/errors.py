"""The error tree: every error that a user sees says where, what was expected, what was got, and what to change.

`exit_status` is 2 for invalid input and 1 for a failure while running. Errors name library options; a command passes
its own names to `render`, as a table: {"capacity_tokens": "--capacity"}.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import ParamSpec, TypeVar

Result = TypeVar("Result")
Arguments = ParamSpec("Arguments")

_TURN_SECONDS = 5.0  # in which torchrun ends a machine's other ranks once the first has failed

_CODE_LINE = re.compile(r"\n(?=    )")  # in a remedy
_PLACEHOLDER = re.compile(r"\{([a-z_]+)(?:\|([^{}]+))?\}")


class LengthwiseError(Exception):
    """One problem, reported in one line; indented lines of code in a remedy stay lines.

    where: a file and row (`train.jsonl:3`), a config path (`optimizer.lr`), or a rank, step and phase. expected,
    remedy: texts that name options in braces, "{capacity_tokens}", with other words if a command may lack the option:
    "{clip|leave it out}". got: text without such names.
    """

    code = "error"  # short, stable and searchable
    exit_status = 1
    place = ""  # file and line of a run file's key; the message is then "PLACE WHERE: got -> expected. remedy"
    had_turn = False  # whether it has waited for the first rank's (see `leave_to_first_rank`)

    def __init__(self, where: str, *, expected: str, got: str, remedy: str) -> None:
        super().__init__(where, expected, got, remedy)
        self.where, self.expected, self.got, self.remedy = where, expected, got, remedy

    @property
    def key(self) -> str:
        """Option or config path at fault: the first word of `where`."""
        return self.where.partition(" ")[0].partition(":")[0]

    def render(self, names: Mapping[str, str]) -> str:
        """Return the message with options replaced by their `names`; others keep their own name."""
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
    r"""Return a line with its control characters escaped as in Python (\x1b), so that it cannot steer a terminal."""
    return line if line.isprintable() else "".join(each if each.isprintable() else repr(each)[1:-1] for each in line)


def _filled(template: str, names: Mapping[str, str]) -> str:
    """Replace each `{name}` or `{name|words}` by `names[name]`, else by its words, else by the name itself."""
    return _PLACEHOLDER.sub(lambda found: names.get(found[1], found[2] or found[1]), template)


def _rebuild(kind: type[LengthwiseError], where: str, expected: str, got: str, remedy: str) -> LengthwiseError:
    return kind(where, expected=expected, got=got, remedy=remedy)


class ConfigError(LengthwiseError):
    """A run file or a command-line value that cannot be used."""

    code, exit_status = "config", 2


class KeyProblem(ConfigError):  # noqa: N818 - one of several in a message
    """A key or value of a run file that cannot be used; its remedy replaces what was expected."""

    def _text(self, expected: str, remedy: str) -> str:
        return f"{self.got} -> {remedy or expected}"


class DataError(LengthwiseError):
    """A data file or one of its rows that cannot be trained on."""

    code, exit_status = "data", 2


class PlanError(LengthwiseError):
    """A plan that breaks a rule of the plan file, or lengths that no plan can hold."""

    code, exit_status = "plan", 2


class ModelRefused(LengthwiseError):  # noqa: N818 - the name says what happened
    """A model with a part that a plan would compute wrongly."""

    code, exit_status = "model", 2


class OutputError(LengthwiseError):
    """An output folder that cannot be written, or holds an earlier run."""

    code, exit_status = "output", 2


class WriteError(OutputError):
    """A file that could not be written during a run: a full disk, a removed folder."""

    exit_status = 1


class TransferError(LengthwiseError):
    """A transfer between ranks that timed out or lost its peer; the cause is an error on another rank."""

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
    """A user's callback that raised."""

    code = "callback"


class Problems(LengthwiseError):  # noqa: N818 - a list of errors
    """Several problems, one line each, so that a user can correct them all before the next try."""

    code = "problems"

    def __init__(self, problems: Sequence[LengthwiseError]) -> None:
        assert problems, "Problems needs at least one problem"
        super().__init__("", expected="", got="", remedy="")
        self.problems = tuple(problems)
        self.exit_status = max(problem.exit_status for problem in problems)

    def render(self, names: Mapping[str, str]) -> str:
        """Return one line per problem."""
        return "\n".join(problem.render(names) for problem in self.problems)

    def __reduce__(self) -> tuple[object, ...]:
        return Problems, (self.problems,)


class Collector:
    """Collects errors and raises them together."""

    def __init__(self) -> None:
        self.problems: list[LengthwiseError] = []
        self._lines: set[str] = set()

    def attempt(self, call: Callable[[], Result]) -> Result | None:
        """Return the result of `call`; if it raises an error of ours, keep the error and return None."""
        try:
            return call()
        except Problems as several:
            for error in several.problems:
                self.add(error)
        except LengthwiseError as error:
            self.add(error)
        return None

    def add(self, error: LengthwiseError) -> None:
        """Keep an error, once."""
        if str(error) not in self._lines:
            self._lines.add(str(error))
            self.problems.append(error)

    def raise_all(self) -> None:
        """Raise the kept errors, if any (see `raise_problems`)."""
        raise_problems(self.problems)


def raise_problems(problems: Sequence[LengthwiseError]) -> None:
    """Raise the only error, or `Problems` if there are several; return if there are none."""
    if len(problems) == 1:
        raise problems[0]
    if problems:
        raise Problems(problems)


def short_traceback(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Make a public call raise errors of ours without the frames below it: their text says what to change."""

    @wraps(function)
    def call(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        try:
            return function(*args, **kwargs)
        except LengthwiseError as error:
            leave_to_first_rank(error)
            if error.__cause__ is not None:  # it may be the user's own error
                raise
            raise error.with_traceback(None) from None

    return call


def leave_to_first_rank(error: LengthwiseError) -> None:
    """Wait a moment, once an error, on other ranks than a machine's first, which torchrun ends when the first fails.

    So an error of all ranks is read once; a rank whose error is its own shows it after the wait. Where a process
    handles torchrun's SIGTERM itself, as inside of a run, the signal does not end it, so there is no wait.
    """
    is_other = "TORCHELASTIC_RUN_ID" in os.environ and os.environ.get("LOCAL_RANK", "0") != "0"
    if is_other and not error.had_turn and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
        error.had_turn = True
        time.sleep(_TURN_SECONDS)


def as_values(problems: Sequence[LengthwiseError]) -> list[tuple[str, ...]]:
    """Return errors as JSON values, which another process reads with `from_values`."""
    return [(_kind(each), each.where, each.expected, each.got, each.remedy, each.place) for each in problems]


def from_values(values: Sequence[Sequence[str]]) -> list[LengthwiseError]:
    """Return the errors of `as_values`."""
    found = []
    for kind, where, expected, got, remedy, place in values:
        error: LengthwiseError = globals()[kind](where, expected=expected, got=got, remedy=remedy)
        error.place = place
        found.append(error)
    return found


def _kind(error: LengthwiseError) -> str:
    """Return the name of the error's class, or of its nearest base in this module."""
    return next(kind.__name__ for kind in type(error).__mro__ if kind.__module__ == __name__)
