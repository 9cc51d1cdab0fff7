"""What cutting one sequence over two processes costs: a ring of 2 ranks against one process of 2 threads.

    python benchmarks/ring.py [--tokens 16384] [--repeats 7] [--model tiny] [--core-weight]

Forward and backward of one sequence in fp32 by the engine, the same model and weights: two ranks of one thread each
that pass keys and values on over loopback (gloo), and one rank of two threads. Both take turns, the one that waits
sleeps; seconds are of the wall clock, to the end of the later rank, from a common start. The ratio is that of each
turn, the figure their median. `--core-weight`: before other processes of the machine. Aim: at most 1.03.
"""

from __future__ import annotations

import argparse
import statistics
import time
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from testing import make_plan, run_ranks
from testing.core_shares import core_shares

from lengthwise.attention import choose_kernel
from lengthwise.cli.machine import machine_lines
from lengthwise.comm import SoloTransport, Transport
from lengthwise.core.plan import Piece, Plan
from lengthwise.engine.batch import random_batch
from lengthwise.engine.replicated import FlatParameters
from lengthwise.engine.step import run_plan
from lengthwise.models import build_model, find_model
from pages import Findings, add_out

RING, ALONE = (0, 1), 2  # ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """Seconds of both ways in one turn, CPU seconds of all that compute, waiting of the ring's ranks, and losses."""

    ring_seconds: float
    alone_seconds: float
    ring_cpu_seconds: float
    alone_cpu_seconds: float
    waited_seconds: float
    ring_loss: float
    alone_loss: float

    @property
    def ratio(self) -> float:
        """The ring's time over that of the one process."""
        return self.ring_seconds / self.alone_seconds


def main() -> None:
    """Print the turns and the median of their ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=16_384)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--core-weight", action="store_true", help="above all other processes; needs root")
    add_out(parser, "ring")
    asked, findings = parser.parse_args(), Findings("ring")
    print(*machine_lines()[1:], sep="\n")

    def work(transport: Transport) -> list[Turn]:
        return take_turns(transport, asked.model, asked.tokens, asked.repeats)

    with core_shares([1.0, 1.0, 2.0]) if asked.core_weight else nullcontext() as shares:
        enter = None if shares is None else shares.enter
        findings.add(report(run_ranks(work, 3, timeout_seconds=600.0, before_joining=enter)[0]))
    findings.sign("Measured", f"one sequence of {asked.tokens:,} tokens, {asked.repeats} turns")
    findings.write(asked.out)


def take_turns(transport: Transport, name: str, tokens: int, repeats: int) -> list[Turn]:
    """Run both ways in turns, as one of three ranks: two of the ring, and one that is alone."""
    alone = transport.rank == ALONE
    torch.set_num_threads(2 if alone else 1)
    source = find_model(name, weights="fresh")
    model, kernel = build_model(source, seed=0), choose_kernel(torch.device("cpu"))
    parameters = FlatParameters(model, transport, dtype=torch.float32)
    layers, batch = source.config.num_hidden_layers, random_batch([tokens], vocab=source.config.vocab_size)
    mine = SoloTransport() if alone else transport
    plan = one_sequence(tokens, 1 if alone else transport.world_size, (0,) if alone else RING, layers)
    turns = []
    for repeat in range(repeats + 1):
        rows = torch.zeros(3, 4, dtype=torch.float64)
        for is_alone in (False, True):
            transport.all_reduce(torch.zeros(1))
            if is_alone == alone:
                parameters.clear_gradients()
                start, cpu = time.perf_counter(), time.process_time()
                result = run_plan(model, plan, batch, mine, kernel, name="ring")
                took = (time.perf_counter() - start, time.process_time() - cpu)
                rows[transport.rank] = torch.tensor([*took, result.ring_wait_seconds, result.loss_sum])
        transport.all_reduce(rows)
        if repeat:  # the first warms up
            turns.append(turn_of(rows))
    return turns


def turn_of(rows: torch.Tensor) -> Turn:
    """Make a turn from (3 ranks, (seconds, CPU seconds, waited, summed loss))."""
    ring, alone = rows[list(RING)], rows[ALONE].tolist()
    return Turn(
        ring_seconds=float(ring[:, 0].max()),
        alone_seconds=alone[0],
        ring_cpu_seconds=float(ring[:, 1].sum()),
        alone_cpu_seconds=alone[1],
        waited_seconds=float(ring[:, 2].mean()),
        ring_loss=float(ring[:, 3].sum()),
        alone_loss=alone[3],
    )


def one_sequence(tokens: int, ranks: int, ring: tuple[int, ...], layers: int) -> Plan:
    """Plan one sequence over a ring of some ranks; the others have nothing to do."""
    return make_plan(ranks, [tokens], [Piece(ranks=ring, sequences=(0,))], layers=layers)


def report(turns: list[Turn]) -> list[str]:
    """Make a row a turn, and the medians."""
    lines = [
        "| turn | ring of 2, s | one process, s | ratio | of CPU seconds | ring's ranks wait |",
        "|---|---|---|---|---|---|",
    ]
    for number, turn in enumerate(turns, start=1):
        lines.append(
            f"| {number} | {turn.ring_seconds:.2f} | {turn.alone_seconds:.2f} | {turn.ratio:.3f} "
            f"| {turn.ring_cpu_seconds / turn.alone_cpu_seconds:.3f} | {turn.waited_seconds / turn.ring_seconds:.1%} |"
        )
    apart = max(abs(turn.ring_loss / turn.alone_loss - 1) for turn in turns)
    cpu = statistics.median(turn.ring_cpu_seconds / turn.alone_cpu_seconds for turn in turns)
    median = statistics.median(turn.ratio for turn in turns)
    verdict = "met" if median <= 1.03 else "**missed**"
    lines += [
        "",
        f"Median ratio **{median:.3f}** (aim 1.03: {verdict}); of CPU seconds {cpu:.3f}. Losses agree to {apart:.0e}.",
    ]
    return lines


if __name__ == "__main__":
    main()
