"""What a rank does in a step: every pass once, in an order that all ranks can keep, and both sides of every message."""

import random
from itertools import product

from hypothesis import given
from hypothesis import strategies as st
from testing.pipelines import as_pipeline
from testing.plans import random_plan

from lengthwise.program import last_on_all_ranks
from lengthwise.program.step_program import step_program


@given(
    seed=st.integers(0, 2**16),
    replicas=st.integers(1, 4),
    cut=st.sampled_from([(1, 1), (2, 1), (2, 2), (3, 1), (3, 2)]),
    train=st.booleans(),
    counts=st.booleans(),
)
def test_every_microbatch_runs_forward_and_backward_once_and_every_message_has_both_sides(
    seed, replicas, cut, train, counts
):
    choose, (stages, virtual) = random.Random(seed), cut
    plan = random_plan(choose, replicas, [9] * choose.randint(1, 8))
    plan = plan if cut == (1, 1) else as_pipeline(plan, *cut)
    chunks, sent, received = stages * virtual, set(), set()
    for replica, stage in product(range(replicas), range(stages)):
        program, done = step_program(plan, replica, stage, train=train, counts_routers=counts), list[tuple]()
        for part, turns in enumerate((program.counting or (), program.turns)):
            come, ticks = dict[tuple, int](), [turn.tick for turn in turns]
            assert ticks == sorted(set(ticks))
            for turn in turns:
                if turn.action is not None:
                    key = (*turn.action.place, turn.action.is_forward)
                    done.append((turn.action.kind, *turn.action.place))
                    if turn.action.place.chunk not in ((0,) if turn.action.is_forward else (chunks - 1,)):
                        assert come.pop(key) < turn.tick
                sent |= {(part, turn.tick, replica, stage, m.stage, *m.place, m.is_forward) for m in turn.sends}
                received |= {(part, turn.tick, replica, m.stage, stage, *m.place, m.is_forward) for m in turn.receives}
                come |= {(*m.place, m.is_forward): turn.tick for m in turn.receives}
            assert not come
        own = [number for number, each in enumerate(plan.microbatches) if replica in each.ranks]
        places = [(number, chunk) for number in own for chunk in range(stage, chunks, stages)]
        kinds = {kind: [place for what, *place in done if what == kind] for kind in ("counting", "forward", "backward")}
        assert sorted(map(tuple, kinds["forward"])) == places
        assert sorted(map(tuple, kinds["backward"])) == places * train
        kept = last_on_all_ranks(plan) if stages == 1 else ()
        again = [place for place in places if place[0] not in kept]
        assert sorted(map(tuple, kinds["counting"])) == again * (train and counts)
        for place in places * train:
            assert done.index(("forward", *place)) < done.index(("backward", *place))
    assert sent == received
    passes = train + 1 + (train and counts)
    assert len(sent) == sum(len(each.ranks) for each in plan.microbatches) * passes * (chunks - 1)
