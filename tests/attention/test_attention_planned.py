"""Attention under any plan equals that of each document by itself, heads split or not, in few calls."""

import itertools
from dataclasses import replace
from itertools import accumulate, chain, pairwise
from math import prod

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from testing import RecordingTransport, draw_lengths, make_plan, random_plan, relative_error
from testing.plans import with_branches
from testing.varlen import ReferenceDenseOps, ReferenceVarlenOps

from attention.whole_documents import DIM, TOLERANCES, check, dense, documents, run_strict
from lengthwise.attention import FlashCpuKernel, ReferenceKernel, packs
from lengthwise.attention.cudnn import ByLengthKernel, DenseKernel
from lengthwise.attention.packs import runs_of
from lengthwise.attention.varlen import VarlenKernel
from lengthwise.core.errors import PlanError
from lengthwise.core.plan import Piece
from lengthwise.core.shape import ModelShape
from lengthwise.cost import all_terms_cost, named_hardware
from lengthwise.program import MutualSpans, ring_order
from tiers import more, some

KERNELS = (FlashCpuKernel(), ReferenceKernel(), VarlenKernel(ReferenceVarlenOps()))


def test_planned_sums_bf16_gradients_in_fp32():
    """Gradients travel in fp32, keys in bf16; the sum is right."""
    plan = make_plan(5, [200], [Piece(ranks=(0, 2, 4, 3, 1), sequences=(0,))])
    rows, calls = documents(plan.tokens, torch.bfloat16), []
    (ring,), _ = run_strict(plan, rows, around=lambda t: t if t.rank else RecordingTransport(t, calls))
    kinds = [[dtype.removeprefix("torch.") for *_, dtype in call.sends] for call in calls]
    assert kinds[:4] == [["bfloat16"]] * 4
    assert kinds[4:] == [["bfloat16"], ["bfloat16"], *[["bfloat16", "float32"]] * 2, ["float32"], ["float32"]]
    (alone,), _ = run_strict(make_plan(1, [200], [Piece(ranks=(0,), sequences=(0,))]), rows)
    for name, a, b, c in zip(("out", "dq", "dk", "dv"), ring, alone, dense(rows)[0][0], strict=True):
        assert relative_error(a, c) <= 1.5 * relative_error(b, c) + 1e-4, name


@pytest.mark.parametrize("dtype", some(TOLERANCES, -1), ids=str)
@pytest.mark.parametrize(
    "piece",
    [Piece(ranks=(1,), sequences=(0, 1, 2)), Piece(ranks=(0, 2, 1), sequences=(0, 1, 2))],
    ids=["packed on one rank", "packed over a ring"],
)
def test_packed_documents_do_not_see_each_other_bit_for_bit(dtype, piece):
    """Another neighbour, also one of another length, and not one bit changes, gradients included."""

    def attended(rows):
        return run_strict(make_plan(3, [len(row[0]) for row in rows], [piece]), rows)[0]

    rows = documents([17, 8, 23], dtype)
    found, others = attended(rows), documents([17, 8, 23], dtype, seed=1, spread=50.0)
    changed = attended([rows[0], others[1], rows[2]])
    assert all(map(torch.equal, [*found[0], *found[2]], [*changed[0], *changed[2]]))
    assert not torch.equal(found[1][0], changed[1][0])
    for other in (1, 2, 9, 40):
        assert all(map(torch.equal, found[0], attended(documents([17, other, 23], dtype))[0]))


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: type(kernel).__name__)
def test_windows_equal_dense_in_tiles_and_over_chunk_borders(kernel):
    pieces = [Piece(ranks=(0, 2, 1), sequences=(0,)), Piece(ranks=(1,), sequences=(1, 2))]
    plan = make_plan(3, [700, 301, 40], pieces)
    sinks, rows = torch.tensor([1e4, -1e4, 1.0, 30.0], dtype=torch.float64), documents(plan.tokens)
    check(run_strict(plan, rows, kernel, window=150, sinks=sinks), rows, window=150, sinks=sinks)


def both_ways(lengths, seed):
    """Draw spans of each sequence; some begin or end it."""
    random = np.random.default_rng(seed)
    borders = [np.unique(random.integers(0, n + 1, 2 * random.integers(1, 4))).tolist() for n in lengths]
    return tuple(tuple(zip(each[:-1:2], each[1::2], strict=False)) for each in borders)


def over_rings(ranks, seed):
    """Place four sequences: a long one on all ranks, packs, and one whose heads are split where ranks come in pairs."""
    heads = 2 if ranks % 2 == 0 else 1
    pieces = [
        [Piece(ranks=ring_order(0, ranks), sequences=(0,)), Piece(ranks=(0,), sequences=(1, 2))],
        Piece(ranks=ring_order(0, ranks), sequences=(3, 4), heads=heads),
    ]
    lengths = np.random.default_rng(seed).integers(1, 90, 5).tolist()
    return make_plan(ranks, [120, *lengths[1:]], pieces)


@pytest.mark.parametrize(
    ("kernel", "window", "ranks", "seed"),
    [
        (KERNELS[0], 5, 3, 0),
        (KERNELS[2], None, 4, 1),
        *(more(*each) for each in itertools.product(KERNELS, (None, 1, 5, 40), (1, 2, 3, 4, 6), range(2))),
    ],
    ids=lambda value: type(value).__name__ if value in KERNELS else str(value),
)
def test_tokens_of_an_image_see_each_other_wherever_it_is_cut(kernel, window, ranks, seed):
    """Also through windows smaller than the image, which hide what lies before alone."""
    plan = over_rings(ranks, seed)
    rows, spans = documents(plan.tokens), both_ways(plan.tokens, seed)
    for in_windows in (False, True):
        found = run_strict(plan, rows, kernel, window=window, mutual=MutualSpans(spans=spans, in_windows=in_windows))
        check(found, rows, window=window, mutual=spans if window or not in_windows else ())


LONG, SHORT = 16_384, 32  # 128 tiles and one


@pytest.mark.parametrize(
    ("lengths", "alone", "expected"),
    [
        ([SHORT] * 250 + [LONG] + [SHORT] * 250, range(0), [250, 1, 250]),
        ([SHORT] * 3 + [LONG] * 2 + [SHORT] * 4, range(0), [9]),  # 889 empty tiles cost less than two calls
        ([SHORT] * 3 + [LONG] * 2 + [SHORT] * 4, range(4096, 10**6), [3, 1, 1, 4]),
        ([SHORT] * 3 + [LONG], range(4096, 10_000), [4]),  # a window cuts the long one
        ([], range(0), []),
    ],
)
def test_documents_are_cut_where_empty_tiles_cost_more_than_a_call(lengths, alone, expected):
    assert [len(run) for run in runs_of(lengths, alone)] == expected


# Long documents first, in the middle, last, two of them, none, only: a microbatch each.
PACKED = ((50, 3, 4), (3, 50, 4), (3, 4, 50), (3, 50, 40, 4), (3, 4, 5), (50,))
NUMBERS = [range(start, stop) for start, stop in pairwise([0, *accumulate(map(len, PACKED))])]
ON_A_RING = [
    Piece(ranks=(1,), sequences=(0,)),
    Piece(ranks=(0, 2, 1), sequences=(1,)),
    Piece(ranks=(1,), sequences=(2, 3)),
]
SPLIT = [Piece(ranks=(0, 1), sequences=(0, 1), heads=2), Piece(ranks=(1,), sequences=(2, 3))]
PLANS = {
    "one rank": (1, [*chain(*PACKED)], [[Piece(ranks=(0,), sequences=tuple(each))] for each in NUMBERS]),
    "the diagonal of a ring between others": (3, [3, 150, 4, 41], [ON_A_RING]),
    "split heads": (2, [60, 3, 4, 41], [SPLIT]),
}


@pytest.mark.parametrize("window", [None, 45])
@pytest.mark.parametrize("by_length", some([True, False]))
@pytest.mark.parametrize("name", PLANS)
def test_documents_of_several_calls_equal_dense(monkeypatch, name, by_length, window):
    """With sinks; a window of 45 tokens cuts all long documents but one of 40."""
    monkeypatch.setattr(packs, "_TILE_TOKENS", 8)
    monkeypatch.setattr(packs, "_TILES_OF_A_CALL", 3)
    dense, varlen = ReferenceDenseOps(), ReferenceVarlenOps()
    kernel = VarlenKernel(varlen)
    if by_length:
        kernel = ByLengthKernel(DenseKernel(dense), kernel, diagonal_tokens=20, full_tokens=16)
    ranks, lengths, pieces = PLANS[name]
    sinks, rows = torch.tensor([1.0, 0.0, -1.0, 30.0], dtype=torch.float64), documents(lengths)
    how = {"window": window, "sinks": sinks}
    check(run_strict(make_plan(ranks, lengths, pieces), rows, kernel, **how), rows, **how)
    if ranks > 1:
        assert dense.shapes if by_length and window is None else varlen.calls
        return
    alone = {None: 6, 45: 1}[window] if by_length else 0
    assert len(dense.shapes) == 2 * alone
    assert varlen.calls == 2 * (2 + 3 + 2 + (4 if alone else 3) + 1 + 1 - alone)  # 50 and 40 tokens go together


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
