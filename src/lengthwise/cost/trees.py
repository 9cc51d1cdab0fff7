"""Costs of sequences that continue others, and of those with images.

Planners, scores and the simulator know a sequence by its length. Sequences that continue others are a tree, which
counts as one sequence of all its tokens; one with images is a tree of itself. A tree gets a length of its own, and
`Cost.trees` says how many pairs of tokens it sees, in blocks of which size, and the work on its images.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from lengthwise.core.plan import ImageWork, Plan
from lengthwise.cost.terms import Cost


@dataclass(frozen=True, slots=True)
class Tree:
    """Sequences in the order in which a piece lists them.

    spans: positions (first, stop) of the tokens of each. images: work on the images of each, () without.
    """

    sequences: tuple[int, ...]
    spans: tuple[tuple[int, int], ...]
    images: tuple[ImageWork, ...] = ()

    @property
    def tokens(self) -> int:
        """Tokens of all its sequences."""
        return sum(stop - first for first, stop in self.spans)

    @property
    def work(self) -> ImageWork:
        """Work on the images of all its sequences."""
        totals, largest = zip(ImageWork(), *self.images, strict=True)
        return ImageWork(sum(totals), max(largest))


def lengths_of(trees: Sequence[Tree], cost: Cost, most_tokens: float = math.inf) -> tuple[tuple[int, ...], Cost]:
    """Return the length by which each tree is known, and costs that know these lengths.

    A length is the number of tokens. A tree gets some tokens more if a tree of another shape has this length, up to
    `most_tokens`: more might not fit on a rank, so trees of this length are priced as the first of them.
    """
    shapes: dict[int, tuple[tuple[tuple[int, int], ...], ImageWork]] = {}
    lengths = [0] * len(trees)
    for number in sorted(range(len(trees)), key=lambda number: (len(trees[number].spans), trees[number].work)):
        length, shape = trees[number].tokens, (trees[number].spans, trees[number].work)  # plain sequences came first
        while shapes.setdefault(length, shape) != shape and length < most_tokens:
            length += 1
        lengths[number] = length
    own = replace(cost, trees=())
    known = tuple(
        (float(length), *map(float, _attention(spans, own)), *map(float, work))
        for length, (spans, work) in sorted(shapes.items())
        if len(spans) > 1 or work.total
    )
    return tuple(lengths), replace(cost, trees=known)


def _attention(spans: Sequence[tuple[int, int]], cost: Cost) -> tuple[float, float, float, float]:
    """Return the squared tokens inside of a tree's sequences and between them, each with the tokens of its blocks.

    A sequence sees itself in a block of its length, and each one that it continues in one of that one's length (for all
    sequences at once, as `program.branches` has it), with 2 squared tokens a pair. The block's tokens are the mean over
    squared tokens, so that a long sequence keeps its speed.
    """
    firsts, stops = np.array(spans, dtype=np.float64).T
    own = cost.seen_pairs(stops - firsts)
    shared = cost.seen_pairs(stops) - cost.seen_pairs(firsts) - own
    between, blocks = shared.sum(), firsts / np.maximum(1, _depths(spans))
    block = (shared * blocks).sum() / between if between else 1.0
    return own.sum(), (own * (stops - firsts)).sum() / own.sum(), between, block


def _depths(spans: Sequence[tuple[int, int]]) -> NDArray[np.int64]:
    """Return how many others each sequence of a tree continues. spans: depth first."""
    depths, path = list[int](), list[int]()  # path: stops of the sequences that the next one may continue
    for first, stop in spans:
        while path and path[-1] != first:
            path.pop()
        depths.append(len(path))
        path.append(stop)
    return np.array(depths)


def folded(plan: Plan, cost: Cost) -> tuple[Plan, Cost]:
    """Return a plan in which each tree is one sequence, and costs that know the trees."""
    if not plan.parents and not plan.images:
        return plan, cost
    pieces, firsts = (piece for microbatch in plan.microbatches for piece in microbatch.pieces), plan.firsts
    trees = [tree for piece in pieces for tree in _trees_of(piece.sequences, plan, firsts)]
    lengths, costs = lengths_of(trees, cost)
    numbers = {tree.sequences[0]: (number,) for number, tree in enumerate(trees)}
    microbatches = plan.replacing(lambda sequence: numbers.get(sequence, ()))
    requires = tuple(each for each in plan.requires if each != "branches")
    plain = {"tokens": lengths, "parents": (), "images": (), "requires": requires}
    return replace(plan, **plain, microbatches=microbatches), costs


def _trees_of(sequences: Sequence[int], plan: Plan, firsts: Sequence[int]) -> Iterator[Tree]:
    starts = [place for place, one in enumerate(sequences) if not plan.parents or plan.parents[one] is None]
    for start, stop in zip(starts, [*starts[1:], len(sequences)], strict=True):
        those = tuple(sequences[start:stop])
        spans = tuple((firsts[one], firsts[one] + plan.tokens[one]) for one in those)
        yield Tree(those, spans, tuple(plan.images[one] for one in those) if plan.images else ())
