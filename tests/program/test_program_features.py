"""Features of plans: found where they are used, refused by the readers that do not know them."""

from dataclasses import replace

import pytest
from testing.plans import make_plan

from lengthwise.core.errors import PlanError, Problems
from lengthwise.core.plan import KNOWN_FEATURES, Piece
from lengthwise.program import Feature, refuse_unsupported
from lengthwise.program.features import ENGINE, FIVE_COEFFICIENTS, SIMULATOR, feature_uses, features_of, uses_beyond

RING = Piece(ranks=(0, 2, 1), sequences=(0,))
PAIR = Piece(ranks=(1, 2), sequences=(1,))


def test_features_are_those_that_a_plan_uses_in_plan_order():
    plan = make_plan(3, [8, 4], [replace(RING, shares=(1.0, 2.0, 1.0)), PAIR])
    first, second = plan.microbatches
    plan = replace(plan, microbatches=(replace(first, recompute="layer"), replace(second, offload=0.5)))
    plan = replace(plan, schedule={"kind": "waves"}, notes={"speeds": [[3, 0.5]]})
    assert [(use.feature, use.microbatch) for use in feature_uses(plan)] == [
        ("waves", None),
        ("speeds", None),
        ("recompute", 0),
        ("shares", 0),
        ("offload", 1),
    ]
    assert not uses_beyond(plan, ENGINE)
    assert {use.feature for use in uses_beyond(plan, SIMULATOR)} == {Feature.SPEEDS}
    assert {use.feature for use in uses_beyond(plan, FIVE_COEFFICIENTS)} == {Feature.SHARES, Feature.OFFLOAD}


def test_features_of_plain_rings_and_speeds_of_one_are_none():
    assert not features_of(replace(make_plan(3, [8, 4], [RING, PAIR]), notes={"speeds": [[2, 1], [1, 1.0]]}))
    assert {str(feature) for feature in Feature} >= KNOWN_FEATURES


def test_features_heads_and_schedules_are_refused_by_name():
    heads = make_plan(4, [8], [replace(RING, ranks=(0, 1, 2, 3), heads=2)])
    refuse_unsupported(heads)
    refuse_unsupported(heads, num_heads=6)
    with pytest.raises(PlanError, match=r"microbatch 0: heads.*divisor of the model's 7 attention heads.* 2"):
        refuse_unsupported(heads, num_heads=7)
    refuse_unsupported(replace(make_plan(3, [8], [RING]), schedule={"kind": "waves"}))
    with pytest.raises(PlanError, match=r"schedule.*pipeline"):
        refuse_unsupported(replace(make_plan(3, [8], [RING]), schedule={"kind": "pipeline"}))
    with pytest.raises(Problems) as several:
        refuse_unsupported(replace(heads, schedule={"kind": "pipeline"}), num_heads=7)
    assert len(several.value.problems) == 2
