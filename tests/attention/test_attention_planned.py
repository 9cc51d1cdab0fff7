"""Attention under a plan equals attention of each document by itself, wherever its tokens were, in few calls."""

import itertools
from itertools import accumulate, chain, pairwise

import numpy as np
import pytest
import torch
from testing import RecordingTransport, make_plan, relative_error
from testing.varlen import ReferenceDenseOps, ReferenceVarlenOps

from attention.whole_documents import TOLERANCES, check, dense, documents, run_strict
from lengthwise.attention import FlashCpuKernel, ReferenceKernel, packs
from lengthwise.attention.cudnn import ByLengthKernel, DenseKernel
from lengthwise.attention.packs import runs_of
from lengthwise.attention.varlen import VarlenKernel
from lengthwise.core.plan import Piece
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
