"""Commands with a time limit, whose ranks end with them."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

_GRACE_SECONDS = 5.0


def run_limited(command: Sequence[str], log: Path, limit_seconds: float) -> str:
    """Run a command, its output into a file; return how it ended: ok, its status, or that it ran into its limit."""
    with log.open("w", encoding="utf-8") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            status = process.wait(timeout=limit_seconds)
            return f"status {status}" if status else "ok"
        except subprocess.TimeoutExpired:
            return "time limit"
        finally:
            _end_group(process)


def last_lines(log: Path, number: int) -> list[str]:
    """Return the last lines of a command's output."""
    return log.read_text(encoding="utf-8", errors="replace").splitlines()[-number:]


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """End what is left of a command's session: ranks that it forked hold a GPU's memory."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
            process.wait(timeout=_GRACE_SECONDS)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            continue
    process.wait()
