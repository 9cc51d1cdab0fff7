"""The replay of plans on one device: what arrives, what is timed, and how microbatches are put together again."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from testing import make_plan

from gpu.loops import OurLoop
from gpu.replay import ReplayTransport, makespan_of, replayed_seconds
from gpu.setting import PLANNERS, plan_for
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


class ManualEvent:
    """An event of a device whose clock is turned by hand, in milliseconds."""

    now = 0.0

    def __init__(self, *, enable_timing):
        assert enable_timing, "an event without timing has no elapsed time"

    def record(self):
        self.at = ManualEvent.now

    def elapsed_time(self, later):
        return later.at - self.at


def test_on_a_gpu_microbatches_are_timed_by_events_of_its_stream(monkeypatch):
    waited = []
    monkeypatch.setattr(torch.cuda, "Event", ManualEvent)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: waited.append(device))
    gpu = torch.device("cuda", 0)
    transport = ReplayTransport(0, 2, gpu)
    for phase, milliseconds in (("start", 5), ("microbatch 1 of 2 forward", 20), ("microbatch 1 of 2 backward", 30)):
        transport.phase = phase
        ManualEvent.now += milliseconds
    transport.phase = "microbatch 2 of 2 forward"
    ManualEvent.now += 7
    transport.mark()
    assert not waited, "the host does not wait between microbatches"
    assert transport.seconds() == pytest.approx([0.050, 0.007])
    assert waited == [gpu]
