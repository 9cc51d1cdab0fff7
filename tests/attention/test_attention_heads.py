"""Heads split over groups of ranks, a ring over the groups: attention equals that of whole documents in one process."""

from dataclasses import replace
from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from testing import RecordingTransport, draw_lengths, make_plan, random_plan
from testing.plans import with_branches
from testing.varlen import ReferenceVarlenOps

from attention.whole_documents import DIM, check, documents, run_strict
from lengthwise.attention import FlashCpuKernel
from lengthwise.attention.varlen import VarlenKernel
from lengthwise.core.errors import PlanError
from lengthwise.core.plan import Piece
from lengthwise.core.shape import ModelShape
from lengthwise.cost import all_terms_cost, named_hardware


@given(
    choose=st.randoms(use_true_random=False),
    ranks=st.integers(1, 8),
    count=st.integers(1, 5),
    sizes=st.sampled_from(
        [(4, 2), (4, 1), (4, 4), (8, 2), (6, 2), (6, 3), (12, 4), (12, 3), (10, 5), (10, 2), (24, 8)]
    ),
    window=st.one_of(st.none(), st.integers(1, 45)),
    with_sinks=st.booleans(),
    dtype=st.sampled_from([torch.float64, torch.float32]),
    packs=st.sampled_from(["never", "always", "below 12"]),
)
def test_heads_equal_dense_under_any_plan(choose, ranks, count, sizes, window, with_sinks, dtype, packs):
    """Also under a kernel that joins blocks into packs, all or those of fewer than 12 tokens."""
    heads, kv_heads = sizes
    plan = random_plan(choose, ranks, draw_lengths(choose, ranks, count), num_heads=heads)
    plan = with_branches(choose, plan) if choose.random() < 0.5 else plan
    sinks = torch.linspace(-3, 2, heads, dtype=dtype) if with_sinks else None
    kernel = FlashCpuKernel() if packs == "never" else VarlenKernel(ReferenceVarlenOps())
    if packs == "below 12":
        kernel.full_from = 12
    rows = documents(plan.tokens, dtype, heads=heads, kv_heads=kv_heads)
    check(run_strict(plan, rows, kernel, window=window, sinks=sinks), rows, plan=plan, window=window, sinks=sinks)


@pytest.mark.parametrize(("tokens", "window"), [((80, 3, 2, 1), 2), ((17, 12, 9, 5), 14)])
def test_windows_reach_from_sequence_to_sequence(tokens, window):
    """Two sequences continue one that continues another, in a ring; the first have fewer tokens than it has chunks."""
    ring = Piece(ranks=(0, 2, 3, 1), sequences=(0, 1, 2, 3))
    plan, rows = replace(make_plan(4, tokens, [ring]), parents=(None, 0, 1, 1)), documents(tokens)
    check(run_strict(plan, rows, window=window), rows, plan=plan, window=window)


def test_heads_sum_shared_gradients_in_fp32_and_send_the_others_as_narrow_as_they_are():
    for kv_heads, sums in ((4, "bfloat16"), (1, "float32")):
        plan = make_plan(4, [200], [Piece(ranks=(0, 1, 2, 3), sequences=(0,), heads=4)])
        rows, calls = documents(plan.tokens, torch.bfloat16, heads=4, kv_heads=kv_heads), []
        record = lambda t, calls=calls: t if t.rank else RecordingTransport(t, calls)  # noqa: E731
        check(run_strict(plan, rows, around=record), rows)
        kinds = [{dtype.removeprefix("torch.") for *_, dtype in call.sends} for call in calls]
        assert kinds == [{"bfloat16"}, {"bfloat16"}, {"bfloat16"}, {sums}]


@pytest.mark.parametrize("heads", [1, 4])
def test_bytes_sent_are_those_that_costs_count(heads):
    """All-to-all and ring, both passes, of a model with as many heads of keys as ranks in a group, in bf16."""
    sizes = {"heads": 16, "kv_heads": 8}
    shape = ModelShape(name="t", layers=1, hidden=64, head_dim=DIM, intermediate=8, vocab=8, **sizes)
    cost, degree, tokens = all_terms_cost(shape, named_hardware("h100")), 8, 160
    plan = make_plan(degree, [tokens], [Piece(ranks=tuple(range(degree)), sequences=(0,), heads=heads)])
    calls = [[] for _ in range(degree)]
    rows = documents([tokens], torch.bfloat16, **sizes)
    run_strict(plan, rows, around=lambda t: RecordingTransport(t, calls[t.rank]))
    groups = degree // heads
    exchanged = cost.exchange_bytes * tokens / degree * (heads - 1) / heads
    passed = cost.ring_bytes * tokens * (groups - 1) / groups / heads
    for of_rank in calls:
        messages = [message for call in of_rank for message in call.sends]
        sent = sum(prod(size) * (4 if "32" in dtype else 2) for _, size, dtype in messages)
        assert sent == pytest.approx(exchanged + passed, rel=1e-12)


def test_heads_that_do_not_divide_those_of_the_model_are_refused_by_name():
    plan = make_plan(3, [9], [Piece(ranks=(0, 1, 2), sequences=(0,), heads=3)])
    rows = documents(plan.tokens, heads=4, kv_heads=2)
    with pytest.raises(PlanError, match=r"heads.*divisor of the model's 4 attention heads"):
        run_strict(plan, rows)
