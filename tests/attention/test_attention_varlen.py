"""GPU kernels without a GPU: calls of a step, joined, masked and long blocks, and operators that raw calls bind to."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from testing import make_plan, relative_error
from testing.strict import StrictWorld
from testing.varlen import ReferenceDenseOps, ReferenceVarlenOps
from torch.utils._python_dispatch import TorchDispatchMode

from lengthwise.attention import Block, PlannedAttention, ReferenceKernel, Saved
from lengthwise.attention.cuda_kernels import EfficientKernel, TorchVarlenOps
from lengthwise.attention.cudnn import ByLengthKernel, CudnnOps, DenseKernel
from lengthwise.attention.kernels import BlockMask
from lengthwise.attention.packs import Pack, PackKernel
from lengthwise.attention.varlen import VarlenKernel
from lengthwise.core.plan import Piece
from lengthwise.program import lower_plan


def draw(tokens, heads=4, kv_heads=2, dim=8, dtype=torch.float64):
    random = torch.Generator().manual_seed(3)
    return [torch.randn(tokens, n, dim, generator=random, dtype=torch.float64).to(dtype) for n in (heads, kv_heads, 2)]


class NoOps:
    """Raw calls that compute nothing; `calls` lists their numbers of documents."""

    name, caps_scores = "none", False

    def __init__(self):
        self.calls = []

    def forward(self, block, documents):
        self.calls.append(len(documents.cu_seqlens_q) - 1)
        return block.q, block.q.new_zeros(block.q.shape[1::-1])

    def backward(self, grad_out, block, saved, documents):
        self.calls.append(len(documents.cu_seqlens_q) - 1)
        return block.q, block.k, block.v


def answers(count, prompts=1):
    """Prompts and the answers to them on one ring of four ranks."""
    lengths, parents = [], []
    for _ in range(prompts):
        parents += [None, *[len(parents)] * count]
        lengths += [60, *[24 + each % 5 for each in range(count)]]
    plan = make_plan(4, lengths, [Piece(ranks=(0, 1, 3, 2), sequences=tuple(range(len(lengths))))])
    return replace(plan, parents=tuple(parents))


def test_calls_and_operations_of_a_ring_step_do_not_grow_with_sequences():
    """One call for what each sequence sees of itself, one for what answers see of their prompts."""

    class Count(TorchDispatchMode):
        number = 0

        def __torch_dispatch__(self, function, _types, arguments=(), named=None):
            self.number += 1
            return function(*arguments, **(named or {}))

    def work(transport, plan):
        (program,) = lower_plan(plan, transport.rank)
        ops = NoOps()
        planned = PlannedAttention(program, transport, VarlenKernel(ops))
        q, k, v = draw(planned.num_rows)
        planned.lower([None], q.device)
        with torch.no_grad(), Count() as count:
            out, attended = planned.forward(Block(q=q, k=k, v=v, scale=0.3))
            planned.backward(out, attended, (4, 2, 2))
        return len(ops.calls), count.number

    few, many, more_prompts = (
        StrictWorld(4).run(partial(work, plan=plan)) for plan in (answers(3), answers(16), answers(3, prompts=8))
    )
    for (calls, operations), *others in zip(few, many, more_prompts, strict=True):
        assert calls <= 2 * (1 + 2 * 4)
        assert all(other == calls and number <= 1.2 * operations for other, number in others)


def test_efficient_kernel_hands_masked_blocks_to_the_reference():
    q, k, v = draw(9)
    mask = BlockMask(queries=9, keys=9, distance=0, causal=True, window=3)
    block = Block(q=q, k=k, v=v, causal=True, scale=0.3, mask=mask)
    out, lse = EfficientKernel().forward(block)
    assert torch.equal(out, ReferenceKernel().forward(block)[0])
    grads, expected = (
        kernel.backward(out, block, Saved(out=out, lse=lse)) for kernel in (EfficientKernel(), ReferenceKernel())
    )
    assert all(map(torch.equal, grads, expected))


CPU = torch.device("cpu")


def draw_heads(tokens, heads=(4, 2, 2, 4), dim=8, seed=3):
    random = torch.Generator().manual_seed(seed)
    return [torch.randn(tokens, n, dim, generator=random, dtype=torch.float64) for n in heads]


def by_length(**limits):
    dense, varlen = ReferenceDenseOps(), ReferenceVarlenOps()
    return ByLengthKernel(DenseKernel(dense), VarlenKernel(varlen), **limits), dense, varlen


@example(tokens=256, dim=8, heads_first=True)
@given(tokens=st.integers(1, 300), dim=st.sampled_from([5, 8]), heads_first=st.booleans())
def test_a_padded_causal_block_gives_what_the_block_gives(tokens, dim, heads_first):
    """Under out and lse of more keys than its own, as in a ring; operands with gaps are handed over without."""
    heads = (2, 1, 1, 2)
    q, k, v, grad = draw_heads(tokens, heads, dim=dim)
    earlier = draw_heads(7, heads, dim=dim, seed=4)
    reference, dense = ReferenceKernel(), ReferenceDenseOps()
    kernel = DenseKernel(dense)
    block = Block(q=q, k=k, v=v, scale=0.3)
    wanted = reference.forward(block)
    out, lse = reference.forward(
        Block(q=q, k=torch.cat((k, earlier[1])), v=torch.cat((v, earlier[2])), scale=0.3, causal=False)
    )
    expected = (*wanted, *reference.backward(grad, block, Saved(out=out, lse=lse)))
    if heads_first:
        q, k, v, grad = (x.transpose(0, 1).contiguous().transpose(0, 1) for x in (q, k, v, grad))
        lse = torch.cat((lse, lse), dim=1)[:, :tokens]
    block = Block(q=q, k=k, v=v, scale=0.3)
    got = (*kernel.forward(block), *kernel.backward(grad, block, Saved(out=out, lse=lse)))
    assert all(a.shape == b.shape and relative_error(a, b) < 1e-12 for a, b in zip(got, expected, strict=True))
    assert dense.shapes == [(-(-tokens // 256) * 256,) * 2 + (True,)] * 2


def test_long_blocks_go_to_one_kernel_and_all_others_to_the_other():
    kernel, dense, _ = by_length(diagonal_tokens=8, full_tokens=16)
    assert isinstance(kernel, PackKernel)
    assert (kernel.name, kernel.token_multiple) == ("reference dense from 8 tokens of one document on, else "
                                                    "reference varlen", 128)  # fmt: skip

    def where(queries, keys, causal, mask=None):
        before = len(dense.shapes)
        q, k = draw_heads(queries)[0], draw_heads(keys)
        block = Block(q=q, k=k[1], v=k[2], scale=0.3, causal=causal, mask=mask)
        out, lse = kernel.forward(block)
        kernel.backward(out, block, Saved(out=out, lse=lse))
        return ["rest", "long"][(len(dense.shapes) - before) // 2]

    assert where(8, 8, True) == "long"
    assert where(7, 7, True) == "rest"
    assert where(16, 17, False) == "long"
    assert where(15, 64, False) == where(64, 15, False) == "rest"
    mask = BlockMask(queries=20, keys=20, distance=0, causal=True, window=9)
    assert where(20, 20, True, mask) == "rest"
    assert kernel.alone_from == 8
    torch.use_deterministic_algorithms(True)
    try:
        assert where(8, 8, True) == "rest"
        assert kernel.alone_from is None
    finally:
        torch.use_deterministic_algorithms(False)


# torch 2.11: later releases add arguments after these, by keyword alone.
SCHEMAS = {
    "_flash_attention_forward": "aten::_flash_attention_forward(Tensor query, Tensor key, Tensor value, "
    "Tensor? cum_seq_q, Tensor? cum_seq_k, SymInt max_q, SymInt max_k, float dropout_p, bool is_causal, "
    "bool return_debug_mask, *, float? scale=None, SymInt? window_size_left=None, SymInt? window_size_right=None, "
    "Tensor? seqused_k=None, Tensor? alibi_slopes=None) -> (Tensor output, Tensor softmax_logsumexp, "
    "Tensor rng_state, Tensor unused, Tensor debug_attn_mask)",
    "_flash_attention_backward": "aten::_flash_attention_backward(Tensor grad_out, Tensor query, Tensor key, "
    "Tensor value, Tensor out, Tensor logsumexp, Tensor cum_seq_q, Tensor cum_seq_k, SymInt max_q, SymInt max_k, "
    "float dropout_p, bool is_causal, Tensor rng_state, Tensor unused, *, float? scale=None, "
    "SymInt? window_size_left=None, SymInt? window_size_right=None) -> (Tensor, Tensor, Tensor)",
    "_scaled_dot_product_efficient_attention": "aten::_scaled_dot_product_efficient_attention(Tensor query, "
    "Tensor key, Tensor value, Tensor? attn_bias, bool compute_log_sumexp, float dropout_p=0., bool is_causal=False, "
    "*, float? scale=None) -> (Tensor output, Tensor log_sumexp, Tensor philox_seed, Tensor philox_offset)",
    "_scaled_dot_product_efficient_attention_backward": "aten::_scaled_dot_product_efficient_attention_backward("
    "Tensor grad_out_, Tensor query, Tensor key, Tensor value, Tensor attn_bias, Tensor out, Tensor logsumexp, "
    "Tensor philox_seed, Tensor philox_offset, float dropout_p, bool[4] grad_input_mask, bool is_causal=False, *, "
    "float? scale=None) -> (Tensor, Tensor, Tensor, Tensor)",
}


def on_meta(queries, keys, shape, dtype=torch.bfloat16):
    heads, kv_heads, dim = shape
    rows = ((queries, heads), (keys, kv_heads), (keys, kv_heads))
    q, k, v = (torch.empty(tokens, number, dim, dtype=dtype, device="meta") for tokens, number in rows)
    return {"q": q, "k": k, "v": v, "scale": 0.1}


def pack_on_meta(window):
    borders = torch.empty(4, dtype=torch.int32, device="meta")
    return Pack(rows=slice(0, 300), cu_seqlens=borders, max_seqlen=200, window=window)


def call(forward, backward, block, *more):
    """Run both passes; return (out, lse, dq, dk, dv)."""
    out, lse = forward(block, *more)
    return (out, lse, *backward(out, block, Saved(out=out, lse=lse), *more))


def bind(schema, args, kwargs):
    """Return what keeps a call from binding to an operator's schema; empty where it binds."""
    places = [each for each in schema.arguments if not each.kwarg_only]
    by_place = {each.name for each in places[: len(args)]}
    wrong = [f"{len(args)} places of {len(places)}"] if len(args) > len(places) else []
    known = {each.name for each in schema.arguments}
    wrong += [f"unknown {name}" for name in kwargs if name not in known]
    wrong += [f"twice {name}" for name in kwargs if name in by_place]
    given = by_place | set(kwargs)
    return wrong + [f"no {x.name}" for x in schema.arguments if not x.has_default_value() and x.name not in given]


@pytest.mark.parametrize("name", SCHEMAS)
def test_calls_bind_to_the_operators_of_both_releases(monkeypatch, name):
    operator, calls = getattr(torch.ops.aten, name), []

    def heard(*args, **kwargs):
        calls.append((args, kwargs))
        return operator(*args, **kwargs)

    monkeypatch.setattr(torch.ops.aten, name, heard)
    block, varlen = Block(**on_meta(300, 300, (8, 2, 64))), VarlenKernel(TorchVarlenOps())
    call(varlen.forward_pack, varlen.backward_pack, block, pack_on_meta(50))
    for kernel in (EfficientKernel(), DenseKernel(CudnnOps())):
        call(kernel.forward, kernel.backward, block)
    assert len(calls) == 1
    assert bind(torch._C.parse_schema(SCHEMAS[name]), *calls[0]) == []  # the installed one took the call
