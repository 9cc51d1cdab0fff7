"""Prefixes that sequences of a step share, and plans that compute them once.

Sequences that share a prefix make trees: each inner sequence of a tree is a shared part, each other one the rest of a
sequence of the batch. A tree stays in one piece, so it may not be too large; larger groups make several trees, each
with the prefix. Planners take a tree for one sequence (`cost.trees`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np

from lengthwise.core.plan import Plan
from lengthwise.core.prefixes import LEAST_SHARED_TOKENS, SharedPrefixes
from lengthwise.cost import Cost, Tree, lengths_of
from lengthwise.program.features import with_requires


def work_left(lengths: Sequence[int], shared: SharedPrefixes, most_tokens: int, cost: Cost) -> float | None:
    """Return the arithmetic of a step with trees of at most `most_tokens` over that of whole rows; None without trees.

    It takes milliseconds, a plan up to seconds.
    """
    tokens, _, trees = _trees(lengths, shared, most_tokens)
    if len(tokens) == len(lengths):
        return None
    known_as, costs = lengths_of(trees, cost, most_tokens)
    once, whole = (each.compute_seconds(np.array(of)).sum() for each, of in ((costs, known_as), (cost, lengths)))
    return float(once / whole)


def plan_shared(
    lengths: Sequence[int],
    shared: SharedPrefixes,
    most_tokens: int,
    cost: Cost,
    plan_lengths: Callable[[Sequence[int], Cost], Plan],
) -> Plan | None:
    """Return a plan that computes shared prefixes once in trees of at most `most_tokens`, or None without such a tree.

    plan_lengths: function that plans sequences of these lengths, with these costs.
    """
    tokens, parents, trees = _trees(lengths, shared, most_tokens)
    if len(tokens) == len(lengths):
        return None
    known_as, costs = lengths_of(trees, cost, most_tokens)
    plan = plan_lengths(known_as, costs)
    microbatches = plan.replacing(lambda tree: trees[tree].sequences)
    return with_requires(replace(plan, tokens=tokens, parents=parents, microbatches=microbatches))


def saved_ratio(plan: Plan) -> float | None:
    """Return the share of the predicted seconds that prefixes computed once save.

    For a plan of whole sequences: the share that they would save, below 0 if they cost time. None if only one of the
    two plans was made.
    """
    notes, predicted = plan.notes, float(plan.notes["predicted_seconds"])
    if "seconds_apart" in notes:
        return 1 - predicted / float(notes["seconds_apart"])
    return 1 - float(notes["seconds_shared"]) / predicted if "seconds_shared" in notes else None


def _trees(
    lengths: Sequence[int], shared: SharedPrefixes, most_tokens: int
) -> tuple[tuple[int, ...], tuple[int | None, ...], list[Tree]]:
    """Return the tokens and parents of all sequences of a plan, those of the batch first, and its trees."""
    tokens, parents, trees = list(lengths), list[int | None]([None] * len(lengths)), list[Tree]()
    runs = [*_runs(lengths, shared, most_tokens)][::-1]
    while runs:
        run = runs.pop()
        parts = [*_tree(run, lengths, shared)]
        if len(run) > 1 and sum(stop - start for start, stop, *_ in parts) > most_tokens:
            half = len(run) // 2  # prefixes in prefixes that differ by a few tokens are not all shared
            runs += [run[half:], run[:half]]
            continue
        sequences, spans = list[int](), list[tuple[int, int]]()
        for start, stop, leaf, parent_place in parts:
            parent = None if parent_place is None else sequences[parent_place]
            sequences.append(len(tokens) if leaf is None else leaf)
            spans.append((start, stop))
            if leaf is None:
                tokens.append(stop - start)
                parents.append(parent)
            else:
                tokens[leaf], parents[leaf] = stop - start, parent
        trees.append(Tree(tuple(sequences), tuple(spans)))
    return tuple(tokens), tuple(parents), trees


def _runs(lengths: Sequence[int], shared: SharedPrefixes, most_tokens: int) -> Iterator[range]:
    """Yield the places in `order` of each tree: neighbours with a common prefix and at most `most_tokens` together."""
    first = tokens = 0
    for place, (sequence, common) in enumerate(zip(shared.order, shared.common, strict=True)):
        more = lengths[sequence] - common
        if place and (common < LEAST_SHARED_TOKENS or tokens + more > most_tokens):
            yield range(first, place)
            first, tokens, more = place, 0, lengths[sequence]
        tokens += more
    yield range(first, len(shared.order))


def _tree(
    run: range, lengths: Sequence[int], shared: SharedPrefixes
) -> Iterator[tuple[int, int, int | None, int | None]]:
    """Yield the parts of a tree, depth first: first and last position, sequence of the batch or None, parent's place.

    The sequence is None for a shared part. Places count the parts from 0.
    """
    count = 0
    waiting: list[tuple[range, int, int | None]] = [(run, 0, None)]  # neighbours that share their first tokens
    while waiting:
        places, start, parent = waiting.pop()
        if len(places) == 1:
            sequence = shared.order[places[0]]
            yield start, lengths[sequence], sequence, parent
            count += 1
            continue
        stop = min(shared.common[place] for place in places[1:])
        if stop >= start + LEAST_SHARED_TOKENS:
            yield start, stop, None, parent
            start, parent, count = stop, count, count + 1
        borders = [place for place in places[1:] if shared.common[place] < start + LEAST_SHARED_TOKENS]
        groups = [range(*each) for each in pairwise([places[0], *borders, places[-1] + 1])]
        waiting += [(group, start, parent) for group in reversed(groups)]
