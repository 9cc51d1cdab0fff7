"""Attention under a plan equals attention of each document by itself, wherever its tokens were."""

import pytest
import torch
from testing import (
    RecordingTransport,
    make_plan,
    relative_error,
    run_ranks,
)
from testing.strict import StrictWorld
from testing.varlen import ReferenceVarlenOps

from attention.whole_documents import TOLERANCES, check, dense, documents, joined, run_rank, run_strict
from lengthwise.attention import FlashCpuKernel, ReferenceKernel
from lengthwise.attention.varlen import VarlenKernel
from lengthwise.core.plan import Piece

KERNELS = (FlashCpuKernel(), ReferenceKernel(), VarlenKernel(ReferenceVarlenOps()))


def test_planned_sums_bf16_gradients_in_fp32():
    """Section 7: bf16 partial sums in the ring backward. Gradients travel in fp32, keys in bf16; the sum is right."""
    plan = make_plan(5, [200], [Piece(ranks=(0, 2, 4, 3, 1), sequences=(0,))])
    rows = documents(plan.tokens, torch.bfloat16)
    recorded = {}

    def work(t):
        recorded[t.rank] = RecordingTransport(t)
        return run_rank(recorded[t.rank], plan, rows, FlashCpuKernel())

    ring = joined(rows, StrictWorld(5).run(work))
    kinds = [[dtype.removeprefix("torch.") for *_, dtype in call.sends] for call in recorded[0].calls]
    forward, backward = kinds[:4], kinds[4:]
    assert forward == [["bfloat16"]] * 4
    assert backward == [["bfloat16"], ["bfloat16"], *[["bfloat16", "float32"]] * 2, ["float32"], ["float32"]]
    alone = joined(rows, run_strict(make_plan(1, [200], [Piece(ranks=(0,), sequences=(0,))]), rows))
    for name, a, b, c in zip(("out", "dq", "dk", "dv"), ring[0], alone[0], dense(rows[0]), strict=True):
        assert relative_error(a, c) <= 1.5 * relative_error(b, c) + 1e-4, name


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize(
    "piece",
    [Piece(ranks=(1,), sequences=(0, 1, 2)), Piece(ranks=(0, 2, 1), sequences=(0, 1, 2))],
    ids=["packed on one rank", "packed over a ring"],
)
def test_packed_documents_do_not_see_each_other_bit_for_bit(dtype, piece):
    """Section 7: packed documents seeing each other. Another neighbour, not one bit changes, gradients included."""
    for other in (1, 2, 9, 40):
        before, after = [17, 8, 23], [17, 8, 23]
        plan = make_plan(3, before, [piece])
        rows = documents(before, dtype)
        changed = documents(after, dtype)
        changed[1] = documents(after, dtype, seed=1, spread=50.0)[1]
        a, b = joined(rows, run_strict(plan, rows)), joined(changed, run_strict(plan, changed))
        for kept in (0, 2):
            assert all(torch.equal(x, y) for x, y in zip(a[kept], b[kept], strict=True))
        assert not torch.equal(a[1][0], b[1][0])
        # A neighbour of another length: the first document's place in the pack does not change.
        longer = make_plan(3, [17, other, 23], [piece])
        c = joined(others := documents([17, other, 23], dtype), run_strict(longer, others))
        assert all(torch.equal(x, y) for x, y in zip(a[0], c[0], strict=True))


@pytest.mark.parametrize("ranks", [2, 5])
def test_planned_equals_dense_on_gloo(ranks):
    ring = tuple(range(0, ranks, 2)) + tuple(reversed(range(1, ranks, 2)))
    plan = make_plan(
        ranks,
        [61, 5, 1, 18, 2 * ranks + 1],
        [
            [Piece(ranks=ring, sequences=(0,)), Piece(ranks=(1,), sequences=(1,))],
            Piece(ranks=ring[::-1], sequences=(2, 3)),
            Piece(ranks=(0, 1), sequences=(4,), heads=2, shares=(2, 1)),
        ],
    )
    rows = documents(plan.tokens, torch.float64)
    by_rank = run_ranks(lambda t: run_rank(t, plan, rows, FlashCpuKernel()), ranks)
    check(by_rank, rows)
    strict = joined(rows, run_strict(plan, rows))
    gloo = joined(rows, by_rank)
    assert all(torch.equal(a, b) for x, y in zip(gloo, strict, strict=True) for a, b in zip(x, y, strict=True))


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: type(kernel).__name__)
@pytest.mark.parametrize("window", [1, 128, 150])
def test_windows_equal_dense_in_tiles_and_over_chunk_borders(kernel, window):
    pieces = [Piece(ranks=(0, 2, 1), sequences=(0,)), Piece(ranks=(1,), sequences=(1, 2))]
    plan = make_plan(3, [700, 301, 40], pieces)
    sinks, rows = torch.tensor([1.0, 0.0, -1.0, 30.0], dtype=torch.float64), documents(plan.tokens)
    check(run_strict(plan, rows, kernel, window=window, sinks=sinks), rows, window=window, sinks=sinks)


def test_sinks_of_any_size_do_not_overflow():
    plan = make_plan(2, [30], [Piece(ranks=(0, 1), sequences=(0,))])
    sinks, rows = torch.tensor([1e4, -1e4, 700.0, -700.0], dtype=torch.float64), documents(plan.tokens)
    check(run_strict(plan, rows, window=7, sinks=sinks), rows, window=7, sinks=sinks)
