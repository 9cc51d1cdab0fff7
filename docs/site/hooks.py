"""Hooks of `make docs`: put into the command-line page what each verb's --help prints, at every build."""

import contextlib
import io
import os
import re
import textwrap
from typing import Any

from lengthwise.cli import VERBS, read_command

_MARK = re.compile(r"^<!-- help: (\w+) -->$", re.MULTILINE)
_WIDTH = 88  # columns that the site shows without a bar


def on_page_markdown(markdown: str, *, page: Any, **_: object) -> str:
    """Replace the marks of the command-line page."""
    return with_help(markdown) if page.file.src_uri == "cli.md" else markdown


def with_help(markdown: str) -> str:
    """Return a page with each `<!-- help: verb -->` replaced by that verb's help, as a block."""
    return _MARK.sub(lambda found: f"```text\n{help_of(found[1])}\n```", markdown)


def help_of(verb: str) -> str:
    """Return the help of a verb as plain text, without the frames that terminals get."""
    if verb not in VERBS:
        raise ValueError(f"lengthwise has no verb {verb}, which the command-line page names")
    said, before = io.StringIO(), os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = str(_WIDTH)
    try:
        with contextlib.redirect_stdout(said), contextlib.suppress(SystemExit):
            read_command([verb, "--help"])
    finally:
        os.environ.pop("COLUMNS")
        if before is not None:
            os.environ["COLUMNS"] = before
    lines: list[str] = []
    for line in re.sub(r"\x1b\[[0-9;]*m", "", said.getvalue()).splitlines():
        if found := re.match(r" (\w[\w ]*\w) *$", line):
            lines.append(f"{found[1]}:")  # the title of a frame
        elif not re.match(r" -+ *$", line):
            lines += textwrap.wrap(line, _WIDTH) if line[:1].strip() else [line.rstrip()]
    return "\n".join(lines)
