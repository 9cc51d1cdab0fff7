"""Keys gathered at once against a ring and against split heads, inside a node: would another lowering pay?

    python benchmarks/gather.py [--hardware h100]

One sequence over d ranks of a node, forward and backward, by the costs that plans are made with. A gather is given its
best case: all keys and values of the sequence arrive in one transfer of as many bytes as the ring's, behind the rank's
own block of attention (1/d of its work), with one latency in place of d - 1; the rest of attention runs as one block of
the whole sequence. Backward gathers again, and sends the gradients home when all of them are there.
"""

from __future__ import annotations

import argparse
import statistics
from itertools import product

import numpy as np

from lengthwise.cost import Choice, Cost, all_terms_cost, named_hardware, named_shape
from lengthwise.cost.passes import BACKWARD, FORWARD
from pages import Findings, add_out

MODELS = ("llama-7b", "llama-30b")
DEGREES = (2, 4, 8)
TOKENS = tuple(2**power for power in range(8, 18))  # of the sequence, a rank


def gather_seconds(cost: Cost, tokens: int, degree: int) -> float:
    """Count forward and backward of one sequence whose keys are gathered."""
    lengths = np.array([float(tokens)])
    own = float(cost.attention_seconds(lengths, degree)[0]) / degree**2
    rest = float(cost.attention_seconds(lengths, 1)[0]) / degree * (1 - 1 / degree)
    transfers = cost.ring_bytes / cost.near.bytes_per_second * tokens * (degree - 1) / degree
    keys, gradients, latency = FORWARD.ring, BACKWARD.ring - FORWARD.ring, cost.near.hop_seconds
    late = sum(max(0.0, keys * transfers + latency - each.attention * own) for each in (FORWARD, BACKWARD))
    return own + rest + cost.linear_seconds * tokens / degree + late + gradients * transfers + latency


def main() -> None:
    """Print the table, and write it into a page if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hardware", default="h100")
    add_out(parser, "gather")
    arguments = parser.parse_args()
    findings = Findings("gather")
    columns = ["model", "ranks", "gather over ring, median", "best", "gather over the better of both, median", "best"]
    findings.add([f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"])
    for model, degree in product(MODELS, DEGREES):
        cost = all_terms_cost(named_shape(model), named_hardware(arguments.hardware))
        ring, better = [], []
        for tokens in TOKENS:
            seconds = gather_seconds(cost, tokens * degree, degree)
            groups = [group for group in (1, 2, 4, 8) if degree % group == 0 and cost.heads % group == 0]
            taken = [cost.piece_seconds([tokens * degree], degree, Choice(heads=group)) for group in groups]
            ring.append(seconds / taken[0])
            better.append(seconds / min(taken))
        shown = [f"{value:.3f}" for rows in (ring, better) for value in (statistics.median(rows), min(rows))]
        findings.add([f"| {model} | {degree} | {' | '.join(shown)} |"])
    findings.sign("Modelled", f"{arguments.hardware}, {TOKENS[0]:,} to {TOKENS[-1]:,} tokens a rank")
    findings.write(arguments.out)


if __name__ == "__main__":
    main()
