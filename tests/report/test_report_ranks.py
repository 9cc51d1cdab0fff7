"""Ranks over time as text: what each character stands for."""

import numpy as np

from lengthwise.core.plan import Microbatch, Piece, Plan
from lengthwise.core.timeline import Timeline
from lengthwise.report.ranks import rank_lines


def test_rank_lines_show_packs_rings_waits_and_the_end_of_the_step():
    ring = Microbatch(pieces=(Piece(ranks=(0, 1), sequences=(0,)),))
    packs = [Microbatch(pieces=(Piece(ranks=(rank,), sequences=(rank + 1,)),)) for rank in (0, 1)]
    plan = Plan(ranks=2, layers=1, capacity=8, tokens=(8, 3, 1), microbatches=(ring, *packs))
    start, end = np.array([0.0, 0.0, 4.0, 5.0]), np.array([4.0, 4.0, 8.0, 6.0])
    zeros = np.zeros(4)
    timeline = Timeline(
        ranks=2, stages=1, rank=np.array([0, 1, 0, 1]), stage=np.zeros(4, dtype=int),
        microbatch=np.array([0, 0, 1, 2]), start=start, forward=start, backward=start, end=end, compute=zeros,
        copied=zeros, held_tokens=zeros, step_end_seconds=2.0,
    )  # fmt: skip
    assert rank_lines(plan, timeline, most_seconds=10.0, width=10) == ["rank 0 |====####++|", "rank 1 |====.#..++|"]
    assert rank_lines(plan, timeline, most_seconds=20.0, width=10) == ["rank 0 |==##+|", "rank 1 |==#.+|"]
