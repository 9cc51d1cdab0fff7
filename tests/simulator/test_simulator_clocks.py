"""A step on the clocks of all ranks: against the score, waves, pipelines, the step's end."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from testing.pipelines import as_pipeline

from lengthwise.core.errors import PlanError
from lengthwise.core.plan import Microbatch, Piece, Plan
from lengthwise.core.shape import Cluster
from lengthwise.cost import all_terms_cost, analytic_cost, named_hardware, named_shape
from lengthwise.data.recipes import draw_lengths
from lengthwise.planner import PlanOptions, plan_step, score
from lengthwise.simulator import simulate_plan
from properties import costliest

SHAPE, HARDWARE = named_shape("llama-7b"), named_hardware("h100")
COST = all_terms_cost(SHAPE, HARDWARE)


def _local(*lengths: int, ranks: int = 2, **changes) -> Plan:
    microbatches = tuple(Microbatch(pieces=(Piece(ranks=(i % ranks,), sequences=(i,)),)) for i in range(len(lengths)))
    return Plan(ranks=ranks, layers=32, capacity=10**6, tokens=lengths, microbatches=microbatches, **changes)


SLOW_COPIES = all_terms_cost(SHAPE, replace(HARDWARE.with_kernel("flash2"), link_bytes_per_second=2e10))
LONG, SHORT = [200_000, 200_000, 90_000, 40_000, 9000, 3000] * 4, draw_lengths("github", 2_000_000, 1, 200_000)


@pytest.mark.parametrize(
    ("tokens", "capacity", "cost", "options"),
    [
        *((SHORT, 8192, COST, {"planner": planner}) for planner in ("power-of-two", "lengthwise")),
        (LONG, 4096, SLOW_COPIES, {"offload": "auto", "heads": "auto"}),
    ],
)
def test_simulated_step_is_near_the_score(tokens, capacity, cost, options) -> None:
    cluster = Cluster(ranks=32, capacity_tokens=capacity)
    plan = plan_step(tokens, cluster, cost, PlanOptions(layers=32, **options))
    timeline = simulate_plan(plan, cost)
    assert timeline.work_end_seconds.max() == pytest.approx(score(plan, cost).makespan_seconds, rel=0.05)
    assert timeline.step_seconds == timeline.work_end_seconds.max() + cost.step_end_seconds(32)
    ratios = timeline.compute_ratio + timeline.exposed_ratio + timeline.idle_ratio
    assert ratios + cost.step_end_seconds(32) / timeline.step_seconds == pytest.approx(1.0)
    has_choices = "offload" in options
    assert has_choices or timeline.most_held_tokens <= capacity + len(tokens)
    assert has_choices == any(each.offload > 0 for each in plan.microbatches)
    assert has_choices == any(piece.heads > 1 for each in plan.microbatches for piece in each.pieces)


@costliest
@given(
    tokens=st.lists(st.integers(1, 40_000), min_size=1, max_size=12),
    ranks=st.sampled_from([5, 8, 11]),
    planner=st.sampled_from(["static", "lengthwise", "bytescale"]),
)
def test_no_rank_is_in_two_microbatches_at_once(tokens: list[int], ranks: int, planner: str) -> None:
    plan = plan_step(tokens, Cluster(ranks=ranks, capacity_tokens=8192), COST, PlanOptions(planner=planner, layers=32))
    timeline = simulate_plan(plan, COST)
    for rank in range(ranks):
        mine = np.flatnonzero(timeline.rank == rank)
        assert np.all(timeline.start[mine][1:] >= timeline.end[mine][:-1])
        assert np.all(timeline.start[mine] < timeline.forward[mine])
        assert np.all(timeline.forward[mine] < timeline.end[mine])
        named = [i for i, m in enumerate(plan.microbatches) if rank in m.ranks]
        assert timeline.microbatch[mine].tolist() == named
    again = simulate_plan(plan, COST)
    assert again.end.tolist() == timeline.end.tolist()


def test_local_packs_take_what_the_costs_say() -> None:
    timeline = simulate_plan(_local(5000, 300, 200), COST)
    each = [COST.piece_seconds([n], 1) + COST.fixed_seconds for n in (5000, 300, 200)]
    assert timeline.end.tolist() == pytest.approx([each[0], each[1], each[0] + each[2]])
    forward = timeline.forward - timeline.start
    assert forward[0] < 0.34 * each[0]
    assert timeline.held_tokens.tolist() == [5000, 300, 200]


def test_waves_start_together() -> None:
    plan = _local(5000, 300, 200)
    waves = replace(plan, schedule={"kind": "waves"}, requires=("waves",))
    assert simulate_plan(waves, COST).step_seconds == pytest.approx(
        score(waves, COST).makespan_seconds + COST.step_end_seconds(2)
    )


def test_pipelines_are_near_their_score() -> None:
    cost = all_terms_cost(SHAPE, HARDWARE, stages=4)
    tokens = draw_lengths("prolong", 500_000, 1, longest_tokens=50_000)
    plan = plan_step(tokens, Cluster(ranks=16, capacity_tokens=8192), cost, PlanOptions(layers=32))
    plan = as_pipeline(plan, 4, 2)
    timeline = simulate_plan(plan, cost)
    assert timeline.work_end_seconds.max() == pytest.approx(score(plan, cost).makespan_seconds, rel=0.05)
    ratios = timeline.compute_ratio + timeline.exposed_ratio + timeline.idle_ratio
    assert ratios + cost.step_end_seconds(16) / timeline.step_seconds == pytest.approx(1.0)
    assert len(timeline.rank) == 4 * 2 * sum(len(m.ranks) for m in plan.microbatches)


def test_messages_between_stages_delay_a_pipeline_of_equal_packs() -> None:
    cost = all_terms_cost(SHAPE, HARDWARE, stages=4)
    plan = _local(*[8192] * 16)
    free = replace(cost, stage_bytes=0.0, far=replace(cost.far, hop_seconds=0.0))
    (t,) = {COST.piece_seconds([8192], 1) / 4 + COST.fixed_seconds / 4}
    assert simulate_plan(plan, free).work_end_seconds.max() == pytest.approx(t * (8 + 3))
    assert simulate_plan(plan, free).idle_ratio == pytest.approx(3 / 11, rel=0.2)  # of the step, its end included
    sent = float(cost.stage_send_seconds(np.array([8192.0]))[0])
    late = simulate_plan(plan, cost).work_end_seconds.max() - t * 11
    assert 6 * sent <= late * (1 + 1e-9) < 60 * sent  # three hops forward and three back, at least


def test_stages_of_waves_go_through_them_together() -> None:
    cost = all_terms_cost(SHAPE, HARDWARE, stages=2)
    waves = replace(_local(5000, 300, 200), schedule={"kind": "waves"}, requires=("waves",))
    timeline = simulate_plan(waves, cost)
    for index in range(3):
        for stage in (0, 1):
            mine = (timeline.microbatch == index) & (timeline.stage == stage)
            assert len(set(timeline.start[mine])) == len(set(timeline.backward[mine])) == 1
    assert timeline.work_end_seconds.max() == pytest.approx(score(waves, cost).makespan_seconds, rel=0.05)


SIMPLE = analytic_cost(SHAPE, HARDWARE)


@pytest.mark.parametrize(
    ("run", "cost", "changes", "said"),
    [
        (simulate_plan, SIMPLE, {"offload": 0.5}, "offload: expected costs that price copies"),
        (simulate_plan, COST, {"notes": {"speeds": [[1, 1.0], [1, 0.5]]}}, "unequal ranks"),
        (simulate_plan, COST, {"shares": (1.0, 2.0), "heads": 2}, "split heads"),
        (simulate_plan, all_terms_cost(SHAPE, HARDWARE, stages=4), {"stages": 2}, "stages"),
        (score, all_terms_cost(SHAPE, HARDWARE, stages=4), {"stages": 2}, "expected 4, as in the costs; got 2"),
    ],
)
def test_what_cannot_be_simulated_is_refused(run, cost, changes, said) -> None:
    plan = replace(_local(5000, 300, 200), notes=changes.get("notes", {}))
    pair = Piece(ranks=(0, 1), sequences=(0,), shares=changes.get("shares"), heads=changes.get("heads", 1))
    first = Microbatch(pieces=(pair,), offload=changes.get("offload", 0.0))
    plan = replace(plan, microbatches=(first, *plan.microbatches[1:]))
    with pytest.raises(PlanError, match=said):
        run(as_pipeline(plan, changes["stages"]) if "stages" in changes else plan, cost)


def test_a_step_takes_what_was_planned_where_rings_wait_in_every_layer() -> None:
    tokens = draw_lengths("prolong", 4 * 2**20, 0, longest_tokens=100_000)
    plan = plan_step(tokens, Cluster(ranks=64, capacity_tokens=7680), COST, PlanOptions(layers=SHAPE.layers))
    planned = score(plan, COST).makespan_seconds
    assert simulate_plan(plan, COST).work_end_seconds.max() <= planned * 1.01  # 1.03 with packs beside rings
    rings = [microbatch for microbatch in plan.microbatches if len(microbatch.ranks) > 1]
    assert rings
    assert all(len(microbatch.pieces) == 1 for microbatch in rings)
