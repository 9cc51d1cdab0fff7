"""Steps of FSDP2 in lock-step, against times computed by hand."""

from dataclasses import replace

import pytest

from lengthwise.core.shape import Cluster
from lengthwise.core.timeline import Timeline
from lengthwise.cost import Cost, all_terms_cost, named_hardware, named_shape, sharded_traffic, step_memory
from lengthwise.planner import PlanOptions
from lengthwise.program import check_plan
from lengthwise.simulator import simulate_plan
from lengthwise.simulator.rivals import LockStep, packed, padded

LINEAR = Cost(linear_seconds=1.0, fixed_seconds=0.5)


def _step(how: LockStep, tokens: list[int], ranks: int, capacity: int, recompute: str = "none") -> Timeline:
    """Plan and simulate one step; the planner says what is simulated."""
    cluster, options = Cluster(ranks=ranks, capacity_tokens=capacity), PlanOptions(recompute=recompute)
    plan = how(tokens, cluster, LINEAR, options)
    check_plan(plan)
    timeline = simulate_plan(plan, LINEAR)
    assert plan.notes["predicted_seconds"] == pytest.approx(timeline.step_seconds)
    return timeline


def test_traffic_is_bytes_over_links() -> None:
    """Of 8 devices in a node each receives 7/8 of a layer, in bf16, and sends 7/8 of its gradients in fp32."""
    shape, hardware = named_shape("llama-3.1-8b"), named_hardware("h100")
    memory = replace(step_memory(shape, hardware, 8), shard="zero3")
    traffic = sharded_traffic(memory, all_terms_cost(shape, hardware))
    layer = 4096 * 128 * (2 * 32 + 2 * 8) + 3 * 4096 * 14336
    assert traffic.gather_seconds == pytest.approx(2 * layer * 7 / 8 / 370e9)
    assert traffic.reduce_seconds == pytest.approx(4 * layer * 7 / 8 / 370e9)
    assert traffic.rest_gather_seconds == pytest.approx(2 * 2 * 4096 * 128256 * 7 / 8 / 370e9)
    adapters = sharded_traffic(replace(memory, trained=layer), all_terms_cost(shape, hardware))
    assert adapters.gather_seconds == traffic.gather_seconds
    assert adapters.reduce_seconds == pytest.approx(traffic.reduce_seconds / 32)
    assert adapters.rest_reduce_seconds == 0


def test_lock_step_waits_for_the_slowest_of_every_microbatch() -> None:
    """Three microbatches on two devices: 10 and 4 side by side, then 6 alone; each costs half a second more."""
    run = _step(LockStep(size=1), [10, 4, 6], 2, 10)
    assert sorted(run.start.tolist()) == pytest.approx([0.0, 0.0, 10.5])
    assert sorted(run.end.tolist()) == pytest.approx([4.5, 10.5, 17.0])
    assert run.step_seconds == pytest.approx(17.0)
    assert run.held_tokens.max() == 10


def test_lock_step_cuts_every_microbatch_over_the_same_ranks() -> None:
    run = _step(LockStep(size=1, degree=2), [10, 4], 5, 10)
    assert sorted(zip(run.rank.tolist(), run.end.tolist(), strict=True)) == [(0, 5.5), (1, 5.5), (2, 2.5), (3, 2.5)]
    assert run.held_tokens.max() == 5


def test_recomputation_runs_forward_again() -> None:
    once, again = (_step(LockStep(size=1), [10], 1, 10, kind).step_seconds for kind in ("none", "layer"))
    assert again == pytest.approx(4 / 3 * once)


def test_padding_fills_up_to_the_longest_of_a_microbatch() -> None:
    assert padded([3, 9, 5, 1, 2], 2, by_length=False) == [[9, 9], [5, 5], [2]]
    assert padded([3, 9, 5, 1, 2], 2, by_length=True) == [[9, 9], [3, 3], [1]]


def test_packing_keeps_sequences_whole_and_packs_full() -> None:
    tokens = [6, 5, 4, 3, 2, 7, 8, 1]
    packs = packed(tokens, 9)
    assert sorted(length for pack in packs for length in pack) == sorted(tokens)
    assert [sum(pack) for pack in packs] == [9, 9, 9, 9]
    assert packed(tokens, 9) == packs
    with_long = packed([9, 9, 1], 9)
    assert sorted(map(sum, with_long)) == [1, 9, 9]
