"""How long the sequences of a data set are, and who carries the work."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lengthwise.core.sizes import written_tokens
from lengthwise.report.figures import count


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthSummary:
    """Counts in sequences and tokens; shares of the longest 1 % of sequences in tokens and in attention work (s^2)."""

    num_sequences: int
    num_tokens: int
    median_tokens: int
    longest_tokens: int
    longest_index: int
    top_token_share: float
    top_attention_share: float


def summarize_lengths(lengths: Sequence[int]) -> LengthSummary:
    """Summarize lengths in tokens; the top 1 % is at least one sequence."""
    ordered = sorted(lengths, reverse=True)
    top = ordered[: max(1, round(len(ordered) / 100))]
    return LengthSummary(
        num_sequences=len(ordered),
        num_tokens=sum(ordered),
        median_tokens=ordered[len(ordered) // 2],
        longest_tokens=ordered[0],
        longest_index=list(lengths).index(ordered[0]),
        top_token_share=sum(top) / sum(ordered),
        top_attention_share=sum(s * s for s in top) / sum(s * s for s in ordered),
    )


def length_histogram(lengths: Sequence[int], *, width: int = 40) -> list[str]:
    """Draw one line a power of two of length: dots for its sequences, hashes for the tokens in them."""
    bins: dict[int, list[int]] = {}
    for length in lengths:
        bins.setdefault(length.bit_length() - 1, []).append(length)
    tokens = {power: sum(members) for power, members in bins.items()}
    most_tokens, most_sequences = max(tokens.values()), max(map(len, bins.values()))
    half = max(8, (width - 1) // 2)
    lines = [f"{'tokens':>15}  {'sequences':<{half + 7}}{'tokens in them'}"]
    for power in range(min(bins), max(bins) + 1):
        members = bins.get(power, [])
        dots = "." * -(-half * len(members) // most_sequences)
        marks = "#" * -(-half * tokens.get(power, 0) // most_tokens)
        edges = f"{written_tokens(2**power)} to {written_tokens(2 ** (power + 1))}"
        lines.append(
            f"{edges:>15}  {len(members):>5} {dots:<{half + 1}}{count(tokens.get(power, 0)):>6} {marks}".rstrip()
        )
    return lines
