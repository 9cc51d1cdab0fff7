"""Contracts of the packages that compute layers with states and convolutions on GPUs, kept on the CPU.

Signatures and rules are those of fla-core 0.6.0, mamba-ssm 2.3.2 and causal-conv1d 1.6.1: a call that a package would
misread fails here. What they compute is transformers' own function, one document after the other, in any dtype.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor
from transformers.models.kimi_linear import modeling_kimi_linear
from transformers.models.nemotron_h import modeling_nemotron_h
from transformers.models.qwen3_5 import modeling_qwen3_5

from lengthwise.models.mixer_kernels import CONVOLUTION, DELTA_RULE, KDA, MAMBA2


def _plain(module: Any, name: str) -> Any:
    function = getattr(module, name)
    return inspect.unwrap(getattr(function, "function", function))


_PLAIN = {
    DELTA_RULE: _plain(modeling_qwen3_5, DELTA_RULE),
    KDA: _plain(modeling_kimi_linear, KDA),
    MAMBA2: _plain(modeling_nemotron_h, MAMBA2),
    CONVOLUTION: _plain(modeling_nemotron_h, CONVOLUTION),
}


def _delta_rule(name: str, given: list[Tensor], cu_seqlens: Tensor, cu_seqlens_cpu: Tensor, **asked: Any) -> Any:
    q, k, v, g, _ = given
    start, last = asked["initial_state"], asked["output_final_state"]
    wide = torch.promote_types(q.dtype, torch.float32)
    assert q.dtype == k.dtype == v.dtype, "one dtype"
    assert q.shape == k.shape, "queries like keys"
    assert q.shape[0] == 1, "one row with cu_seqlens"
    assert k.shape[-1] <= 256, "keys of at most 256"
    assert g.dtype == wide, f"decays in fp32, got {g.dtype}"
    assert cu_seqlens.dtype == cu_seqlens_cpu.dtype == torch.int64, "LongTensor"
    assert cu_seqlens_cpu.device.type == "cpu", "on the host"
    assert torch.equal(cu_seqlens, cu_seqlens_cpu), "the same borders twice"
    lengths = cu_seqlens_cpu.diff().tolist()
    assert min(lengths) > 0, "no empty document"
    assert sum(lengths) == q.shape[1], "borders must reach the last row"
    if start is not None:
        assert start.shape == (len(lengths), v.shape[2], k.shape[-1], v.shape[-1]), f"states {tuple(start.shape)}"
        assert start.dtype == wide, f"states in fp32, got {start.dtype}"
    outs, states = [], []
    for number, (*part, decay, step) in enumerate(zip(*(x.split(lengths, 1) for x in given), strict=True)):
        state = None if start is None else start[number : number + 1]
        how = {"g": decay, "beta": step, "initial_state": state, "output_final_state": last}
        out, end = _PLAIN[name](*part, **how, use_qk_l2norm_in_kernel=asked["use_qk_l2norm_in_kernel"])
        outs.append(out)
        states.append(end)
    return torch.cat(outs, 1), torch.cat(states) if last else None


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    *,
    cu_seqlens: Tensor,
    cu_seqlens_cpu: Tensor,
) -> tuple[Tensor, Tensor | None]:
    """Stand for fla's function of this name and, where decays are of channels, its `chunk_kda`."""
    assert scale is None, "by the size of a key"
    name = KDA if g.dim() == 4 else DELTA_RULE
    how = {"initial_state": initial_state, "output_final_state": output_final_state}
    how["use_qk_l2norm_in_kernel"] = use_qk_l2norm_in_kernel
    return _delta_rule(name, [q, k, v, g, beta], cu_seqlens, cu_seqlens_cpu, **how)


def mamba_chunk_scan_combined(
    x: Tensor,
    dt: Tensor,
    A: Tensor,  # noqa: N803
    B: Tensor,  # noqa: N803
    C: Tensor,  # noqa: N803
    chunk_size: int,
    D: Tensor | None = None,  # noqa: N803
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    return_varlen_states: bool = False,
) -> Any:
    """Stand for mamba-ssm's function; documents of a row are told apart by `seq_idx` alone."""
    assert z is None, "no gate"
    assert initial_states is None or seq_idx is None, "of the first document alone"
    assert cu_seqlens is None, "for states without backward"
    assert not return_varlen_states, "without backward"
    assert A.shape == dt.shape[2:], "a decay a head"
    assert B.shape == C.shape, "as many groups"
    lengths = [x.shape[1]]
    if seq_idx is not None:
        assert seq_idx.dtype == torch.int32, "int32"
        assert seq_idx.shape == x.shape[:2], "a number a row"
        lengths = seq_idx[0].unique_consecutive(return_counts=True)[1].tolist()
    how = {"D": D, "dt_bias": dt_bias, "dt_softplus": dt_softplus, "dt_limit": dt_limit, "return_final_states": True}
    how["initial_states"] = initial_states
    parts = zip(*(each.split(lengths, 1) for each in (x, dt, B, C)), strict=True)
    found = [_PLAIN[MAMBA2](hidden, step, A, b, c, chunk_size, **how) for hidden, step, b, c in parts]
    out = torch.cat([each for each, _ in found], 1)
    return (out, found[-1][1]) if return_final_states else out


def causal_conv1d_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    seq_idx: Tensor | None = None,
    initial_states: Tensor | None = None,
    return_final_states: bool = False,
    final_states_out: Tensor | None = None,
    activation: str | None = None,
) -> Tensor:
    """Stand for causal-conv1d's function in its layout of channels last."""
    assert seq_idx is None, "what goes before a span is in the row"
    assert initial_states is None, "what goes before a span is in the row"
    assert not return_final_states, "no state"
    assert final_states_out is None, "no state"
    assert activation in (None, "silu", "swish"), f"no activation {activation}"
    assert 2 <= weight.shape[-1] <= 4, f"widths of 2 to 4, got {weight.shape[-1]}"
    assert x.stride(1) == 1, f"channels last, got strides {x.stride()}"
    assert all(each % 8 == 0 for each in (x.shape[1], x.stride(0), x.stride(2))), f"multiples of 8, got {x.stride()}"
    assert bias is None or bias.dtype == weight.dtype, "a bias like the weight"
    return _PLAIN[CONVOLUTION](x, weight, bias, activation=activation)


STAND_INS = {
    DELTA_RULE: chunk_gated_delta_rule,
    KDA: chunk_gated_delta_rule,
    MAMBA2: mamba_chunk_scan_combined,
    CONVOLUTION: causal_conv1d_fn,
}
