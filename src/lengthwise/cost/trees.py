"""Costs of sequences that continue others: a tree of them counts as one sequence of all its tokens.

Planners, scores and the simulator know a sequence by its length. A tree gets a length of its own, and `Cost.trees` says
how many pairs of tokens it sees: fewer than one sequence of this length.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from lengthwise.core.plan import Plan
from lengthwise.cost.terms import Cost


@dataclass(frozen=True, slots=True)
class Tree:
    """Sequences in the order in which a piece lists them. spans: positions (first, stop) of the tokens of each."""

    sequences: tuple[int, ...]
    spans: tuple[tuple[int, int], ...]

    @property
    def tokens(self) -> int:
        """Tokens of all its sequences."""
        return sum(stop - first for first, stop in self.spans)


def lengths_of(trees: Sequence[Tree], cost: Cost, most_tokens: float = math.inf) -> tuple[tuple[int, ...], Cost]:
    """Return the length by which each tree is known, and costs that know these lengths.

    A length is the number of tokens. A tree gets some tokens more if that is the length of a tree of another shape, up
    to `most_tokens`: more might not fit on a rank, so trees of this length are priced as the first of them.
    """
    shapes: dict[int, tuple[tuple[int, int], ...]] = {}
    lengths = [0] * len(trees)
    for number in sorted(range(len(trees)), key=lambda number: len(trees[number].spans)):  # plain sequences first
        length, spans = trees[number].tokens, trees[number].spans
        while shapes.setdefault(length, spans) != spans and length < most_tokens:
            length += 1
        lengths[number] = length
    return tuple(lengths), cost.with_trees({length: spans for length, spans in shapes.items() if len(spans) > 1})


def folded(plan: Plan, cost: Cost) -> tuple[Plan, Cost]:
    """Return a plan in which each tree is one sequence, and costs that know the trees."""
    if not plan.parents:
        return plan, cost
    trees = [tree for m in plan.microbatches for piece in m.pieces for tree in _trees_of(piece.sequences, plan)]
    lengths, costs = lengths_of(trees, cost)
    number_of = {tree.sequences[0]: number for number, tree in enumerate(trees)}
    microbatches = tuple(
        replace(
            microbatch,
            pieces=tuple(
                replace(piece, sequences=tuple(number_of[i] for i in piece.sequences if i in number_of))
                for piece in microbatch.pieces
            ),
        )
        for microbatch in plan.microbatches
    )
    requires = tuple(each for each in plan.requires if each != "branches")
    return replace(plan, tokens=lengths, parents=(), requires=requires, microbatches=microbatches), costs


def _trees_of(sequences: Sequence[int], plan: Plan) -> Iterator[Tree]:
    firsts, starts = plan.firsts, [place for place, one in enumerate(sequences) if plan.parents[one] is None]
    for start, stop in zip(starts, [*starts[1:], len(sequences)], strict=True):
        those = tuple(sequences[start:stop])
        yield Tree(those, tuple((firsts[one], firsts[one] + plan.tokens[one]) for one in those))
