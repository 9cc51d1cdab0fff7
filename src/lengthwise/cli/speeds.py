"""Speeds of ranks as a user types them: a list, runs of neighbours, thousands of ranks in one line, or a file."""

from __future__ import annotations

from pathlib import Path

from lengthwise.core.files import read_json
from lengthwise.planner.problem.speeds import refuse_speeds

_MOST = 2**20  # ranks in a run


def parse_speeds(text: str, where: str = "--speeds") -> list[float]:
    """Read speeds as a user types them: `1,1,0.5`, runs like `8x1.0,8x0.6`, or the name of a JSON file with a list.

    Raises:
        ConfigError: an entry that is neither a number nor a run of one, or a file without a list of speeds.
    """
    if text.endswith(".json"):
        return _speeds_of_file(Path(text))
    speeds: list[float] = []
    for number, entry in enumerate(text.split(",")):
        count, _, speed = entry.strip().rpartition("x") if "x" in entry else ("1", "", entry)
        try:
            speeds += [float(speed)] * _count(count)
        except ValueError:
            expected = "a speed, or COUNTxSPEED for neighbouring ranks, as in 8x1.0,8x0.6"
            raise refuse_speeds(f"{where}: entry {number + 1}", expected, repr(entry)) from None
    return speeds


def _speeds_of_file(path: Path) -> list[float]:
    try:
        speeds = read_json(path)
    except ValueError as error:
        raise refuse_speeds(str(path), "a JSON list of speeds", str(error)) from None
    if not isinstance(speeds, list):
        raise refuse_speeds(str(path), "a JSON list of speeds", type(speeds).__name__)
    return speeds


def _count(text: str) -> int:
    count = int(text)
    if not 0 < count <= _MOST:
        raise ValueError(text)
    return count
