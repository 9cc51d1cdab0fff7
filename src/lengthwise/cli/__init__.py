"""The command line: one file a verb. Heavy libraries are imported by the verb that needs them, when it runs."""

from __future__ import annotations

import errno
import io
import os
import sys
from collections.abc import Sequence
from typing import Annotated, Any, Union

import tyro

from lengthwise.cli.checkpoint import Checkpoint
from lengthwise.cli.data import Data
from lengthwise.cli.demo import Demo
from lengthwise.cli.init import Init
from lengthwise.cli.launch import Launch
from lengthwise.cli.machine import prepare_environment
from lengthwise.cli.plan import PlanCommand
from lengthwise.cli.prepare import Prepare
from lengthwise.cli.profile import Profile
from lengthwise.cli.simulate import Simulate
from lengthwise.cli.train import Train
from lengthwise.cli.verify import Verify
from lengthwise.core import __version__
from lengthwise.core.errors import LengthwiseError, printable
from lengthwise.core.names import missing_package

_INTERRUPTED = 130
_STANDARD_ERROR = 2
_TROUBLES = {
    errno.ENOSPC: ("room for what is written", "a full disk"),
    errno.ENAMETOOLONG: ("a name that a file can have", "one that is too long"),
}

_VERBS: dict[str, tuple[type, str | None]] = {
    "init": (Init, None),
    "train": (Train, "Train a model from a run file."),
    "launch": (Launch, None),
    "plan": (PlanCommand, "Plan one step and write the plan file; needs no torch."),
    "simulate": (Simulate, "Simulate steps on machines that you do not have; needs no torch."),
    "verify": (Verify, None),
    "profile": (Profile, None),
    "checkpoint": (Checkpoint, None),
    "prepare": (Prepare, None),
    "data": (Data, None),
    "demo": (Demo, "See all of it in a few minutes, with no GPU and no download."),
}
Command: Any = Union[  # noqa: UP007 - of a tuple
    tuple(
        Annotated[verb, tyro.conf.subcommand(name, prefix_name=False, description=description)]
        for name, (verb, description) in _VERBS.items()
    )
]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command and exit with its status: 0 done, 1 failed, 2 input to be corrected, 130 interrupted."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    _open_closed_streams()
    prepare_environment()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a file's name in an ASCII log is no reason to die
    if arguments == ["--version"]:
        print(f"lengthwise {__version__}")
        raise SystemExit(0)
    try:
        try:
            status = _status(arguments)
        finally:
            sys.stdout.flush()
    except BrokenPipeError:  # the reader of our output went away, as `| head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the interpreter's own last flush
        status = 1
    except OSError as error:
        if error.errno == errno.ENOSPC:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        expected, got = _TROUBLES.get(error.errno or 0, ("one that can be used", error.strerror or str(error)))
        where = printable(str(error.filename or "standard output or a file"))
        print(f"error[output] {where}: expected {expected}; got {got}", file=sys.stderr)
        status = 1
    raise SystemExit(status)


def _open_closed_streams() -> None:
    """Open /dev/null for closed standard streams, or the next file opened would take their numbers."""
    while (opened := os.open(os.devnull, os.O_RDWR)) <= _STANDARD_ERROR:
        pass
    os.close(opened)
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115 - for the process's life
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115


def _command(arguments: list[str]) -> Any:
    """Parse arguments with the verb's own options only, so that no other verb's are suggested."""
    verb = arguments[0]
    if verb in _VERBS:
        kind, description = _VERBS[verb]
        return tyro.cli(kind, args=arguments[1:], prog=f"lengthwise {verb}", description=description)
    about = "Train language models on sequences of very different lengths with Hybrid Data Parallelism."
    return tyro.cli(Command, args=arguments, prog="lengthwise", description=about)


def _status(arguments: list[str]) -> int:
    try:
        command = _command(arguments or ["--help"])
        try:
            return command.run()
        except LengthwiseError as error:
            names = {} if isinstance(command, Demo) else command.names()
            print(error.render(names), file=sys.stderr)
            return error.exit_status
    except ModuleNotFoundError as error:
        if (missing := missing_package(error)) is None:
            raise
        remedy = "Install them as the README says; only `lengthwise plan` and `simulate` run without."
        print(f"error[install] this command: {missing}. {remedy}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as interrupt:
        print(f"interrupted: {interrupt.args[0] if interrupt.args else 'nothing was saved'}", file=sys.stderr)
        return _INTERRUPTED
