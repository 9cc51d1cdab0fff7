"""Groups of sequences that begin with one prompt, as completions of GRPO or pairs of DPO; plans may share it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lengthwise.core.prefixes import LEAST_SHARED_TOKENS, SharedPrefixes

LEAST_PROMPT_TOKENS = LEAST_SHARED_TOKENS + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Branches:
    """Prompts of `prompt_tokens` tokens, each the beginning of `completions` sequences that follow each other.

    The last prompt of a batch may have fewer. Sequences share all tokens of their prompt but the last one, which
    predicts the first token of each completion.
    """

    completions: int
    prompt_tokens: int

    def shared(self, lengths: Sequence[int]) -> SharedPrefixes:
        """Return the prefixes that sequences of these lengths, prompts included, share, as `shared_prefixes`."""
        order = sorted(range(len(lengths)), key=lambda number: (number // self.completions, -lengths[number], number))
        common = [self.prompt_tokens - 1 if place % self.completions else 0 for place in range(len(order))]
        return SharedPrefixes(order=tuple(order), common=tuple(common))
