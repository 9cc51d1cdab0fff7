"""Parts of a script, each a process with a time limit: the next one runs whatever became of those before it.

A part writes what it finds itself; here only how it ended is written, and what it printed (`FOLDER/NAME.log`).
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from subprocess import Popen

ROOT = Path(__file__).parents[2]
_GRACE_SECONDS = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A command that may take `limit_seconds`; `environment` is added to that of this process."""

    name: str
    command: tuple[str, ...]
    limit_seconds: float
    environment: Mapping[str, str]


def python_path() -> str:
    """Return PYTHONPATH with this tree before what is there: nothing of it need be installed."""
    there = os.environ.get("PYTHONPATH")
    return os.pathsep.join(
        [*(str(ROOT / each) for each in ("src", "benchmarks", "tests")), *([there] if there else [])]
    )


def run_parts(script: str, parts: Sequence[Part], folder: Path) -> list[str]:
    """Run all parts, one after the other; return the names of those that failed or ran into their limit."""
    folder.mkdir(parents=True, exist_ok=True)
    wrong = []
    for part in parts:
        print(f"{script}: {part.name}, at most {part.limit_seconds:g} s", flush=True)
        start = time.perf_counter()
        status = _run(part, folder / f"{part.name}.log")
        ended = "time limit" if status is None else "ok" if status == 0 else f"status {status}"
        row = {
            "table": "part",
            "script": script,
            "name": part.name,
            "ended": ended,
            "seconds": time.perf_counter() - start,
            "limit_seconds": part.limit_seconds,
        }
        with (folder / f"{script}-parts.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        print(f"{script}: {part.name}: {ended} after {row['seconds']:.1f} s", flush=True)
        if ended != "ok":
            wrong.append(part.name)
            print(*_last_lines(folder / f"{part.name}.log"), sep="\n", flush=True)
    return wrong


def _run(part: Part, log: Path) -> int | None:
    """Return the exit status; None: it was ended at its limit, with all that it had started."""
    with log.open("w", encoding="utf-8") as out:
        process = Popen(
            part.command,
            stdout=out,
            stderr=subprocess.STDOUT,
            env={**os.environ, **part.environment},
            start_new_session=True,
        )
        try:
            return process.wait(timeout=part.limit_seconds)
        except subprocess.TimeoutExpired:
            return None
        finally:
            _end_group(process)


def _end_group(process: Popen[bytes]) -> None:
    """End what is left of a part's session: ranks that it forked hold a GPU's memory."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            break
        try:
            process.wait(timeout=_GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            continue
    process.wait()


def _last_lines(log: Path, number: int = 15) -> list[str]:
    return log.read_text(encoding="utf-8", errors="replace").splitlines()[-number:]
