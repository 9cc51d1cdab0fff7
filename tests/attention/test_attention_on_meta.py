"""The raw kernel calls of GPUs, on tensors without memory, bind to the operators of torch 2.11 and the installed."""

import pytest
import torch

from lengthwise.attention import Block, Saved
from lengthwise.attention.cuda_kernels import EfficientKernel, TorchVarlenOps
from lengthwise.attention.cudnn import CudnnOps, DenseKernel
from lengthwise.attention.packs import Pack
from lengthwise.attention.varlen import VarlenKernel

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
