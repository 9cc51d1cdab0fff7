"""Local search on small steps: valid, never worse, the same every time, and near the best plan there is."""

from hypothesis import given, settings
from hypothesis import strategies as st

from lengthwise.core.plan import Plan
from lengthwise.core.shape import Cluster
from lengthwise.cost import CostModel
from lengthwise.planner import check_plan, plan_step, score
from lengthwise.planner.refine import MOST_JOBS, MOST_RANKS, refine
from lengthwise.planner.request import PlanRequest
from lengthwise.planner.single_degree import plan_single_degree
from lengthwise.program import check_order

TERMS = CostModel(quadratic_seconds=1.0, linear_seconds=32768.0, fixed_seconds=2e7, ring_seconds=4e3)


def _plan(request: PlanRequest, microbatches) -> Plan:
    cluster = request.cluster
    return Plan(
        ranks=cluster.ranks,
        layers=1,
        capacity=cluster.capacity_tokens,
        tokens=request.tokens,
        microbatches=tuple(microbatches),
    )


@settings(deadline=None, max_examples=25)
@given(
    tokens=st.lists(st.sampled_from([1, 2, 3, 31, 63, 64, 65, 127, 190]), min_size=1, max_size=9),
    ranks=st.sampled_from([1, 2, 3, 5, 7]),
    cost=st.sampled_from([TERMS, CostModel(linear_seconds=1.0, fixed_seconds=30.0, ring_seconds=9.0, hop_seconds=2.0)]),
)
def test_refine_gives_a_valid_plan_that_ends_no_later(tokens: list[int], ranks: int, cost: CostModel) -> None:
    request = PlanRequest(
        tokens=tuple(min(n, 64 * ranks) for n in tokens), cluster=Cluster(ranks=ranks, capacity_tokens=64), cost=cost
    )
    before = _plan(request, plan_single_degree(request))
    makespan = score(before, cost).makespan_seconds
    after = _plan(request, refine(request, list(before.microbatches), makespan))
    check_plan(after)
    check_order(after)
    assert score(after, cost).makespan_seconds <= makespan
    assert request.shared_bound_seconds <= score(after, cost).makespan_seconds * (1 + 1e-9) or any(
        len(piece.sequences) > 1 and piece.degree > 1 for m in after.microbatches for piece in m.pieces
    )


def test_refine_tells_the_makespan_that_the_score_tells() -> None:
    # What annealing believes must be what the plan costs: a plan is only exchanged for one that ends sooner.
    tokens, cluster = (10795, 1705, 1184, 2351, 4136, 7806, 2305), Cluster(ranks=5, capacity_tokens=8192)
    request = PlanRequest(tokens=tokens, cluster=cluster, cost=TERMS)
    before = plan_single_degree(request)
    makespan = score(_plan(request, before), TERMS).makespan_seconds
    after = refine(request, before, makespan)
    gained = score(_plan(request, after), TERMS).makespan_seconds
    assert gained < 0.9 * makespan
    assert refine(request, before, gained * 0.5) is before  # nothing found is better than what was claimed


def test_refine_cuts_a_pack_over_a_ring_where_launches_are_dear() -> None:
    # The exact oracle's plan is one ring of all three: launches are shared and no rank waits.
    plan = plan_step([2431, 23034, 1879], Cluster(ranks=6, capacity_tokens=8192), TERMS)
    assert score(plan, TERMS).makespan_seconds <= 260481365.34 * 1.01


def test_refine_is_the_same_twice() -> None:
    cluster, tokens = Cluster(ranks=8, capacity_tokens=8192), [15572, 3405, 1643, 5124, 3173, 17495, 2007, 4383]
    assert plan_step(tokens, cluster, TERMS).digest() == plan_step(tokens, cluster, TERMS).digest()


def test_refine_leaves_large_steps_alone() -> None:
    for count, ranks in ((MOST_JOBS + 1, 2), (3, MOST_RANKS + 1)):
        cluster = Cluster(ranks=ranks, capacity_tokens=10_000)
        request = PlanRequest(tokens=(100,) * count, cluster=cluster, cost=TERMS)
        before = plan_single_degree(request)
        assert refine(request, before, float("inf")) is before
