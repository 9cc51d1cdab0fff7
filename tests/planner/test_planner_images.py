"""Plans that know the work on images: ranks finish together, images cut over ranks count on each, prefixes once."""

from dataclasses import replace

import numpy as np
import pytest

from lengthwise.core.cut import chunk_bounds
from lengthwise.core.errors import PlanError
from lengthwise.core.plan import ImageWork, Plan
from lengthwise.core.prefixes import shared_prefixes
from lengthwise.cost import Cost, Tree, lengths_of
from lengthwise.cost.rank_speeds import RanStep, rank_speeds
from lengthwise.planner import PlanOptions, score
from lengthwise.planner.service.step_planning import StepPlanning
from lengthwise.simulator.clocks import simulate_plan

COST = Cost(linear_seconds=1.0, cut_seconds=9.0)  # no ring pays


def planned(lengths, images=(), shared=None, *, ranks=2, capacity=400):
    planning = StepPlanning(ranks=ranks, cost=COST, capacities={"none": capacity}, options=PlanOptions())
    return planning.plan(lengths, shared, images)


def busy_seconds(plan, images):
    """Return the work of each rank, of a plan that cuts no sequence."""
    busy = [0.0] * plan.ranks
    for piece in (piece for microbatch in plan.microbatches for piece in microbatch.pieces):
        (rank,) = piece.ranks
        busy[rank] += sum(plan.tokens[i] + sum(work for _, work in images[i]) for i in piece.sequences)
    return busy


def test_ranks_finish_together_where_some_rows_have_images_and_scores_and_files_know_it():
    lengths = [100] * 3 + [49] * 18
    images = [[(5, 200.0), (50, 100.0)]] * 3 + [[]] * 18
    plan = planned(lengths, images)
    busy = busy_seconds(plan, images)
    assert max(busy) <= 1.03 * sum(busy) / 2
    by_tokens = busy_seconds(planned(lengths), images)
    assert max(by_tokens) > 1.1 * sum(by_tokens) / 2
    assert plan.images == (ImageWork(300.0, 200.0),) * 3 + (ImageWork(),) * 18
    read = Plan.from_json(plan.to_json())
    assert read == plan
    seconds = score(read, COST).makespan_seconds
    assert max(busy) == pytest.approx(seconds, rel=0.03)  # equal lengths with other work count a token more
    assert seconds == pytest.approx(plan.notes["predicted_seconds"])
    assert simulate_plan(read, COST).step_seconds == pytest.approx(seconds)
    ran = [RanStep(plan=read, busy_seconds=score(read, COST).busy_seconds)] * 9
    assert rank_speeds(COST, ran) is None, "a rank with images is not a slow one"
    assert rank_speeds(COST, [replace(each, plan=replace(read, images=())) for each in ran]) is not None
    for wrong, told in (("[300.0, -1]", "two numbers from 0 to"), ("[300.0, 301.0]", "not more for the largest")):
        with pytest.raises(PlanError, match=rf"images\[0\]: expected .*{told}"):
            Plan.from_json(plan.to_json().replace("[300.0, 200.0]", wrong, 1))


@pytest.mark.parametrize("ranks", [2, 3, 8])
@pytest.mark.parametrize("largest", [40, 900])
def test_an_image_that_is_cut_counts_on_each_of_its_ranks(ranks, largest):
    random = np.random.default_rng(ranks)
    for _ in range(20):
        bounds = np.cumsum([0, *random.integers(largest // 2, largest, 4000 // largest)])
        tokens, works = int(bounds[-1]), np.diff(bounds) * 0.7
        chunks = np.cumsum([0, *np.diff(chunk_bounds(tokens, ranks, None))])
        real = [0.0] * ranks
        for chunk in range(2 * ranks):
            held = (bounds[:-1] < chunks[chunk + 1]) & (bounds[1:] > chunks[chunk])
            real[min(chunk, 2 * ranks - 1 - chunk)] += float(works[held].sum())
        tree = Tree((0,), ((0, tokens),), (ImageWork(float(works.sum()), float(works.max())),))
        (known_as,), cost = lengths_of([tree], Cost(linear_seconds=1.0))
        found = cost.piece_seconds([known_as], ranks) - tokens / ranks
        assert 0.6 * max(real) <= found <= 1.5 * max(real) + largest


def test_an_image_in_a_shared_prefix_counts_once():
    prompt = np.arange(300)
    shared = shared_prefixes([prompt] * 4, [330, 340, 350, 360])
    images = [[(2, 500.0)]] * 4
    plan = planned([330, 340, 350, 360], images, shared, ranks=1, capacity=2000)
    assert plan.parents == (4, 4, 4, 4, None)
    assert plan.images == (ImageWork(),) * 4 + (ImageWork(500.0, 500.0),)
    assert plan.notes["predicted_seconds"] == pytest.approx(300 + 30 + 40 + 50 + 60 + 500)
    assert plan.notes["seconds_apart"] == pytest.approx(1380 + 2000)
