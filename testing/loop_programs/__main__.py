"""Run many random programs: `python -m testing.loop_programs --programs 2000 --seed 0 --seconds 600`."""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import torch

from testing.loop_programs.judge import WAIT_SECONDS, Verdict, shortest, verdicts
from testing.loop_programs.program import Program, draw_program

_AT_ONCE = 24
_TRIES = 5  # programs made short, of those that fail at the same kind of operation by the same harm


def main() -> int:
    """Print how programs ended, and each failure's seed and shortest program; return 1 where there is one."""
    parser = argparse.ArgumentParser(prog="python -m testing.loop_programs", description=main.__doc__)
    parser.add_argument("--programs", type=int, default=2000, help="how many")
    parser.add_argument("--seed", type=int, default=0, help="of the first; the others follow")
    parser.add_argument("--seconds", type=float, default=600.0, help="begin no more programs after these")
    parser.add_argument("--most-ranks", type=int, default=4, help="of a program")
    parser.add_argument("--wait-seconds", type=float, default=WAIT_SECONDS, help="that a rank waits for another")
    parser.add_argument("--program", help="run one program instead, as JSON or a file of it")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    if asked.program is not None:
        text = asked.program if asked.program.startswith("{") else Path(asked.program).read_text()
        programs, seeds = [Program.from_json(text)], [-1]
        (verdict,) = verdicts(programs, wait_seconds=asked.wait_seconds)
        print(f"{programs[0]}\n{verdict.kind} {verdict.why}")
        return int(verdict.kind == "failed")
    end, counts, failures = time.monotonic() + asked.seconds, Counter[str](), _Failures(wait_seconds=asked.wait_seconds)
    for first in range(asked.seed, asked.seed + asked.programs, _AT_ONCE):
        if time.monotonic() > end:
            break
        seeds = range(first, min(first + _AT_ONCE, asked.seed + asked.programs))
        programs = [draw_program(each, most_ranks=asked.most_ranks) for each in seeds]
        found = verdicts(programs, wait_seconds=asked.wait_seconds)
        for seed, program, verdict in zip(seeds, programs, found, strict=True):
            counts[verdict.kind] += 1
            if verdict.kind == "failed":
                failures.report(seed, program, verdict)
    print(f"{counts.total()} programs: {', '.join(f'{n} {kind}' for kind, n in counts.most_common())}", flush=True)
    return int(counts["failed"] > 0)


@dataclass(slots=True, kw_only=True)
class _Failures:
    """What failed so far; each kind is made short and printed once."""

    wait_seconds: float
    tried: Counter[tuple[str, str]] = field(default_factory=Counter)
    known: set[tuple[str, ...]] = field(default_factory=set)

    def report(self, seed: int, program: Program, verdict: Verdict) -> None:
        seen = verdict.harm, next((each.name for each in program.operations[verdict.place or 0 :]), "the end")
        self.tried[seen] += 1
        if self.tried[seen] > _TRIES:
            return
        less = shortest(program, wait_seconds=self.wait_seconds)
        kind = (verdict.harm, *(each.name for each in less.operations))
        if kind not in self.known:
            self.known.add(kind)
            (verdict,) = verdicts([less], wait_seconds=self.wait_seconds)
            print(f"seed {seed}, {verdict.harm}: {verdict.why}\n{less}\n  {less.to_json()}\n", flush=True)


if __name__ == "__main__":
    sys.exit(main())
