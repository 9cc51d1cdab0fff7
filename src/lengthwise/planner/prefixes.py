"""Prefixes that sequences of a step share, plans that compute them once, and plans that know the work on images.

Sequences that share a prefix make trees: each inner sequence of a tree is a shared part, each other one the rest of a
sequence of the batch. A tree stays in one piece, so it may not be too large; larger groups make several trees, each
with the prefix. Planners take a tree for one sequence (`cost.trees`), and a sequence with images for a tree of itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import TypeAlias

import numpy as np

from lengthwise.core.plan import Images, ImageWork, Plan
from lengthwise.core.prefixes import LEAST_SHARED_TOKENS, SharedPrefixes
from lengthwise.cost import Cost, Tree, lengths_of
from lengthwise.program.features import with_requires


def work_left(
    lengths: Sequence[int], shared: SharedPrefixes, most_tokens: int, cost: Cost, images: Images = ()
) -> float | None:
    """Return the arithmetic of a step with trees of at most `most_tokens` over that of whole rows; None without trees.

    It takes milliseconds, a plan up to seconds.
    """
    tokens, _, trees = _trees(lengths, shared, images, most_tokens)
    if len(tokens) == len(lengths):
        return None
    known = (lengths_of(each, cost, most_tokens) for each in (trees, alone(lengths, images)))
    once, whole = (costs.compute_seconds(np.array(known_as)).sum() for known_as, costs in known)
    return float(once / whole)


PlanLengths: TypeAlias = Callable[[Sequence[int], Cost], Plan]
"""Plans sequences of these lengths, with these costs."""


def plan_apart(lengths: Sequence[int], most_tokens: int, cost: Cost, plan_lengths: PlanLengths, images: Images) -> Plan:
    """Return a plan of whole sequences, by the work on their images, too; `most_tokens` is the longest that fits."""
    if not any(images):
        return plan_lengths(lengths, cost)
    return _planned(alone(lengths, images), lengths, (), most_tokens, cost, plan_lengths)


def plan_shared(
    lengths: Sequence[int],
    shared: SharedPrefixes,
    most_tokens: int,
    cost: Cost,
    plan_lengths: PlanLengths,
    images: Images = (),
) -> Plan | None:
    """Return a plan that computes shared prefixes once in trees of up to `most_tokens`, or None without such a tree."""
    tokens, parents, trees = _trees(lengths, shared, images, most_tokens)
    if len(tokens) == len(lengths):
        return None
    return _planned(trees, tokens, parents, most_tokens, cost, plan_lengths)


def alone(lengths: Sequence[int], images: Images) -> list[Tree]:
    """Return a tree of each sequence alone."""
    return [
        Tree((number,), ((0, length),), (_work(images[number], 0, length),) if images else ())
        for number, length in enumerate(lengths)
    ]


def _work(images: Sequence[tuple[int, float]], start: int, stop: int) -> ImageWork:
    """Return the work on the images of a sequence that begin in [start, stop)."""
    those = [work for first, work in images if start <= first < stop]
    return ImageWork(sum(those), max(those, default=0.0))


def _planned(
    trees: Sequence[Tree],
    tokens: Sequence[int],
    parents: tuple[int | None, ...],
    most_tokens: int,
    cost: Cost,
    plan_lengths: PlanLengths,
) -> Plan:
    """Plan trees, and return the plan of their sequences, with the length and parent of each."""
    known_as, costs = lengths_of(trees, cost, most_tokens)
    plan = plan_lengths(known_as, costs)
    if plan.images:  # of sequences in an order of the planner's own
        return plan
    microbatches = plan.replacing(lambda tree: trees[tree].sequences)
    works = {one: work for tree in trees for one, work in zip(tree.sequences, tree.images, strict=False)}
    images = tuple(works[one] for one in range(len(tokens))) if works else ()
    plan = replace(plan, tokens=tuple(tokens), parents=parents, images=images, microbatches=microbatches)
    return with_requires(plan)


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
    lengths: Sequence[int], shared: SharedPrefixes, images: Images, most_tokens: int
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
        sequences, spans, works = list[int](), list[tuple[int, int]](), list[ImageWork]()
        for start, stop, row, is_leaf, parent_place in parts:
            parent = None if parent_place is None else sequences[parent_place]
            sequences.append(row if is_leaf else len(tokens))
            spans.append((start, stop))
            works += [_work(images[row], start, stop)] if images else []
            if is_leaf:
                tokens[row], parents[row] = stop - start, parent
            else:
                tokens.append(stop - start)
                parents.append(parent)
        trees.append(Tree(tuple(sequences), tuple(spans), tuple(works)))
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
) -> Iterator[tuple[int, int, int, bool, int | None]]:
    """Yield the parts of a tree, depth first: first and last position, a sequence of the batch, whether it is the part
    of this one alone, and the parent's place; places count the parts from 0.
    """
    count = 0
    waiting: list[tuple[range, int, int | None]] = [(run, 0, None)]  # neighbours that share their first tokens
    while waiting:
        places, start, parent = waiting.pop()
        if len(places) == 1:
            sequence = shared.order[places[0]]
            yield start, lengths[sequence], sequence, True, parent
            count += 1
            continue
        stop = min(shared.common[place] for place in places[1:])
        if stop >= start + LEAST_SHARED_TOKENS:
            yield start, stop, shared.order[places[0]], False, parent
            start, parent, count = stop, count, count + 1
        borders = [place for place in places[1:] if shared.common[place] < start + LEAST_SHARED_TOKENS]
        groups = [range(*each) for each in pairwise([places[0], *borders, places[-1] + 1])]
        waiting += [(group, start, parent) for group in reversed(groups)]
