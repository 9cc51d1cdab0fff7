"""What a stage does: both sides of every message at one tick, and layers cut so that the slowest chunk is quickest."""

import random
from itertools import combinations, pairwise

from hypothesis import given
from hypothesis import strategies as st
from testing.pipelines import as_pipeline
from testing.plans import random_plan

from lengthwise.program.stage_program import cut_layers, stage_turns


@given(
    seed=st.integers(0, 2**16),
    replicas=st.integers(1, 4),
    stages=st.integers(2, 4),
    virtual=st.integers(1, 2),
    forward_only=st.booleans(),
)
def test_every_message_has_both_sides_at_one_tick_and_comes_before_its_action(
    seed, replicas, stages, virtual, forward_only
):
    choose = random.Random(seed)
    plan = as_pipeline(random_plan(choose, replicas, [9] * choose.randint(1, 8)), stages, virtual)
    sent, received = set(), set()
    for replica in range(replicas):
        for stage in range(stages):
            come = {}
            for turn in stage_turns(plan, replica, stage, forward_only=forward_only):
                action = turn.action
                key = action and (action.microbatch, action.chunk, action.is_forward)
                turns_here = action and action.chunk == stages * virtual - 1 and not action.is_forward
                if action and not turns_here and not (action.is_forward and action.chunk == 0):
                    assert come.pop(key) < turn.tick
                sent |= {(turn.tick, replica, stage, m.stage, m.microbatch, m.chunk) for m in turn.sends}
                received |= {(turn.tick, replica, m.stage, stage, m.microbatch, m.chunk) for m in turn.receives}
                come |= {(m.microbatch, m.chunk, m.is_forward): turn.tick for m in turn.receives}
            assert not come
    assert sent == received
    passes = 1 if forward_only else 2
    assert len(sent) == sum(len(each.ranks) for each in plan.microbatches) * passes * (stages * virtual - 1)


ENDS = st.integers(0, 12)


@given(seconds=st.lists(st.integers(1, 9), min_size=1, max_size=8), first=ENDS, last=ENDS, chunks=st.integers(1, 4))
def test_no_other_cut_of_the_layers_has_a_quicker_slowest_chunk(seconds, first, last, chunks):
    chunks = min(chunks, len(seconds))

    def slowest(borders):
        edges = [0, *borders, len(seconds)]
        took = [sum(seconds[a:b]) for a, b in pairwise(edges)]
        took[0] += first
        took[-1] += last
        return max(took)

    found = cut_layers(seconds, chunks, first_seconds=first, last_seconds=last)
    assert [layer for each in found for layer in each] == list(range(len(seconds)))
    assert all(found)
    best = min(slowest(each) for each in combinations(range(1, len(seconds)), chunks - 1))
    assert slowest([each.stop for each in found[:-1]]) == best
