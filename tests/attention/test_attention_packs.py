"""Documents of a rank in few calls: where they are cut, and that what the calls give together is exact."""

from itertools import accumulate, chain, pairwise

import pytest
import torch
from testing import make_plan
from testing.varlen import ReferenceDenseOps, ReferenceVarlenOps

from attention.whole_documents import check, documents, run_strict
from lengthwise.attention import packs
from lengthwise.attention.cudnn import ByLengthKernel, DenseKernel
from lengthwise.attention.packs import runs_of
from lengthwise.attention.varlen import VarlenKernel
from lengthwise.core.plan import Piece
from tiers import some

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
