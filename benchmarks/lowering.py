"""How long a rank takes to lower a ring it is in: its own rounds and blocks, beside the rounds of all its ranks.

    python benchmarks/lowering.py [--degrees 64 256 512] [--repeats 3]

What the first attention layer of a microbatch does before it starts, forward and backward, for one sequence of 4,096
tokens a rank: without a window, with a window of a tenth of the sequence, and with groups of eight ranks that split
heads. Process seconds of one core, the median of some repeats.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence

from testing import make_plan

from lengthwise.attention.ring_steps import ring_steps_of
from lengthwise.core.plan import Piece
from lengthwise.program import MicrobatchProgram, lower_microbatch, ring_order
from pages import Findings, add_out

TOKENS = 4096


def lowered(degree: int, *, window: bool = False, heads: int = 1) -> MicrobatchProgram:
    """Make a fresh program of one ring, with nothing lowered yet."""
    tokens = TOKENS * degree
    piece = Piece(ranks=ring_order(0, degree, heads), sequences=(0,), heads=heads)
    return lower_microbatch(make_plan(degree, [tokens], [piece]), 0).with_window(tokens // 10 if window else None)


def own(program: MicrobatchProgram) -> None:
    """Lower the ring steps of rank 3."""
    ring_steps_of(program, 3, packs_on=None)


def everyone(program: MicrobatchProgram) -> None:
    """Lower the rounds of all ranks, and the blocks of rank 3."""
    _ = program.forward_rounds, program.backward_rounds
    for ring_step in range(program.ring_steps):
        program.tasks(3, ring_step)


def seconds(work: Callable[[MicrobatchProgram], None], make: Callable[[], MicrobatchProgram], repeats: int) -> float:
    """Return the median process seconds of `work` on fresh programs."""
    taken = []
    for _ in range(repeats):
        program, start = make(), time.process_time()
        work(program)
        taken.append(time.process_time() - start)
    return statistics.median(taken)


def row(degree: int, repeats: int) -> Sequence[float]:
    """Return seconds: own rounds, with a window, with split heads; then the rounds of all."""
    return (
        seconds(own, lambda: lowered(degree), repeats),
        seconds(own, lambda: lowered(degree, window=True), repeats),
        seconds(own, lambda: lowered(degree, heads=8), repeats),
        seconds(everyone, lambda: lowered(degree), 1),
    )


def main() -> None:
    """Print one row a degree, and write them into a page if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--degrees", type=int, nargs="+", default=[64, 256, 512], help="multiples of 8")
    parser.add_argument("--repeats", type=int, default=3)
    add_out(parser, "lowering")
    options, findings = parser.parse_args(), Findings("lowering")
    findings.add(
        [
            "| degree | one rank | with a window | in groups of 8 | all ranks | all over one |",
            "|---|---|---|---|---|---|",
        ]
    )
    for degree in options.degrees:
        taken = row(degree, options.repeats)
        cells = " | ".join(f"{each * 1e3:,.1f} ms" for each in taken)
        findings.add([f"| {degree} | {cells} | {taken[-1] / taken[0]:.0f} |"])
    findings.sign("Measured", "process seconds of one core")
    findings.write(options.out)


if __name__ == "__main__":
    main()
