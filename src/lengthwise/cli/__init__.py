"""The command line: one file per verb, which imports the heavy libraries that it needs when it runs.

A verb's class has `run`, which returns the exit status, and `names`, from names of the library to what the user typed.
"""

from __future__ import annotations

import errno
import io
import os
import sys
from collections.abc import Sequence
from typing import Any

import tyro

from lengthwise.cli.checkpoint import Checkpoint
from lengthwise.cli.data import Data
from lengthwise.cli.demo import Demo
from lengthwise.cli.init import Init
from lengthwise.cli.output import fit_terminal
from lengthwise.cli.plan import PlanCommand
from lengthwise.cli.prepare import Prepare
from lengthwise.cli.profile import Profile
from lengthwise.cli.simulate import Simulate
from lengthwise.cli.train import Train
from lengthwise.cli.verify import Verify
from lengthwise.core import __version__
from lengthwise.core.environment import prepare_environment
from lengthwise.core.errors import ConfigError, LengthwiseError, leave_to_first_rank, printable
from lengthwise.core.names import did_you_mean, missing_package

_INTERRUPTED = 130
_STANDARD_ERROR = 2
_TROUBLES = {
    errno.ENOSPC: ("room on the disk", "a full disk"),
    errno.ENAMETOOLONG: ("a shorter file name", "one that is too long"),
}

VERBS: dict[str, tuple[type, str]] = {
    "init": (Init, "write a first run file for a model, GPUs and data"),
    "train": (Train, "train a model from a run file"),
    "plan": (PlanCommand, "plan one step, write the plan file (no torch needed)"),
    "simulate": (Simulate, "estimate steps on other machines (no torch needed)"),
    "verify": (Verify, "compare loss and gradients with plain Hugging Face"),
    "profile": (Profile, "measure this machine, for plan and simulate"),
    "checkpoint": (Checkpoint, "list, verify or export a run's checkpoints"),
    "prepare": (Prepare, "tokenize data into a folder"),
    "data": (Data, "describe data: lengths, bad rows, one row's mask"),
    "demo": (Demo, "see all of it in a few minutes, without a GPU"),
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command and exit with its status: 0 done, 1 failed, 2 input to be corrected, 130 interrupted."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    _open_closed_streams()
    prepare_environment()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # names of files in an ASCII log must not raise
    if arguments == ["--version"]:
        print(f"lengthwise {__version__}")
        raise SystemExit(0)
    if not arguments or arguments[0] in ("-h", "--help"):
        print(overview(), file=sys.stdout if arguments else sys.stderr)
        raise SystemExit(0 if arguments else 2)
    try:
        try:
            status = _status(arguments)
        finally:
            sys.stdout.flush()
    except BrokenPipeError:  # the reader of our output ended, as `| head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the interpreter's last flush
        status = 1
    except OSError as error:
        if error.errno == errno.ENOSPC:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        expected, got = _TROUBLES.get(error.errno or 0, ("a usable file", error.strerror or str(error)))
        where = printable(str(error.filename or "standard output or a file"))
        print(f"error[output] {where}: expected {expected}; got {got}", file=sys.stderr)
        status = 1
    raise SystemExit(status)


def _open_closed_streams() -> None:
    """Open /dev/null for closed standard streams; otherwise the next opened file would take their numbers."""
    while (opened := os.open(os.devnull, os.O_RDWR)) <= _STANDARD_ERROR:
        pass
    os.close(opened)
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115 - for the process's life
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115


def overview() -> str:
    """Return the help of `lengthwise`: one line per verb."""
    about = "Train language models on sequences of very different lengths."
    lines = [f"  {verb:<12}{what}" for verb, (_, what) in VERBS.items()]
    more = "lengthwise VERB --help lists its options."
    return "\n".join(["usage: lengthwise VERB ...", "", about, "", *lines, "", more])


def read_command(arguments: Sequence[str]) -> Any:
    """Parse a verb and its options; SystemExit for help or a wrong option."""
    verb, *options = arguments
    if verb not in VERBS:
        near = did_you_mean(verb, VERBS)
        remedy = f"{near or ''} `lengthwise --help` lists the verbs."
        raise ConfigError("lengthwise", expected="a verb", got=repr(verb), remedy=remedy.strip())
    return tyro.cli(VERBS[verb][0], args=options, prog=f"lengthwise {verb}")


def _status(arguments: list[str]) -> int:
    try:
        command = None
        try:
            command = read_command(arguments)
            return command.run()
        except LengthwiseError as error:
            leave_to_first_rank(error)
            names = {} if command is None or isinstance(command, Demo) else command.names()
            print(fit_terminal(error.render(names), sys.stderr), file=sys.stderr)
            return error.exit_status
    except ModuleNotFoundError as error:
        if (missing := missing_package(error)) is None:
            raise
        remedy = "Install them as the README says; only `lengthwise plan` and `simulate` run without them."
        print(f"error[install] this command: {missing}. {remedy}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as interrupt:
        print(f"interrupted: {interrupt.args[0] if interrupt.args else 'nothing was saved'}", file=sys.stderr)
        return _INTERRUPTED
