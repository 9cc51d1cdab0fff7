"""Prefixes that rows share: found, made into trees, priced, and planned where that pays."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from testing.plans import make_plan

from lengthwise.core.held import fullest_tokens
from lengthwise.core.plan import Piece
from lengthwise.core.prefixes import LEAST_SHARED_TOKENS, SharedPrefixes, shared_prefixes
from lengthwise.cost import plain_cost
from lengthwise.planner import PlanOptions, score
from lengthwise.planner.prefixes import plan_shared
from lengthwise.planner.service.step_planning import StepPlanning
from lengthwise.simulator.clocks import simulate_plan

COST = plain_cost(linear_seconds=1e-4, quadratic_seconds=1e-9)


def alone(lengths, _cost):
    return make_plan(1, lengths, [Piece(ranks=(0,), sequences=(i,)) for i in range(len(lengths))])


def planned(lengths, starts, capacity, ranks=1, **cost):
    """Plan rows with these first tokens, or what they share."""
    shared = starts if isinstance(starts, SharedPrefixes) else shared_prefixes(starts, lengths)
    cost = plain_cost(**{"linear_seconds": 1e-4, **cost})
    planning = StepPlanning(ranks=ranks, cost=cost, capacities={"none": capacity}, options=PlanOptions())
    return planning.plan(lengths, shared)


def starts_of(prompts):
    """Return the first tokens of rows: a text a prompt, one letter for `LEAST_SHARED_TOKENS` of them."""
    return [np.repeat([ord(each) for each in prompt], LEAST_SHARED_TOKENS).astype(np.int32) for prompt in prompts]


@given(
    prompts=st.lists(st.text("ab", max_size=4), min_size=1, max_size=9),
    ends=st.lists(st.integers(1, 40), min_size=9, max_size=9),
    most=st.sampled_from([1, 100, 10_000]),
)
def test_trees_have_every_token_of_every_row_once_a_tree(prompts, ends, most):
    starts = starts_of(prompts)
    lengths = [len(start) + end for start, end in zip(starts, ends, strict=False)]
    shared = shared_prefixes(starts, lengths)
    plan = None if shared is None else plan_shared(lengths, shared, most, COST, alone)
    if plan is None:
        assert most < 10_000 or len({prompt[:1] or number for number, prompt in enumerate(prompts)}) == len(prompts)
        return
    parts = [()] * len(prompts) + [None] * (len(plan.tokens) - len(prompts))  # the letters of each prefix
    for row, prompt in enumerate(prompts):
        path = [row]
        while (parent := plan.parents[path[-1]]) is not None:
            path.append(parent)
        assert sum(plan.tokens[each] for each in path) == lengths[row]
        for prefix in path[1:]:
            text = prompt[: (plan.firsts[prefix] + plan.tokens[prefix]) // LEAST_SHARED_TOKENS]
            assert parts[prefix] in (None, text)
            parts[prefix] = text
    for tree in (piece.sequences for microbatch in plan.microbatches for piece in microbatch.pieces):
        rows = [each for each in tree if each < len(prompts)]
        assert len(rows) == 1 or sum(plan.tokens[each] for each in tree) <= most
        texts = [parts[each] for each in tree if each >= len(prompts)]
        assert len(set(texts)) == len(texts), "a prefix is once in a tree"
    if most == 10_000:
        letters = {prompt[:end] for prompt in prompts for end in range(1, len(prompt) + 1)}
        assert sum(plan.tokens) == LEAST_SHARED_TOKENS * len(letters) + sum(ends[: len(prompts)])


def test_a_tree_costs_its_own_pairs_beside_a_row_of_its_length():
    """A prompt of 100 tokens with answers of 50 and 30, and a row of 180."""
    lengths = [150, 130, 180]
    starts = [np.zeros(100, dtype=np.int32), np.zeros(100, dtype=np.int32), np.ones(1, dtype=np.int32)]
    shared = shared_prefixes(starts, lengths)
    asked = []

    def planned(units, cost):
        asked.append((units, cost.seen_pairs(np.array(units, dtype=np.float64)).tolist()))
        return alone(units, cost)

    plan = plan_shared(lengths, shared, 1000, COST, planned)
    pairs = 100**2 + (150**2 - 100**2) + (130**2 - 100**2)
    assert sorted(zip(*asked[0], strict=True)) == [(180, 180**2), (181, pairs)]
    assert plan.tokens == (50, 30, 180, 100)
    assert plan.parents == (3, 3, None, None)
    seconds = COST.linear_seconds * (181 + 180) + COST.quadratic_seconds * (pairs + 180**2)
    assert score(plan, COST).makespan_seconds == pytest.approx(seconds, rel=1e-12)
    assert simulate_plan(plan, COST).step_seconds == pytest.approx(seconds, rel=1e-12)


@pytest.mark.parametrize(("prompt", "pays"), [(100, False), (1000, True)])
def test_prefixes_are_shared_where_that_saves_more_than_a_twentieth(prompt, pays):
    """Linear work alone: 7 of 8 prompts before answers of 2,000 tokens are 4 % of it, or 29 %."""
    plan = planned([prompt + 2000] * 8, [np.zeros(prompt - 1, dtype=np.int32)] * 8, 40_000)
    assert bool(plan.parents) == pays
    if pays:
        assert plan.notes["seconds_apart"] == pytest.approx(8 * 3000e-4)
        assert plan.notes["predicted_seconds"] == pytest.approx((999 + 8 * 2001) * 1e-4)


def test_a_group_is_cut_where_a_tree_would_hold_up_the_other_ranks():
    plan = planned([3000] * 8, [np.zeros(999, dtype=np.int32)] * 8, 40_000, ranks=4, ring_seconds=1.0)
    assert plan.parents.count(None) == 4, "two rows a tree"
    assert all(piece.degree == 1 for microbatch in plan.microbatches for piece in microbatch.pieces)


def test_a_prompt_is_computed_once_in_a_group_that_no_rank_holds():
    """2,000 tokens before four answers of 500: a tree of 4,000 tokens over four ranks in place of 10,000."""
    shared = SharedPrefixes(order=(0, 1, 2, 3), common=(0, 2000, 2000, 2000))
    plan = planned([2500] * 4, shared, 1010, ranks=4, linear_seconds=1.0)
    assert plan.tokens == (500,) * 4 + (2000,)
    assert plan.notes["predicted_seconds"] == pytest.approx(1000, rel=0.01)
    assert plan.notes["seconds_apart"] == pytest.approx(2500, rel=0.01)


def test_full_trees_of_one_length_and_other_shapes_leave_room_for_the_lengths_that_tell_them_apart():
    """Two groups of 100 tokens, the capacity: one of them is known as 101 tokens."""
    starts = [np.full(40, group, dtype=np.int32) for group in (0, 0, 1, 1)]
    assert planned([70, 70, 80, 60], starts, 100).parents


def test_no_rank_holds_all_short_ends_of_a_ring_beyond_the_capacity():
    """Answers of one token lie on one position of a ring, which has packs beside it."""
    starts = [np.zeros(80, dtype=np.int32)] * 300 + [np.ones(1, dtype=np.int32)] * 2
    plan = planned([81] * 300 + [400] * 2, starts, 600, ranks=2, fixed_seconds=0.3)
    assert plan.parents
    assert max(fullest_tokens(plan, each) for each in plan.microbatches) < 1.02 * 600


def test_prefixes_in_prefixes_that_differ_by_a_few_tokens_make_trees_that_fit():
    """A difference below the least shared tokens is not shared, so a tree has more tokens than all that are equal."""
    starts = [np.array([0] * (40 + number) + [number + 1], dtype=np.int32) for number in range(12)]
    lengths = [len(start) + 2 for start in starts]
    shared = shared_prefixes(starts, lengths)
    assert planned(lengths, shared, 90, quadratic_seconds=1e-9).parents
    for most in range(60, 140):
        found = plan_shared(lengths, shared, most, COST, alone)
        assert found is not None
        trees = (piece.sequences for microbatch in found.microbatches for piece in microbatch.pieces)
        assert max(sum(found.tokens[each] for each in tree) for tree in trees) <= most
