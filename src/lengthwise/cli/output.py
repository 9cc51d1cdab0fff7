"""What the commands of the pure half print on, and how they write their files: whole or not at all."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import TextIO

from rich.console import Console

from lengthwise.core.errors import OutputError
from lengthwise.core.files import replace_file


def plain_console() -> Console:
    """Make a console that prints names of files as they are, and cuts nothing."""
    return Console(highlight=False, soft_wrap=True, markup=False, emoji=False)


def fit_terminal(text: str, stream: TextIO) -> str:
    """Return text with lines that end at words where `stream` is a terminal; those of code and of a file are whole."""
    if not stream.isatty():
        return text
    from lengthwise.report.tables import wrapped

    width = shutil.get_terminal_size().columns
    return "\n".join(line if line.startswith("    ") else wrapped(line, width, "  ") for line in text.split("\n"))


def refuse_unwritable(folder: Path) -> None:
    """Raise OutputError for a folder that could not be made or written into, before what takes long; leave nothing."""
    there = next(each for each in (folder, *folder.absolute().parents) if each.exists())
    got = "" if there.is_dir() else f"{there}, which is no folder"
    if not got:
        try:
            tempfile.TemporaryFile(dir=there).close()  # root has leave everywhere, and /proc takes no file of root's
        except OSError as error:
            got = f"no leave to write into {there} ({error.strerror or error})"
    if got:
        raise OutputError(str(folder), expected="a folder to write into", got=got, remedy="Choose another --out.")


def refuse_unwritable_file(path: Path) -> None:
    """Raise OutputError, before what takes long, for a file that cannot be written or is a device or pipe."""
    got = "a folder" if path.is_dir() else "a device or a pipe" if _is_special(path) else ""
    if got:
        raise OutputError(str(path), expected="a file to write", got=got, remedy="Choose another --out.")
    refuse_unwritable(path.parent)


def _is_special(path: Path) -> bool:
    """Return whether a path is no place for a plain file, as /dev/stdout."""
    return (path.exists() and not path.is_file()) or str(path.absolute().parent) in ("/dev", "/dev/fd", "/proc/self/fd")


def write_atomically(path: Path, text: str) -> None:
    """Write a file whole or not at all; OutputError: it cannot be written, or is no plain file."""
    path = path.resolve()  # what a link names is written, and the link stays
    refuse_unwritable_file(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, text)
    except OSError as error:
        got = error.strerror or str(error)
        raise OutputError(str(path), expected="a file to write", got=got, remedy="Choose another --out.") from None
