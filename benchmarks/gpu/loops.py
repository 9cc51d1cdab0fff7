"""One rank's whole steps, ours and those of plain Hugging Face: forward, backward, clipping, AdamW.

Rivals have the same flat master weights and gradient buffers, so that only loop, attention and update differ; their
update is torch's fused AdamW over the whole shards. `packed` is Hugging Face with torch's varlen attention, registered
under its own interface and fed its own `cu_seq_lens_q`; on the CPU, which has no such kernel, a loop over documents.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from testing.laid import whole_parameters
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from gpu.setting import draw_model, model_source, packs_of
from lengthwise.comm import Mesh, SoloTransport, Transport
from lengthwise.config import OptimizerConfig
from lengthwise.core.plan import Plan
from lengthwise.cost import logits_at_once
from lengthwise.engine.batch import StepBatch
from lengthwise.engine.optimizer import sliced_optimizer
from lengthwise.engine.step import StepContext, run_part
from lengthwise.models import (
    Computing,
    choose_layers,
    choose_losses,
    choose_mixers,
    choose_model_kernel,
    plain_attention,
)

VARLEN = "torch_varlen"


class OurLoop:
    """What training does with one rank's plan; `said` holds which kernels it took, and why."""

    def __init__(
        self, name: str, device: torch.device, dtype: torch.dtype, *, computing: Computing | None = None
    ) -> None:
        self.device, self.said = device, list[str]()
        self.model = draw_model(name, device)
        self.transport: Transport = SoloTransport()
        self.parameters = whole_parameters(self.model, self.transport, dtype=dtype)
        self.optimizer = sliced_optimizer(OptimizerConfig(), self.model, self.parameters, 0)
        config: Any = self.model.config
        self.computing = computing or Computing()
        choose_layers(self.model, self.computing, device, dtype=dtype, say=self.said.append).put()
        self.kernel = choose_model_kernel(config, self.computing, device, dtype=dtype, say=self.said.append)
        choose_mixers(self.model, self.transport, device, dtype=dtype, say=self.said.append)
        how = {"dtype": dtype, "computing": self.computing, "say": self.said.append}
        choose_losses(self.model, self.transport, device, **how)

    def work(self, plan: Plan, batch: StepBatch, *, transport: Transport | None = None) -> float:
        """Run forward and backward of a rank's microbatches; return its summed loss."""
        there = transport or self.transport
        config: Any = self.model.config
        at_once = logits_at_once(config.vocab_size, on_gpus=self.device.type == "cuda")
        context = StepContext(self.model, Mesh(there, 1), self.kernel, name="benchmark", logits_at_once=at_once)
        return run_part(plan, batch, context).loss_sum

    def step(self, plan: Plan, batch: StepBatch) -> float:
        """Run a whole step; return its loss."""
        loss = self.work(plan, batch)
        self.optimizer.end_step(1e-5, self.transport)
        return loss / batch.loss_tokens


class PlainLoop:
    """Plain Hugging Face: `packed` by torch's varlen attention, else one document at a time by its own sdpa."""

    def __init__(
        self,
        name: str,
        device: torch.device,
        dtype: torch.dtype,
        *,
        packed: bool,
        pack_tokens: int,
        fused_layers: str = "off",
    ) -> None:
        AttentionInterface.register(VARLEN, _varlen)
        AttentionMaskInterface.register(VARLEN, lambda *_args, **_options: None)
        self.device, self.said, self._packed, self._pack_tokens = device, list[str](), packed, pack_tokens
        self.model = draw_model(name, device, attention=VARLEN if packed else plain_attention(model_source(name)))
        self.parameters = whole_parameters(self.model, SoloTransport(), dtype=dtype)
        computing = Computing(fused_layers=fused_layers)
        choose_layers(self.model, computing, device, dtype=dtype, say=self.said.append).put()
        fused = device.type == "cuda"
        self._optimizer = sliced_optimizer(OptimizerConfig(), self.model, self.parameters, 0, fused=fused)

    def step(self, plan: Plan, batch: StepBatch) -> float:
        """Run a whole step; of the plan only the kind of recomputation counts."""
        self._recompute(plan.microbatches[0].recompute)
        packs = packs_of(batch.lengths, self._pack_tokens) if self._packed else [(i,) for i in range(len(batch.ids))]
        losses = [self._forward_backward(batch, pack) for pack in packs]
        self._optimizer.end_step(1e-5, SoloTransport())
        return float(torch.stack(losses).sum())

    def _recompute(self, kind: str) -> None:
        model: Any = self.model
        word = "activation" if hasattr(model, "activation_checkpointing_enable") else "gradient"  # its name before
        if kind == "none":
            getattr(model, f"{word}_checkpointing_disable")()
        else:
            options = {f"{word}_checkpointing_kwargs": {"use_reentrant": False}}
            getattr(model, f"{word}_checkpointing_enable")(**options)

    def _forward_backward(self, batch: StepBatch, pack: Sequence[int]) -> Tensor:
        ids, positions, labels, borders = (x.to(self.device) for x in _pack_tensors(batch, pack))
        more: dict[str, Any] = {}
        if self._packed:
            longest = max(batch.lengths[index] for index in pack)
            more = dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k"), borders)
            more |= dict.fromkeys(("max_length_q", "max_length_k"), longest)
        loss = self.model(
            input_ids=ids[None],
            position_ids=positions[None],
            labels=ids[None],
            shift_labels=labels[None],
            use_cache=False,
            num_items_in_batch=batch.loss_tokens,
            **more,
        ).loss
        loss.backward()
        return loss.detach()


def _varlen(
    _module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    cu_seq_lens_q: Tensor,
    max_length_q: int,
    **_others: Any,
) -> tuple[Tensor, None]:
    """Attend documents side by side; (1, heads, tokens, head_dim) in, (1, tokens, heads, head_dim) out."""
    assert attention_mask is None, "documents are kept apart by their borders"
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    if not q.is_cuda:
        borders = cu_seq_lens_q.tolist()
        rows = [slice(start, stop) for start, stop in pairwise(borders)]
        outs = [_one_document(q[row], k[row], v[row], scaling) for row in rows]
        return torch.cat(outs)[None], None
    from torch.nn.attention.varlen import varlen_attn

    known, options = inspect.signature(varlen_attn).parameters, {}
    if "enable_gqa" in known:  # releases without it take fewer KV heads as they are
        options["enable_gqa"] = q.shape[1] != k.shape[1]
    options |= {"window_size": (-1, 0)} if "window_size" in known else {"is_causal": True}
    borders, longest = cu_seq_lens_q, max_length_q
    out: Any = varlen_attn(q, k, v, borders, borders, longest, longest, scale=scaling, **options)
    return out[None], None


def _one_document(q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Tensor:
    query, key, value = (x.transpose(0, 1)[None] for x in (q, k, v))
    out = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=True)
    return out[0].transpose(0, 1)


def _pack_tensors(batch: StepBatch, pack: Sequence[int]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return (ids, positions, shift_labels), each (tokens,), and the borders of documents, int32."""
    ids, labels = (torch.cat(each) for each in zip(*(batch.whole(index) for index in pack), strict=True))
    lengths = [batch.lengths[index] for index in pack]
    positions = torch.cat([torch.arange(length) for length in lengths])
    borders = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    return ids, positions, labels, borders
