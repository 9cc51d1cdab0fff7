"""Loops on one device: the replay of plans, put together as simulated, and steps as plain Hugging Face takes them."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from testing import make_plan, relative_error

from gpu import loops
from gpu.loops import OurLoop, PlainLoop
from gpu.replay import ReplayTransport, makespan_of, replayed_seconds
from gpu.setting import PLANNERS, packs_of, plan_for
from lengthwise.core.plan import Piece
from lengthwise.core.shape import Cluster
from lengthwise.cost import all_terms_cost, named_hardware, named_shape
from lengthwise.engine.batch import random_batch
from lengthwise.simulator import simulate_plan
from lengthwise.simulator.rounds import microbatch_clocks
from properties import costly

CPU = torch.device("cpu")
COST = all_terms_cost(named_shape("llama-7b"), replace(named_hardware("h100"), node_uplink_bytes_per_second=1e18))


@costly
@given(
    lengths=st.lists(st.integers(1, 60_000), min_size=1, max_size=12),
    ranks=st.sampled_from([1, 3, 8]),
    planner=st.sampled_from(PLANNERS),
)
def test_microbatches_as_simulated_make_the_simulated_makespan(lengths, ranks, planner):
    cluster = Cluster(ranks=ranks, capacity_tokens=max(8192, -(-max(lengths) // ranks) + 1))
    plan = plan_for(lengths, COST, cluster, planner=planner, layers=32)
    seconds = {}
    for index, microbatch in enumerate(plan.microbatches):
        clocks = microbatch_clocks(microbatch, plan.tokens, COST)
        seconds.update({(rank, index): each for rank, each in zip(clocks.ranks, clocks.compute.tolist(), strict=True)})
    simulated = float(simulate_plan(plan, COST).work_end_seconds.max())
    assert makespan_of(plan, seconds, COST) == pytest.approx(simulated, rel=0.02)
    slower = {key: 2 * each for key, each in seconds.items()}
    assert makespan_of(plan, slower, COST) > 1.3 * makespan_of(plan, seconds, COST)


def test_what_arrives_is_a_copy_of_the_right_size():
    transport = ReplayTransport(1, 3, CPU)
    keys = torch.arange(6.0).view(2, 3)
    shorter, longer, other = torch.empty(4), torch.empty(2, 7), torch.empty(3, dtype=torch.float64)
    transport.exchange([(keys, 2)], [(shorter, 0), (longer, 0), (other, 0)]).wait()
    assert shorter.tolist() == [0, 1, 2, 3]
    assert longer.flatten().tolist() == [0, 1, 2, 3, 4, 5] * 2 + [0, 1]
    assert other.isfinite().all()


def test_every_microbatch_of_every_rank_is_timed_and_leaves_no_gradient():
    loop = OurLoop("tiny", CPU, torch.float32)
    lengths = (40, 9, 17, 3)
    pieces = [
        [Piece(ranks=(0, 2, 1), sequences=(0,)), Piece(ranks=(3,), sequences=(1,))],
        [Piece(ranks=(2, 3), sequences=(2,), heads=2)],
        [Piece(ranks=(1,), sequences=(3,))],
    ]
    plan = make_plan(5, lengths, pieces, layers=2)
    found = replayed_seconds(loop, plan, random_batch(lengths, vocab=256))
    assert set(found) == {(0, 0), (1, 0), (2, 0), (3, 0), (2, 1), (3, 1), (1, 2)}
    assert all(0 < seconds < 60 for seconds in found.values())
    assert not loop.parameters.grads.any()


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
