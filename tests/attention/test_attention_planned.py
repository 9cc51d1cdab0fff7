"""Attention under a plan equals attention of each document by itself, wherever its tokens were."""

import pytest
import torch
from testing import (
    RecordingTransport,
    dense_attention,
    make_plan,
    relative_error,
    rounding_floor,
    run_ranks,
)
from testing.strict import StrictWorld
from testing.varlen import ReferenceVarlenOps

from lengthwise.attention import FlashCpuKernel, PlannedAttention, ReferenceKernel, planned_attention
from lengthwise.attention.varlen import VarlenKernel
from lengthwise.core.errors import LengthwiseError
from lengthwise.core.plan import Piece
from lengthwise.program import lower_plan

HEADS, KV_HEADS, DIM, SCALE = 4, 2, 4, 0.4
KERNELS = (FlashCpuKernel(), ReferenceKernel(), VarlenKernel(ReferenceVarlenOps()))
TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}


def documents(lengths, dtype, *, seed=0, spread=1.0):
    """Draw (q, k, v, grad_out) of each sequence; a sequence's values depend on its index and length only."""
    rows = []
    for i, length in enumerate(lengths):
        random = torch.Generator().manual_seed(1000 * seed + i)
        shapes = ((length, HEADS, DIM), (length, KV_HEADS, DIM), (length, KV_HEADS, DIM), (length, HEADS, DIM))
        rows.append([(torch.randn(s, generator=random, dtype=torch.float64) * spread).to(dtype) for s in shapes])
    return rows


def dense(rows):
    """Return [out, dq, dk, dv] of each sequence, computed alone in fp64."""
    results = []
    for q, k, v, grad_out in rows:
        q, k, v = (x.double().clone().requires_grad_() for x in (q, k, v))
        out, _ = dense_attention(q, k, v, scale=SCALE)
        results.append([out.detach(), *torch.autograd.grad(out, (q, k, v), grad_out.double())])
    return results


def run_rank(transport, plan, rows, kernel):
    """Return [(sequence, start, stop, [out, dq, dk, dv])] of this rank's segments; all forwards come first."""
    pieces = []
    for program in lower_plan(plan, transport.rank):
        segments = program.segments(transport.rank)
        q, k, v, grad_out = (
            torch.cat([rows[s.sequence][n][s.start : s.stop] for s in segments])
            .transpose(0, 1)
            .contiguous()
            .transpose(0, 1)
            for n in range(4)
        )
        leaves = [x.requires_grad_() for x in (q, k, v)]
        out = planned_attention(*leaves, PlannedAttention(program, transport, kernel), scale=SCALE)
        assert out.dtype == q.dtype
        results = [out.detach(), *torch.autograd.grad(out, leaves, grad_out)]
        start = 0
        for s in segments:
            rows_of = slice(start, start + s.num_tokens)
            pieces.append((s.sequence, s.start, s.stop, [x[rows_of].clone() for x in results]))
            start += s.num_tokens
        assert start == len(q)
    return pieces


def joined(plan, rows, by_rank):
    """Put the pieces of all ranks back into whole sequences; every token must have been computed once."""
    whole = [[torch.full_like(row[n], float("nan")) for n in (0, 0, 1, 2)] for row in rows]
    for sequence, start, stop, results in (piece for pieces in by_rank for piece in pieces):
        for into, part in zip(whole[sequence], results, strict=True):
            assert into[start:stop].isnan().all()
            into[start:stop] = part
    return whole


def run_strict(plan, rows, kernel=None):
    kernel = kernel or FlashCpuKernel()
    return joined(plan, rows, StrictWorld(plan.ranks).run(lambda t: run_rank(t, plan, rows, kernel)))


def check(got, rows, dtype):
    for i, (mine, wanted) in enumerate(zip(got, dense(rows), strict=True)):
        # dq and dk of a one-token document are zero in exact arithmetic: floored by the size of the others.
        least = 0.0 if dtype == torch.float64 else rounding_floor(*wanted[1:])
        for name, a, b in zip(("out", "dq", "dk", "dv"), mine, wanted, strict=True):
            error = relative_error(a, b, floor=max(least, 1e-2 * len(a) ** 0.5))
            assert error < TOLERANCES[dtype], f"{name} of sequence {i}, {len(a)} tokens: {error}"


@pytest.mark.parametrize("ranks", [2, 3, 5, 7])
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: type(kernel).__name__)
def test_planned_equals_dense_at_awkward_lengths(ranks, kernel):
    lengths = [1, 2, ranks - 1, ranks, 2 * ranks - 1, 2 * ranks, 2 * ranks + 1, 31, 127]
    ring = tuple((3 * r + 1) % ranks for r in range(ranks)) if ranks % 3 else tuple(reversed(range(ranks)))
    for microbatches in (
        [Piece(ranks=ring, sequences=(i,)) for i in range(9)],
        [Piece(ranks=ring, sequences=tuple(range(9)))],
    ):
        plan = make_plan(ranks, lengths, microbatches)
        rows = documents(lengths, torch.float64)
        check(run_strict(plan, rows, kernel), rows, torch.float64)


def test_planned_survives_scores_that_overflow_exp():
    plan = make_plan(3, [40], [Piece(ranks=(0, 1, 2), sequences=(0,))])
    rows = documents(plan.tokens, torch.float64, spread=60.0)
    check(run_strict(plan, rows), rows, torch.float64)


def test_planned_sums_bf16_gradients_in_fp32():
    """Section 7: bf16 partial sums in the ring backward. Gradients travel in fp32, keys in bf16; the sum is right."""
    plan = make_plan(5, [200], [Piece(ranks=(0, 2, 4, 3, 1), sequences=(0,))])
    rows = documents(plan.tokens, torch.bfloat16)
    recorded = {}

    def work(t):
        recorded[t.rank] = RecordingTransport(t)
        return run_rank(recorded[t.rank], plan, rows, FlashCpuKernel())

    ring = joined(plan, rows, StrictWorld(5).run(work))
    kinds = [[dtype.removeprefix("torch.") for *_, dtype in call.sends] for call in recorded[0].calls]
    forward, backward = kinds[:4], kinds[4:]
    assert forward == [["bfloat16"]] * 4
    assert backward == [["bfloat16"], ["bfloat16"], *[["bfloat16", "float32"]] * 2, ["float32"], ["float32"]]
    alone = run_strict(make_plan(1, [200], [Piece(ranks=(0,), sequences=(0,))]), rows)
    for name, a, b, c in zip(("out", "dq", "dk", "dv"), ring[0], alone[0], dense(rows)[0], strict=True):
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
        a, b = run_strict(plan, rows), run_strict(plan, changed)
        for kept in (0, 2):
            assert all(torch.equal(x, y) for x, y in zip(a[kept], b[kept], strict=True))
        assert not torch.equal(a[1][0], b[1][0])
        # A neighbour of another length: the first document's place in the pack does not change.
        longer = make_plan(3, [17, other, 23], [piece])
        c = run_strict(longer, documents([17, other, 23], dtype))
        assert all(torch.equal(x, y) for x, y in zip(a[0], c[0], strict=True))


def test_document_result_does_not_depend_on_its_place_in_a_pack():
    rows = documents([9, 14], torch.float32)
    first = run_strict(make_plan(1, [9, 14], [Piece(ranks=(0,), sequences=(0, 1))]), rows)
    second = run_strict(make_plan(1, [9, 14], [Piece(ranks=(0,), sequences=(1, 0))]), rows)
    assert all(torch.equal(a, b) for x, y in zip(first, second, strict=True) for a, b in zip(x, y, strict=True))


def test_planned_fails_at_once_when_ranks_run_opposite_orders():
    """Section 7: backward order differing from forward order and hanging; here it is an error on the first round."""
    rows = documents([12, 20], torch.float64)
    pieces = [Piece(ranks=(0, 1), sequences=(0,)), Piece(ranks=(0, 1), sequences=(1,))]
    plans = [make_plan(2, [12, 20], pieces), make_plan(2, [12, 20], pieces[::-1])]
    with pytest.raises(LengthwiseError, match="rank 0"):
        StrictWorld(2).run(lambda t: run_rank(t, plans[t.rank], rows, FlashCpuKernel()))


@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_planned_equals_dense_on_gloo(ranks):
    ring = tuple(range(0, ranks, 2)) + tuple(reversed(range(1, ranks, 2)))
    plan = make_plan(
        ranks,
        [61, 5, 1, 18, 2 * ranks + 1],
        [
            [Piece(ranks=ring, sequences=(0,)), Piece(ranks=(1,), sequences=(1,))],
            Piece(ranks=ring[::-1], sequences=(2, 3)),
            Piece(ranks=(0, 1), sequences=(4,), shares=(2, 1)),
        ],
    )
    rows = documents(plan.tokens, torch.float64)
    by_rank = run_ranks(lambda t: run_rank(t, plan, rows, FlashCpuKernel()), ranks)
    check(joined(plan, rows, by_rank), rows, torch.float64)
    strict = run_strict(plan, rows)
    gloo = joined(plan, rows, by_rank)
    assert all(torch.equal(a, b) for x, y in zip(gloo, strict, strict=True) for a, b in zip(x, y, strict=True))
