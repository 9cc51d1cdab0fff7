"""Hooks of `make docs`, at every build: the --help of each verb, and the modules that no GPU has run as they are."""

import contextlib
import io
import os
import re
import subprocess
import textwrap
from pathlib import Path
from typing import Any

from lengthwise.cli import VERBS, read_command

_MARK = re.compile(r"^<!-- help: (\w+) -->$", re.MULTILINE)
_WIDTH = 88  # columns that the site shows without a bar
_STAMP = re.compile(r"^<!-- changed since: ([0-9a-f]{7,}) -->$", re.MULTILINE)
_ROOT = Path(__file__).parents[2]
_ON_GPUS = ("attention", "comm", "engine", "models", "offload", "session", "integrations")  # packages that run there


def on_page_markdown(markdown: str, *, page: Any, **_: object) -> str:
    """Replace the marks of the pages on commands and GPUs."""
    pages = {"cli.md": with_help, "gpu.md": with_changes}
    return pages[page.file.src_uri](markdown) if page.file.src_uri in pages else markdown


def with_changes(markdown: str) -> str:
    """Return a page with its stamp replaced by the modules that changed since its commit.

    ValueError: no stamp, or a commit that is not in the history.
    """
    if not (stamp := _STAMP.search(markdown)):
        raise ValueError("the page on GPUs has no stamp: <!-- changed since: COMMIT -->")
    folders = [f"src/lengthwise/{name}" for name in _ON_GPUS]
    git = ["git", "-C", str(_ROOT), "diff", "--name-only", stamp[1], "--", *folders]
    ran = subprocess.run(git, capture_output=True, text=True)  # noqa: S603 - git, by a commit of the page
    if ran.returncode:
        raise ValueError(f"git cannot compare with commit {stamp[1]}, at which a GPU ran: {ran.stderr.strip()}")
    changed: dict[str, list[str]] = {}
    for path in map(Path, ran.stdout.split()):
        changed.setdefault(path.parts[2], []).append(f"`{path.stem}`")
    lines = [f"- **{package}**: {', '.join(names)}" for package, names in sorted(changed.items())]
    text = "\n".join([f"Changed since commit {stamp[1]}, not run on a GPU as they are:", "", *lines])
    return markdown.replace(stamp[0], text if lines else f"Nothing that runs on a GPU changed since {stamp[1]}.")


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
