"""Lengths of the sequences of a data set, summed by powers of two."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from lengthwise.core.sizes import written_tokens
from lengthwise.report.figures import count


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthSummary:
    """Numbers of sequences and tokens; shares of the longest 1 % of sequences in tokens and attention work (s^2)."""

    num_sequences: int
    num_tokens: int
    median_tokens: int
    longest_tokens: int
    longest_index: int
    top_token_share: float
    top_attention_share: float


def summarize_lengths(lengths: Sequence[int] | np.ndarray) -> LengthSummary:
    """Summarize lengths in tokens; the top 1 % is at least one sequence."""
    values = np.asarray(lengths, dtype=np.int64)
    ordered = np.sort(values)[::-1]
    top = ordered[: max(1, round(len(ordered) / 100))].astype(np.float64)
    return LengthSummary(
        num_sequences=len(ordered),
        num_tokens=int(ordered.sum()),
        median_tokens=int(ordered[len(ordered) // 2]),
        longest_tokens=int(ordered[0]),
        longest_index=int(values.argmax()),
        top_token_share=float(top.sum() / ordered.sum()),
        top_attention_share=float((top**2).sum() / (ordered.astype(np.float64) ** 2).sum()),
    )


def sum_by_power(lengths: Sequence[int] | np.ndarray) -> tuple[int, list[int], list[int]]:
    """Return the least power p, and for p, p + 1, ... the sequences of 2^p to 2^(p + 1) tokens, and their tokens."""
    powers = np.frexp(np.asarray(lengths, dtype=np.float64))[1] - 1
    first = int(powers.min())
    sequences = np.bincount(powers - first)
    tokens = np.bincount(powers - first, weights=np.asarray(lengths))
    return first, sequences.tolist(), [int(each) for each in tokens]


def written_edges(first: int, bars: int, longest: int) -> tuple[list[str], list[str]]:
    """Return the borders of bars of powers of two, and the span of each bar; the last bar ends at the longest."""
    ends = [written_tokens(2**power) for power in range(first, first + bars)] + [written_tokens(longest)]
    spans = [low if low == high else f"{low} to {high}" for low, high in pairwise(ends)]
    right = ends[-1] if ends[-1] != ends[-2] else written_tokens(2 ** (first + bars))  # all of one length
    return [*ends[:-1], right], spans


def length_histogram(lengths: Sequence[int] | np.ndarray, *, width: int = 40) -> list[str]:
    """Return one line per power of two of length: dots for its sequences, hashes for their tokens."""
    first, sequences, tokens = sum_by_power(lengths)
    most_tokens, most_sequences = max(tokens), max(sequences)
    half = max(8, (width - 1) // 2)
    lines = [f"{'tokens':>15}  {'sequences':<{half + 7}}{'tokens in them'}"]
    _, spans = written_edges(first, len(tokens), int(np.max(lengths)))
    for edges, members, held in zip(spans, sequences, tokens, strict=True):
        dots = "." * -(-half * members // most_sequences)
        marks = "#" * -(-half * held // most_tokens)
        lines.append(f"{edges:>15}  {members:>5} {dots:<{half + 1}}{count(held):>6} {marks}".rstrip())
    return lines
