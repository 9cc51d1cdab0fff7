"""What `benchmarks/end_to_end.py` decides before and after it trains: ways and their options, rates, ratios."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from end_to_end import ratios, refuse_unequal, waiting_share
from lengthwise.core.plan import Plan
from lengthwise.core.shape import Cluster
from lengthwise.cost import Cost, all_terms_cost, named_hardware, named_shape
from lengthwise.program import check_plan
from lengthwise.simulator import simulate_plan
from properties import costliest
from rivals import ONE_BY_ONE, PACKED, WAYS, TimedStep, choose_ways

BATCHES = st.lists(st.lists(st.integers(1, 900), min_size=1, max_size=6), min_size=1, max_size=2)
RIVALS = WAYS[:-1]  # all that plan a small step in milliseconds


def tiny_cost() -> Cost:
    return all_terms_cost(named_shape("tiny"), named_hardware("cpu"))


def step(way: str, repeat: int, seconds: float, loss: float = 1.0, batch: int = 0) -> TimedStep:
    values = {"way": way, "repeat": repeat, "batch": batch, "seconds": seconds, "loss": loss}
    return TimedStep(work_seconds=seconds / 2, waited=(1.0, 0.0), **values)


@costliest
@given(batches=BATCHES, ranks=st.integers(1, 5))
def test_ways_are_plans_of_all_sequences_within_the_capacity(batches: list[list[int]], ranks: int) -> None:
    longest = max(map(max, batches))
    cluster = Cluster(ranks=ranks, capacity_tokens=-(-longest // ranks) + 7)
    found = {way.name: way for way in choose_ways(RIVALS, batches, cluster, tiny_cost(), 4)}
    alone = longest <= cluster.capacity_tokens
    assert set(found) == {*RIVALS[2:], *([PACKED] if alone else []), *([ONE_BY_ONE] if ranks == 1 else [])}
    for way in found.values():
        if way.name == ONE_BY_ONE:
            continue
        for lengths, plan in zip(batches, way.steps, strict=True):
            assert isinstance(plan, Plan)
            check_plan(plan)
            assert plan.tokens == tuple(lengths)
            assert plan.capacity <= cluster.capacity_tokens
        simulated = sum(simulate_plan(plan, tiny_cost()).step_seconds for plan in way.steps)
        assert way.simulated_seconds == pytest.approx(simulated)


def test_ratios_are_of_all_batches_of_a_repeat_and_leave_out_the_first_round() -> None:
    steps = [step("lengthwise", 0, 9.0), step(PACKED, 0, 1.0)]
    for repeat, slow in ((1, 3.0), (2, 2.0), (3, 2.5)):
        steps += [step("lengthwise", repeat, 1.0, batch=0), step("lengthwise", repeat, 1.0, batch=1)]
        steps += [step(PACKED, repeat, slow, batch=0), step(PACKED, repeat, 1.0, batch=1)]
    found = ratios(steps, lambda each: each.seconds)[PACKED]
    assert (found.least, found.median, found.most) == (1.5, 1.75, 2.0)
    assert ratios(steps, lambda each: each.seconds)["lengthwise"].median == 1.0
    assert waiting_share(steps, PACKED) == pytest.approx(6 / (2 * (3 + 2 + 2.5 + 3)))


def test_unequal_losses_end_the_benchmark() -> None:
    same = [step("lengthwise", 1, 1.0, loss=2.0), step(PACKED, 1, 1.0, loss=2.000001)]
    refuse_unequal(same)
    with pytest.raises(SystemExit, match="same losses"):
        refuse_unequal([*same, step("static", 1, 1.0, loss=2.0001)])
