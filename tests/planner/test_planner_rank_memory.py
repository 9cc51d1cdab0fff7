"""What must fit: recomputation chosen for a step, capacities of a rank, and the ratio of offload that it needs."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lengthwise.core.errors import PlanError
from lengthwise.core.held import kept_ratio
from lengthwise.core.plan import Microbatch, Piece, Plan
from lengthwise.core.shape import Cluster
from lengthwise.cost import (
    Choice,
    MicrobatchBytes,
    Moments,
    StepBytes,
    all_terms_cost,
    named_hardware,
    named_shape,
    step_memory,
)
from lengthwise.planner import PlanOptions, plan_recomputed, plan_step
from lengthwise.planner.service.rank_memory import RankMemory
from lengthwise.planner.service.step_planning import StepPlanning
from lengthwise.program import check_plan

SHAPE, HARDWARE = named_shape("llama-7b"), named_hardware("h100")
COST = all_terms_cost(SHAPE, HARDWARE)
SLOW_LINKS = all_terms_cost(SHAPE, replace(HARDWARE, link_bytes_per_second=1e9, node_link_bytes_per_second=1e9))
CAPACITIES = {"none": 4096, "layer": 40_960, "all_but_attention": 16_384}


@pytest.mark.parametrize("cost", [COST, SLOW_LINKS], ids=["h100", "slow links"])
def test_the_kind_that_ends_first_is_kept(cost):
    tokens, planner = [60_000, 3000, 9000, 500], "bytescale"
    plan = plan_recomputed(tokens, 16, cost, CAPACITIES, PlanOptions(planner=planner, layers=32))
    check_plan(plan)
    seconds = {}
    for kind, capacity in CAPACITIES.items():
        options = PlanOptions(planner=planner, layers=32, recompute=kind)
        alone = plan_step(tokens, Cluster(ranks=16, capacity_tokens=capacity), cost, options)
        seconds[kind] = alone.notes["predicted_seconds"]
    (kind,) = {microbatch.recompute for microbatch in plan.microbatches}
    assert plan.notes["predicted_seconds"] == seconds[kind] == min(seconds.values())
    assert plan.capacity == CAPACITIES[kind]


def test_kinds_that_cannot_hold_a_sequence_are_left_to_others_that_can() -> None:
    plan = plan_recomputed([70_000], 2, COST, CAPACITIES, PlanOptions(layers=32))
    assert plan.microbatches[0].recompute == "layer"
    with pytest.raises(PlanError, match="2 ranks x 40960 tokens"):
        plan_recomputed([90_000], 2, COST, CAPACITIES, PlanOptions(layers=32))


def test_as_few_layers_as_needed_have_the_stronger_kind():
    """128K tokens over 8 ranks of an 8B model need 16K a rank: more than one kind holds, less than the next does."""
    shape, capacities = named_shape("qwen3-8b"), {"none": 5760, "elementwise": 14_336, "all_but_attention": 59_904}
    tokens, cost = [131_072] + [9000] * 30, all_terms_cost(shape, HARDWARE)
    planning = StepPlanning(ranks=8, cost=cost, capacities=capacities, options=PlanOptions(layers=36))
    plan, one = planning.plan(tokens), plan_recomputed(tokens, 8, cost, capacities, PlanOptions(layers=36))
    assert {each.recompute for each in plan.microbatches} == {"elementwise+6/36"}
    assert {each.recompute for each in one.microbatches} == {"all_but_attention"}
    assert one.notes["predicted_seconds"] > 1.05 * plan.notes["predicted_seconds"]
    assert plan.notes["bound_seconds"] <= plan.notes["predicted_seconds"]
    assert 36 / (31 / 14_336 + 5 / 59_904) < 16_384 <= plan.capacity < 59_904  # five layers are not enough
    memory = replace(step_memory(shape, HARDWARE, 8), shard="zero3")
    assert memory.peak_bytes(plan.capacity, Choice(recompute="elementwise+6/36")) <= HARDWARE.device_bytes * 0.9


@pytest.mark.parametrize(
    ("changes", "ratio"), [({"mode": "pipeline", "stages": 2}, None), ({}, 0.5)], ids=["stages", "a ratio of offload"]
)
def test_stages_and_a_given_ratio_of_offload_keep_one_kind(changes, ratio):
    capacities, options = {"elementwise": 14_336, "all_but_attention": 59_904}, PlanOptions(layers=36, **changes)
    cost = all_terms_cost(named_shape("qwen3-8b"), HARDWARE, stages=options.stages or 1)
    held = {kind: tokens // (1 if ratio is None else 2) for kind, tokens in capacities.items()}
    planning = StepPlanning(ranks=8, cost=cost, capacities=held, options=options, offload_ratio=ratio)
    assert {each.recompute for each in planning.plan([131_072]).microbatches} == {"all_but_attention"}


def test_a_plan_that_may_offload_offloads_nothing_beside_a_mix():
    capacities = {"elementwise": 14_336, "all_but_attention": 59_904}
    slow = replace(COST, copy_bytes_per_second=1e8)
    options = PlanOptions(layers=32, offload="auto")
    (found,) = StepPlanning(ranks=8, cost=slow, capacities=capacities, options=options).plan([131_072]).microbatches
    assert (found.recompute, found.offload) == ("elementwise+6/32", 0.0)


LAYERS = 10


def rank_memory(budget, *, saved=100.0, beside=40.0, of_chunk=0.0, leaving_bytes=0, **options):
    """A rank whose microbatches save so many bytes a row, and need so many beside them where backward begins."""
    line = Moments(live=np.array([[0.0, saved + beside, of_chunk]]), removable=np.array([[0.0, saved, 0.0]]))
    microbatch = MicrobatchBytes(
        layers=LAYERS, saved_fixed=0.0, saved_a_row=saved, forward=line, backward=line, **options
    )
    layouts = {"none": (StepBytes(layers=LAYERS, chunks={0: microbatch}),)}
    return RankMemory(budget_bytes=budget, layouts=layouts, leaving_bytes=leaving_bytes)


def plan_of(tokens, capacity, offload):
    microbatch = Microbatch(pieces=(Piece(ranks=(0,), sequences=(0,)),), offload=offload)
    return Plan(ranks=1, layers=LAYERS, capacity=capacity, tokens=(tokens,), microbatches=(microbatch,))


def test_capacity_is_what_fills_the_budget_in_steps_of_128_tokens():
    memory = rank_memory(140.0 * 1000)
    assert memory.most_tokens("none", 10**6) == 896
    assert memory.most_tokens("none", 500) == 512
    assert rank_memory(140.0 * 100).most_tokens("none", 10**6) == 0


def test_a_chunk_of_the_loss_and_of_a_scan_are_whole():
    """Logits are those of a chunk at most; a scan computes all rows of its last chunk."""
    memory = rank_memory(1.0, of_chunk=1000.0, chunk_rows=640, scan_rows=256)
    for tokens, computed in ((100, 256), (512, 512), (2000, 2048)):
        assert memory.peak_bytes("none", tokens) == 140 * computed + 1000 * min(computed, 640)


@given(st.integers(900, 2200))
def test_offload_is_as_much_as_a_microbatch_needs(tokens):
    """More than the plan file's rule, which counts all bytes as if they could go."""
    memory = rank_memory(140.0 * 1000)
    by_rule = min(1.0, (1 - 896 / tokens) * LAYERS / (LAYERS - 2))
    found = memory.with_offload(plan_of(tokens, 896, by_rule))
    if found is None:
        assert memory.peak_bytes("none", tokens, 1.0) > memory.budget_bytes
        return
    ratio = found.microbatches[0].offload
    assert ratio >= by_rule
    assert memory.peak_bytes("none", tokens, ratio) <= memory.budget_bytes
    if ratio > by_rule + 2e-4:
        assert memory.peak_bytes("none", tokens, ratio - 2e-4) > memory.budget_bytes


@pytest.mark.parametrize("ratio", [0.25, 0.5, 1.0])
def test_a_capacity_for_offload_fits_at_every_ratio(ratio):
    memory = rank_memory(140.0 * 10000)
    tokens = memory.most_tokens("none", 10**6, offload=None)
    assert 0 < tokens < memory.most_tokens("none", 10**6)
    assert memory.peak_bytes("none", int(tokens / kept_ratio(ratio, LAYERS)), ratio) <= memory.budget_bytes
    assert memory.most_held("none", ratio, 10**6) >= int(tokens / kept_ratio(ratio, LAYERS))


def test_what_is_leaving_counts_but_no_more_than_a_layer():
    at_once, slowly = (rank_memory(1.0, leaving_bytes=each).peak_bytes("none", 1000, 1.0) for each in (0, 10**9))
    assert at_once <= slowly <= at_once + 100 * 1000 // LAYERS
