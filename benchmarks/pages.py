"""What a benchmark finds: printed line by line, and at the end written into its page, docs/benchmarks/NAME.md.

A page is written by hand but for what stands between <!-- NAME: begin --> and <!-- NAME: end -->, which the benchmark
replaces. The last line there says whether the figures were modelled or measured, the command, date, commit and machine.
"""

from __future__ import annotations

import argparse
import os
import platform
import shlex
import subprocess
import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from datetime import date
from pathlib import Path
from typing import Any

from lengthwise.simulator import gain_over

FOLDER = Path(__file__).parents[1] / "docs" / "benchmarks"


class Findings:
    """The lines of one benchmark, whose name is that of its marks and of its page."""

    def __init__(self, name: str) -> None:
        self._name, self._lines = name, list[str]()

    def add(self, lines: Iterable[str]) -> None:
        """Print lines as they are found, and keep them."""
        for line in lines:
            print(line, flush=True)
            self._lines.append(line)

    def sign(self, how: str, about: str, page: Path | None) -> None:
        """Add how the figures were found (`Modelled`, `Measured`), by which command, when, where, and `about`.

        Then replace what stands between the marks of `page`, if one is given.

        Raises:
            SystemExit: the page has no such marks.
        """
        machine = f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"
        made = f"{how} by `{_command()}` on {date.today().isoformat()}, commit {commit_name()}; {machine}"
        self.add(["", *textwrap.wrap(f"{made}; {about}.", 120, break_long_words=False, break_on_hyphens=False)])
        if page is None:
            return
        begin, end = (f"<!-- {self._name}: {part} -->" for part in ("begin", "end"))
        before, mark, rest = page.read_text(encoding="utf-8").partition(begin)
        _, last, after = rest.partition(end)
        if not (mark and last):
            raise SystemExit(f"{page}: expected the lines {begin} and {end}; nothing was written")
        page.write_text("\n".join([before + begin, *self._lines, end + after]), encoding="utf-8")


def parse_options(document: str | None, **options: Any) -> argparse.Namespace:
    """Parse the options of a benchmark, and `--out PAGE`: each has its default, or (default, what it is).

    False: a switch; a list: the choices, of which the first is the default.
    """
    parser = argparse.ArgumentParser(description=document, formatter_class=argparse.RawDescriptionHelpFormatter)
    options["out"] = Path(), "a page of docs/benchmarks with the marks of this benchmark"
    for name, each in options.items():
        default, told = each if isinstance(each, tuple) else (each, None)
        kinds: dict[str, Any] = {"type": type(default), "default": default}
        if default is False:
            kinds = {"action": "store_true"}
        elif isinstance(default, list):
            kinds = {"choices": default, "default": default[0]}
        elif default == Path():
            kinds = {"type": Path}
        parser.add_argument(f"--{name.replace('_', '-')}", help=told, **kinds)
    return parser.parse_args()


def markdown(heads: str, rows: Iterable[Iterable[object]]) -> Iterator[str]:
    """Yield the lines of a table as its rows come; heads: with | between them."""
    yield f"| {heads} |"
    yield "|---" * len(heads.split(" | ")) + "|"
    yield from (f"| {' | '.join(map(str, row))} |" for row in rows)


def verdict(is_met: bool) -> str:
    """Say whether an aim is met."""
    return "met" if is_met else "**missed**"


def modelled_gain(other_seconds: Sequence[float], our_seconds: Sequence[float]) -> str:
    """Write by how much longer these batches take in another way: `equal` where that is within the model's error.

    Of these batches and no others, so that what they differ by is no error.
    """
    return str(gain_over([sum(other_seconds)], [sum(our_seconds)]))


def _command() -> str:
    """Return the command line that runs, without `--out`."""
    words, skipped = [f"benchmarks/{Path(sys.argv[0]).name}"], False
    for word in sys.argv[1:]:
        if not skipped and word != "--out" and not word.startswith("--out="):
            words.append(word)
        skipped = word == "--out"
    return f"python {shlex.join(words)}"


def commit_name() -> str:
    """Return the short name of the newest commit of main that this tree stands on, with + where files differ from it.

    A commit of another branch may be gone once that was rebased.
    """
    git = ["git", "-C", str(Path(__file__).parent)]

    def ask(*words: str) -> str:
        try:
            return subprocess.run([*git, *words], capture_output=True, text=True).stdout.strip()
        except OSError:  # no git on this machine
            return ""

    base = ask("merge-base", "HEAD", "main") or ask("rev-parse", "HEAD")
    return (ask("rev-parse", "--short=7", base) or "unknown") + "+" * bool(base and ask("diff", "--name-only", base))
