"""Plans of mode `pipeline`: valid, in one order on every stage, near the bound, refused where they make no sense."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from testing.fake_nccl import FakeNccl
from testing.order import check_order
from testing.stage_actions import stage_items

from lengthwise.core.errors import ConfigError, Problems
from lengthwise.core.plan import Microbatch, Piece, Plan
from lengthwise.core.shape import Cluster, LayerCut
from lengthwise.cost import Cost, all_terms_cost, named_hardware, named_shape, plain_cost
from lengthwise.data.recipes import draw_lengths
from lengthwise.planner import PlanOptions, plan_step, score
from lengthwise.planner.problem.bounds import least_makespan
from lengthwise.planner.problem.request import PlanRequest
from lengthwise.program import check_plan, ring_order
from properties import costliest
from tiers import more

COMPUTE = Cost(quadratic_seconds=1.0, linear_seconds=32768.0, version="compute only")
TERMS = plain_cost(quadratic_seconds=1.0, linear_seconds=32768.0, fixed_seconds=2e7, ring_seconds=4e3)
COSTS = (
    COMPUTE,
    TERMS,
    plain_cost(linear_seconds=1.0, hop_seconds=500.0),
    Cost(fixed_seconds=1.0),
    plain_cost(ring_seconds=1.0),
)
CAPACITY = 97


@costliest
@given(
    ranks=st.sampled_from((1, 2, 3, 5, 12)),
    tokens=st.lists(st.sampled_from([1, 2, 96, 97, 98, 194, 195, 1009]) | st.integers(1, 900), min_size=1, max_size=25),
    stages=st.sampled_from((1, 2, 3, 5)),
    virtual=st.sampled_from((1, 2, 3)),
    cost=st.sampled_from(COSTS) | st.none(),
    planner=st.sampled_from(("lengthwise", "lengthwise", "bytescale", "static")),
)
def test_pipelines_plan_any_lengths_on_any_ranks(
    ranks: int, tokens: list[int], stages: int, virtual: int, cost: Cost | None, planner: str
) -> None:
    cost = cost or all_terms_cost(named_shape("llama-7b"), named_hardware("h100"), stages=stages)
    cluster = Cluster(ranks=ranks, capacity_tokens=CAPACITY)
    tokens = [min(length, cluster.longest_tokens) for length in tokens]
    options = {"mode": "pipeline", "stages": stages, "virtual": virtual, "layers": 32, "planner": planner}
    plan = plan_step(tokens, cluster, cost, PlanOptions(**options))
    assert plan.schedule == {"kind": "pipeline", "stages": stages, "virtual": virtual}
    check_plan(plan)
    assert plan.notes["predicted_seconds"] == score(plan, cost).makespan_seconds
    assert plan.notes["bound_seconds"] <= plan.notes["predicted_seconds"] * (1 + 1e-9)
    assert Plan.from_json(plan.to_json()) == plan
    assert plan_step(tokens, cluster, cost, PlanOptions(**options)).digest() == plan.digest()
    for microbatch in plan.microbatches:
        for piece in microbatch.pieces:
            assert piece.ranks == ring_order(min(piece.ranks), piece.degree)
    assert FakeNccl(stage_items(plan, *[lambda *_: 1.0] * 3)).seconds > 0
    check_order(replace(plan, schedule={"kind": "free"}, requires=()))


@pytest.mark.parametrize(
    ("recipe", "stages", "virtual", "cost", "most"),
    [
        ("prolong", 2, 1, TERMS, 1.04),
        more("prolong", 4, 2, TERMS, 1.06),
        more("prolong", 8, 1, COMPUTE, 1.15),
        more("wikipedia", 2, 2, TERMS, 1.03),
        ("wikipedia", 8, 2, TERMS, 1.13),
    ],
)
def test_pipelines_end_near_the_bound_and_before_free_plans(
    recipe: str, stages: int, virtual: int, cost: Cost, most: float
) -> None:
    cluster = Cluster(ranks=16, capacity_tokens=8192)
    tokens = draw_lengths(recipe, 262_144 * 16, 0, longest_tokens=100_000)
    plan = plan_step(tokens, cluster, cost, PlanOptions(mode="pipeline", stages=stages, virtual=virtual))
    check_plan(plan)
    free = replace(plan, microbatches=plan_step(tokens, cluster, cost).microbatches)
    assert plan.notes["predicted_seconds"] <= most * plan.notes["bound_seconds"]
    assert plan.notes["predicted_seconds"] < 0.985 * score(free, cost).makespan_seconds


def test_pipelines_of_equal_sequences_reach_the_formula() -> None:
    """64 sequences on 2 ranks: 32 slots of one each, ramps make it shorter still where launches are free."""
    cost = Cost(linear_seconds=1.0, fixed_seconds=500.0)
    plan = plan_step([1000] * 64, Cluster(ranks=2, capacity_tokens=1000), cost, PlanOptions(mode="pipeline", stages=4))
    assert plan.notes["predicted_seconds"] <= 1500 * (32 + 3) * (1 + 1e-9)


def test_bound_of_pipelines_is_reached_by_one_sequence_and_by_launches() -> None:
    cost = Cost(linear_seconds=1.0, fixed_seconds=50.0)
    cluster = Cluster(ranks=2, capacity_tokens=100)
    plan = plan_step([200], cluster, cost, PlanOptions(mode="pipeline", stages=5))
    assert plan.notes["predicted_seconds"] == 5 * 150
    assert plan.notes["bound_seconds"] == pytest.approx(5 * 150)
    request = PlanRequest(tokens=(100,) * 20, cluster=cluster, cost=cost)
    options = {"topology": request.topology}
    assert least_makespan(request.lengths, cluster, cost, **options) == 1500
    assert least_makespan(request.lengths, cluster, cost, **options, cut=LayerCut(stages=5, virtual=2)) == 1500 + 50 * 2


def test_microbatches_of_a_rank_grow_and_fall_and_their_stages_never_wait_long() -> None:
    """Local packs at the ends are no larger than those in the middle."""
    tokens = draw_lengths("wikipedia", 400_000, 0, longest_tokens=8000)
    cluster = Cluster(ranks=2, capacity_tokens=8192)
    plan = plan_step(tokens, cluster, COMPUTE, PlanOptions(mode="pipeline", stages=4))
    for rank in (0, 1):
        mine = [m.pieces[0] for m in plan.microbatches if m.ranks == (rank,)]
        seconds = [COMPUTE.piece_seconds([tokens[i] for i in piece.sequences], 1) for piece in mine]
        assert max(seconds[0], seconds[-1]) < 0.8 * max(seconds)
        rises = sum(b > a for a, b in pairwise(seconds[: len(seconds) // 4]))
        assert rises >= len(seconds) // 8


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"mode": "pipeline"}, "stages: expected a number in mode pipeline"),
        ({"mode": "pipeline", "stages": 0}, "stages: expected a whole number of at least 1"),
        ({"mode": "pipeline", "stages": True}, "stages: expected a whole number"),
        ({"mode": "pipeline", "stages": 2, "virtual": 0}, "virtual: expected a whole number of at least 1"),
        ({"mode": "pipeline", "stages": 3, "virtual": 2}, "at most the 4 layers; got 3 x 2"),
        ({"stages": 2}, "stages: expected nothing in mode free"),
        ({"mode": "waves", "virtual": 2}, "virtual: expected nothing in mode waves"),
    ],
)
def test_stages_that_make_no_sense_are_refused(options: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        plan_step([5], Cluster(ranks=2, capacity_tokens=10), COMPUTE, PlanOptions(layers=4, **options))


def test_all_problems_of_stages_are_told_at_once() -> None:
    with pytest.raises(Problems, match=r"(?s)stages: .*virtual: "):
        plan_step([5], Cluster(ranks=2, capacity_tokens=10), COMPUTE, PlanOptions(stages=2, virtual=2))


def test_stages_other_than_those_of_the_costs_are_refused() -> None:
    cost = all_terms_cost(named_shape("llama-7b"), named_hardware("h100"), stages=2)
    with pytest.raises(ConfigError, match="expected 2, as in the costs; got 4"):
        plan_step([5], Cluster(ranks=2, capacity_tokens=10), cost, PlanOptions(mode="pipeline", stages=4))


def test_pipeline_writes_the_golden_plan() -> None:
    tokens = [300, 120, 90, 55, 10, 7, 1, 1, 99, 230, 101] * 2
    plan = plan_step(
        tokens, Cluster(ranks=3, capacity_tokens=100), TERMS, PlanOptions(mode="pipeline", stages=2, virtual=2)
    )
    assert plan.to_json() == (Path(__file__).parent / "golden" / "pipeline.json").read_text()


def test_a_rank_beside_a_ring_is_one_microbatch_on_its_stages() -> None:
    pieces = (Piece(ranks=(0, 1), sequences=(0,)), Piece(ranks=(1,), sequences=(1,)))
    schedule = {"kind": "pipeline", "stages": 3, "virtual": 1}
    plan = Plan(
        ranks=2,
        layers=3,
        capacity=100,
        tokens=(100, 30),
        microbatches=(Microbatch(pieces=pieces),),
        schedule=schedule,
        requires=("pipeline",),
    )
    cost = Cost(linear_seconds=1.0)
    # each of six passes takes rank 1 the longer, and both wait for it
    assert score(plan, cost).makespan_seconds == pytest.approx(3 * 80)


def test_a_pipeline_of_some_hundred_sequences_ends_no_later_than_other_planners():
    """With more than 10,000 sequences x ranks; power-of-two's plan once ended 0.3 % sooner."""
    tokens = [*range(100, 1996, 6), 65536]
    cost = all_terms_cost(named_shape("llama-7b"), named_hardware("h100"), stages=2)
    ends = {
        planner: plan_step(
            tokens,
            Cluster(ranks=32, capacity_tokens=4096),
            cost,
            PlanOptions(planner=planner, mode="pipeline", stages=2, virtual=2, layers=32),
        ).notes["predicted_seconds"]
        for planner in ("lengthwise", "single-degree", "power-of-two")
    }
    assert ends["lengthwise"] == min(ends.values()), ends
