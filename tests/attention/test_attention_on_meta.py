"""The raw kernel calls of GPUs on tensors without memory: torch checks shapes itself, so drift of a call is caught.

Arguments are also bound to the operators as torch 2.11 has them, whichever torch is installed; cuDNN's shapes are in
`test_attention_cudnn`.
"""

import re
from pathlib import Path

import pytest
import torch

from lengthwise import attention
from lengthwise.attention import Block, Saved
from lengthwise.attention.cuda_kernels import EfficientKernel, TorchVarlenOps
from lengthwise.attention.cudnn import CudnnOps, DenseKernel
from lengthwise.attention.kernels import BlockMask
from lengthwise.attention.packs import Pack
from lengthwise.attention.varlen import VarlenKernel

SHAPES = [(8, 2, 64), (8, 2, 20), (8, 8, 128), (4, 1, 256), (6, 3, 8)]  # heads, KV heads, head_dim

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
    return [torch.empty(tokens, number, dim, dtype=dtype, device="meta") for tokens, number in rows]


def pack_on_meta(window):
    return Pack(cu_seqlens=torch.empty(4, dtype=torch.int32, device="meta"), max_seqlen=200, window=window)


def check(found, q, k, v, *, lse_dtype):
    """`found`: (out, lse, dq, dk, dv)."""
    out, lse, *grads = found
    assert [x.shape for x in (out, *grads)] == [x.shape for x in (q, q, k, v)]
    assert [x.dtype for x in (out, *grads)] == [q.dtype] * 4
    assert (lse.shape, lse.dtype) == ((q.shape[1], len(q)), lse_dtype)
    assert all(x.is_meta for x in found)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("window", [None, 1, 50])
def test_varlen_packs_have_the_shapes_of_their_operands(shape, window):
    kernel, pack = VarlenKernel(TorchVarlenOps()), pack_on_meta(window)
    q, k, v = on_meta(300, 300, shape)
    block = Block(q=q, k=k, v=v, scale=0.1)
    out, lse = kernel.forward_pack(block, pack)
    grads = kernel.backward_pack(out, block, Saved(out=out, lse=lse), pack)
    check((out, lse, *grads), q, k, v, lse_dtype=torch.float32)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("queries", [1, 200, 300])
@pytest.mark.parametrize("window", [None, 310])
def test_varlen_blocks_have_the_shapes_of_their_operands(shape, queries, window):
    kernel = VarlenKernel(TorchVarlenOps())
    q, k, v = on_meta(queries, 300, shape)
    mask = BlockMask(queries=queries, keys=300, distance=300, causal=False, window=window) if window else None
    block = Block(q=q, k=k, v=v, causal=False, scale=0.1, mask=mask)
    out, lse = kernel.forward(block)
    grads = kernel.backward(out, block, Saved(out=out, lse=lse))
    check((out, lse, *grads), q, k, v, lse_dtype=torch.float32)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("queries", [1, 37, 300])
def test_efficient_blocks_have_the_shapes_of_their_operands(shape, dtype, queries):
    kernel = EfficientKernel()
    q, k, v = on_meta(queries, 300, shape, dtype)
    block = Block(q=q, k=k, v=v, causal=queries == 300, scale=0.1)
    out, lse = kernel.forward(block)
    grads = kernel.backward(out, block, Saved(out=out, lse=lse))
    check((out, lse, *grads), q, k, v, lse_dtype=torch.float32)


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


def operators_used():
    """List the raw operators that kernels of GPUs call, by their source: one that is added is tested here, too."""
    folder = Path(attention.__file__).parent
    found = {name for path in folder.glob("*.py") for name in re.findall(r"torch\.ops\.aten\.(\w+)", path.read_text())}
    return sorted(name for name in found if "_for_cpu" not in name)


@pytest.mark.parametrize(
    ("name", "release"), [*((name, "2.11") for name in SCHEMAS), *((name, "installed") for name in operators_used())]
)
def test_calls_bind_to_the_operators_of_both_releases(monkeypatch, name, release):
    operator, calls = getattr(torch.ops.aten, name), []

    def heard(*args, **kwargs):
        calls.append((args, kwargs))
        return operator(*args, **kwargs)

    monkeypatch.setattr(torch.ops.aten, name, heard)
    q, k, v = on_meta(300, 300, (8, 2, 64))
    block = Block(q=q, k=k, v=v, scale=0.1)
    varlen, pack, efficient = VarlenKernel(TorchVarlenOps()), pack_on_meta(50), EfficientKernel()
    cudnn = DenseKernel(CudnnOps())
    for forward, backward in (
        (varlen.forward_pack, varlen.backward_pack),
        (efficient.forward, efficient.backward),
        (cudnn.forward, cudnn.backward),
    ):
        more = (pack,) if forward == varlen.forward_pack else ()
        out, lse = forward(block, *more)
        backward(out, block, Saved(out=out, lse=lse), *more)
    schema = operator.default._schema if release == "installed" else torch._C.parse_schema(SCHEMAS[name])
    assert len(calls) == 1
    assert bind(schema, *calls[0]) == []


def test_a_call_that_does_not_bind_is_seen():
    schema = torch._C.parse_schema(SCHEMAS["_flash_attention_backward"])
    names = [each.name for each in schema.arguments]
    assert bind(schema, (0,) * 14, {"scale": 0.1}) == []
    assert bind(schema, (0,) * 13, {}) == [f"no {names[13]}"]
    assert bind(schema, (0,) * 14, {"window_left": 3}) == ["unknown window_left"]
    assert bind(schema, (0,) * 15, {}) == ["15 places of 14"]
