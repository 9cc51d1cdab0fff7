"""Steps beside plain Hugging Face: the same losses, the same updates, torch's varlen call as each release has it."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from testing import relative_error

from gpu import loops
from gpu.loops import OurLoop, PlainLoop
from gpu.setting import packs_of, plan_for
from lengthwise.core.shape import Cluster
from lengthwise.cost import all_terms_cost, named_hardware, named_shape
from lengthwise.engine.batch import random_batch

CPU = torch.device("cpu")
LENGTHS = [50, 3, 20, 1, 30]


@pytest.mark.parametrize(("packed", "recompute"), [(False, "none"), (True, "layer")])
def test_rivals_take_the_same_steps(packed, recompute):
    cost = all_terms_cost(named_shape("tiny"), named_hardware("cpu"))
    cluster = Cluster(ranks=1, capacity_tokens=64)
    plan = plan_for(LENGTHS, cost, cluster, layers=2, recompute=recompute)
    assert {each.recompute for each in plan.microbatches} == {recompute}
    batch = random_batch(LENGTHS, vocab=256)
    ours = OurLoop("tiny", CPU, torch.float32)
    rival = PlainLoop("tiny", CPU, torch.float32, packed=packed, pack_tokens=64)
    for _ in range(3):
        assert rival.step(plan, batch) == pytest.approx(ours.step(plan, batch), rel=1e-5)
    assert relative_error(rival.parameters.values, ours.parameters.values) < 1e-6
    assert rival.model.config._attn_implementation == (loops.VARLEN if packed else "sdpa")


@given(lengths=st.lists(st.integers(1, 90), min_size=1, max_size=40), pack_tokens=st.integers(1, 100))
def test_packs_hold_all_and_no_more_than_asked_unless_alone(lengths, pack_tokens):
    packs = packs_of(lengths, pack_tokens)
    assert sorted(index for pack in packs for index in pack) == list(range(len(lengths)))
    assert all(len(pack) == 1 or sum(lengths[index] for index in pack) <= pack_tokens for pack in packs)
